"""Defines a searcher: what a search proposes, and what it decides when a trial ends an epoch.

`CandidateList` is one whose candidates are all known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class TrainTo:
    """Let a trial train until it has ended so many epochs; a paused one goes on."""

    trial: int
    epochs: int


@dataclass(frozen=True)
class Pause:
    """Let a trial rest: its state goes to the store and leaves the memory of the workers.

    `rung` says after how many epochs it is compared with others, if it rests for that; tables show
    it.
    """

    trial: int
    rung: int | None = None


@dataclass(frozen=True)
class Stop:
    """End a trial; what it has reached is its result."""

    trial: int
    reason: str


@dataclass(frozen=True)
class Fork:
    """Propose a candidate that goes on from the state of `parent` after the epoch told last.

    Its parameters must give the parent's model and optimizer; values such as a learning rate may
    differ. It takes over weights and the optimizer's state, and the place in training: its LR
    schedule goes on where its own parameters would have brought it by then, and one that steps on a
    metric begins anew. It trains until it has ended `epochs` epochs, those of its parent included.
    """

    parent: int
    params: Mapping[str, Any]
    epochs: int


SearchDecision = TrainTo | Pause | Stop | Fork


@dataclass(frozen=True)
class SearchedRun:
    """Holds what a searcher that comes with us knows of its run.

    Attributes:
        metric: the name in what `tell` is given that decides, such as "val_accuracy".
        direction: returns "min" or "max", which values of it are better. Only the first trial that
            is admitted says so, and nothing is measured before.
        partitions: of the training rows; as many on any number of workers.
        given: what the search was given when the run began, as its `given` returned it; empty
            before that.
        rows: that are trained on, of each partition.
    """

    metric: str
    direction: Callable[[], str]
    partitions: int
    given: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[int] = ()


@runtime_checkable
class Searcher(Protocol):
    """Proposes candidates and decides how far each of them trains.

    Candidates are numbered from 0, in the order in which `ask` returns them and `tell` forks them;
    the number of a candidate is that of its trial. All calls come from one thread. Decisions depend
    on nothing but the calls before: a run that was interrupted makes a new searcher and tells it
    again what it told the first one. `cerebro_hydra.testing.searcher_case` has the suite that a
    searcher must pass.
    """

    epochs: int
    """How many epochs a candidate trains before it needs a `TrainTo`."""

    @property
    def closed(self) -> bool:
        """Whether nothing will be proposed or decided any more; once True, it stays True.

        All trials then end with the epochs that they were given, and paused ones are stopped.
        """

    def ask(self) -> Mapping[str, Any] | None:
        """Return the parameters of the next candidate, as JSON.

        None means that there is none now. It is called again after each `tell`, as long as the
        searcher is not `closed`, until it returns None again.
        """

    def tell(
        self, trial: int, epochs: int, metrics: Mapping[str, float] | None
    ) -> Iterable[SearchDecision]:
        """Take in what a trial has measured, and return what is decided now, on any trial.

        Trials end their epochs in any order. Nothing is told of a trial that is over.

        Args:
            trial: its number.
            epochs: how many epochs it has ended.
            metrics: what the last of them measured, such as "val_loss"; or None if the trial is
                over: it was refused, has failed, was stopped, or does not improve any more, which
                is what its last epoch has shown.
        """


@runtime_checkable
class ExtendingSearcher(Searcher, Protocol):
    """A searcher that says how its run goes on when it is over and gets more epochs.

    Of any other one's run, the trials go on that may train as far as any other.
    """

    def extend(self, num_epochs: int) -> Iterable[TrainTo]:
        """Return which trials go on, and how far, when trials may train `num_epochs` from now on.

        A new searcher is told again what the first one was told before it closed, and is then asked
        this; after it, `ask` is called until it returns None. `tell` is not called any more.
        """


class CandidateList:
    """Is the searcher of a grid, of random draws, and of every other list of candidates."""

    def __init__(self, candidates: Sequence[Mapping[str, Any]], epochs: int) -> None:
        self.epochs = epochs
        self._left = list(reversed(candidates))

    @property
    def closed(self) -> bool:
        """Whether every candidate was proposed."""
        return not self._left

    def ask(self) -> Mapping[str, Any] | None:
        """Return the next candidate."""
        return self._left.pop() if self._left else None

    def tell(
        self, trial: int, epochs: int, metrics: Mapping[str, float] | None
    ) -> Iterable[SearchDecision]:
        """Decide nothing: no trial depends on another."""
        return ()
