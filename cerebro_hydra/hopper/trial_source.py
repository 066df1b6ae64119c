"""Defines where a run gets its trials from, before it begins and while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.run_config import trial_config
from cerebro_hydra.plan.events import Event, SearchClosed, TrialAdded, TrialForked
from cerebro_hydra.plan.instructions import CutFiner, Instruction
from cerebro_hydra.plan.recut_events import RecutRefused
from cerebro_hydra.storage.run_document import TrialSpec

MergeStates = Callable[[int, list[dict[str, Any]]], dict[str, float]]
"""Merges what a trial's custom metrics made of each validation partition, in partition order."""


@dataclass(frozen=True)
class NewTrial:
    """Says that a trial can begin, whose first state is in the run folder; it is decided next."""

    spec: TrialSpec
    event: TrialAdded | TrialForked


News = Event | NewTrial | BaseException
"""What a source tells; an error ends the run."""


class TrialSource(Protocol):
    """Proposes a run's trials, and follows it.

    All methods are called from the thread that runs the coordinator.
    """

    def start(self, put: Callable[[News], None]) -> Iterable[News]:
        """Return what begins the run; `put` takes from any thread what comes later."""

    def follow(self, event: Event, instructions: Sequence[Instruction]) -> Iterable[Event]:
        """Take in an event of the run with its instructions; return what to handle next.

        Each `CutFiner` is answered with `TrialRecut` or `RecutRefused`, now or later by `put`.
        """

    def merge_metrics(self, trial: int, states: list[dict[str, Any]]) -> dict[str, float]:
        """Merge what a trial's custom metrics made of each partition, in partition order.

        It returns a value per metric; what it raises fails the trial alone.
        """

    def close(self) -> None:
        """Put nothing more, because the run is over."""


class GivenTrials:
    """Is the source of a run whose trials are known, and train for the same number of epochs.

    Raises:
        ConfigurationError: there are no trials, or one has custom metrics and there is no
            `merge_metrics`.
    """

    def __init__(
        self, specs: Sequence[TrialSpec], epochs: int, merge_metrics: MergeStates | None = None
    ) -> None:
        if not specs:
            raise ConfigurationError("there are no trials; a run needs at least one trial")
        for spec in specs:
            if merge_metrics is None and spec.custom_metrics:
                raise ConfigurationError(
                    f"trial {spec.trial} has the custom metrics {list(spec.custom_metrics)}, and "
                    "nothing merges them; pass merge_metrics="
                )
        self._specs, self._epochs = specs, epochs
        self._merge_metrics = merge_metrics

    def start(self, put: Callable[[News], None]) -> Iterable[News]:
        """Add every trial with its whole budget, and close the search."""
        for spec in self._specs:
            yield NewTrial(spec, TrialAdded(trial_config(spec), self._epochs))
        yield SearchClosed()

    def follow(self, event: Event, instructions: Sequence[Instruction]) -> Iterable[Event]:
        """Decide nothing; no trial that is given is cut anew."""
        asked = (each for each in instructions if isinstance(each, CutFiner))
        return [RecutRefused(each.trial, each.error) for each in asked]

    def merge_metrics(self, trial: int, states: list[dict[str, Any]]) -> dict[str, float]:
        """Merge with the function that was given."""
        assert self._merge_metrics is not None
        return self._merge_metrics(trial, states)

    def close(self) -> None:
        """Do nothing."""
