"""Keeps what the trials of a run are: where they come from, their documents, who has been told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from cerebro_hydra.errors import StoreError
from cerebro_hydra.observe.records import Decision, NotSaved
from cerebro_hydra.plan.messages.events import (
    Event,
    TrialAdded,
    TrialForked,
    TrialRecut,
)
from cerebro_hydra.plan.messages.instructions import Instruction
from cerebro_hydra.storage.run_document import TrialSpec
from cerebro_hydra.storage.run_folder import RunFolder

MergeStates = Callable[[int, list[dict[str, Any]]], dict[str, float]]
"""Merges what a trial's custom metrics made of each validation partition, in partition order."""


@dataclass(frozen=True)
class NewTrial:
    """Says that a trial can begin, whose first state is in the run folder; it is decided next."""

    spec: TrialSpec
    event: TrialAdded | TrialForked


News = Event | NewTrial | NotSaved | BaseException
"""What a source tells; an error ends the run."""


class NotWritten(StoreError):
    """The store refuses a file of a trial, which can't be admitted without it.

    Attributes:
        error: says why.
        again: writes that file.
    """

    def __init__(self, error: StoreError, again: Callable[[], object]) -> None:
        super().__init__(str(error))
        self.error, self.again = error, again


T = TypeVar("T")


def written(write: Callable[[], T]) -> T:
    """Write a file of a trial; return what that returns.

    Raises:
        NotWritten: the store refuses it.
    """
    try:
        return write()
    except StoreError as error:
        raise NotWritten(error, write) from error


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


class TrialSpecs:
    """Holds the spec of each trial that is not over; an agent is told it once, on its first use.

    Args:
        folder: the run's; trials that were admitted by an earlier driver, and those that train
            again after their end, are read from it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._specs: dict[int, TrialSpec] = {}
        self._told: dict[int, set[str]] = {}

    def add(self, spec: TrialSpec) -> None:
        """Take in what a trial is, before anything else is asked of it."""
        self._specs[spec.trial] = spec

    @property
    def known(self) -> Collection[TrialSpec]:
        """Return those that this driver has been asked of."""
        return self._specs.values()

    def change(self, decision: Decision) -> None:
        """Take in what a trial is in its finer cut; agents are told anew."""
        spec = spec_of(decision)
        self._told.pop(spec.trial, None)
        self.add(spec)

    def __getitem__(self, trial: int) -> TrialSpec:
        """Return what a trial is; StoreError if that is neither known nor to be read."""
        if trial not in self._specs:
            self._specs[trial] = self._folder.read_trial(trial, self._folder.run_id)
        return self._specs[trial]

    def untold(self, trial: int, incarnation: str) -> dict[str, Any] | None:
        """Return a trial's spec in JSON, or None if this agent was given it before."""
        told = self._told.setdefault(trial, set())
        if incarnation in told:
            return None
        told.add(incarnation)
        return self[trial].to_json()

    def end(self, trial: int) -> Collection[str]:
        """Forget a trial that is over; return the agents that were told of it."""
        self._specs.pop(trial, None)
        return self._told.pop(trial, set())


def write_recut(folder: RunFolder, decision: Decision) -> None:
    """Write the states in the finer cut, and last what the trial is; their segments are there.

    Writing them again after a crash changes nothing, until the trial goes on.
    """
    recut = _recut(decision)
    for state in recut.states:
        shards = [
            {"frozen": frozen, "trainable": trainable, "cursor": state.cursor}
            for frozen, trainable in state.digests
        ]
        named = {"trial": recut.config.trial, "state": state.state, "shards": shards}
        folder.write_state(recut.config.trial, state.state, named)
    folder.write_trial(spec_of(decision))


def is_written(folder: RunFolder, decision: Decision) -> bool:
    """Return whether all of it was written; the trial may go on with other code."""
    spec = spec_of(decision)
    found = folder.read_trial(spec.trial, folder.run_id)
    return replace(found, code=None) == replace(spec, code=None)


def spec_of(decision: Decision) -> TrialSpec:
    """Return what the trial is from now on."""
    where = f"the document of a trial in record {decision.seq} of the journal"
    return TrialSpec.from_json(_recut(decision).document, where)


def _recut(decision: Decision) -> TrialRecut:
    assert isinstance(decision.event, TrialRecut), f"{decision} changes no cut"
    return decision.event
