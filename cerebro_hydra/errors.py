"""Defines errors that tell the user what was wrong, with its value and name, and what to do."""

from __future__ import annotations

from typing import Any

_SPELT_WITH_A_VOWEL = frozenset("AEFHILMNORSX")  # as an LSTM, an SGD


def kind_of(value: object) -> str:
    """Return the name of a value's type with its article, as "a list", "an int" or "an LSTM"."""
    name = type(value).__name__
    spelt = name[:2].isupper() and len(name) > 1
    vowel = name[0] in _SPELT_WITH_A_VOWEL if spelt else name[0] in "AEIOaeio"
    return f"{'an' if vowel else 'a'} {name}"


class CerebroHydraError(Exception):
    """Is the base of every error that this package raises on purpose."""


class ConfigurationError(CerebroHydraError, ValueError):
    """An argument or setting is wrong; raised before any training starts."""


class SetupError(CerebroHydraError, RuntimeError):
    """The surroundings (Spark settings, Java, executors) can't run this; says what to change."""


class JobStopped(SetupError):
    """Somebody stopped what a run's agents live in, such as its SparkContext."""


class DataError(CerebroHydraError):
    """The rows can't be used, or what was read differs from what was written."""


class StoreError(CerebroHydraError):
    """A store can't be read or written."""


class JournalError(CerebroHydraError):
    """The journal of a run is incomplete or contradicts itself."""


class ScratchFull(CerebroHydraError, OSError):
    """A worker's scratch disk has no room for a shard."""


class TransferError(CerebroHydraError):
    """Shards could not be fetched from their owner; never the trial's own fault."""


class Cancelled(CerebroHydraError):
    """The coordinator took the task back."""


class NonFiniteLoss(CerebroHydraError):
    """A loss became NaN or infinite, or the gradients of every loss scale did."""


class StepDiffers(CerebroHydraError):
    """A step in shards differs from the same step of the uncut model; the message says where."""


class InvalidSchedule(CerebroHydraError):
    """A list of actions breaks a rule of its schedule."""


class AllTrialsFailed(CerebroHydraError):
    """No trial of a search finished; carries the trials with their tracebacks."""


class Interrupted(KeyboardInterrupt):
    """A run was interrupted; `result` is its `SearchResult` up to there, None before it began."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class TrialFailed(CerebroHydraError):
    """One trial of several ended without a model; carries its traceback and the run's folder."""


class ReplayError(CerebroHydraError):
    """A run can't be replayed: its factory, data or checkpoints can't be found."""
