"""Follows a run's decisions with a searcher, and turns what it decides into events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any

from cerebro_hydra.errors import ConfigurationError, JournalError
from cerebro_hydra.plan.messages.events import (
    BudgetExtended,
    Event,
    SearchClosed,
    TrialAdded,
    TrialForked,
    TrialPaused,
    TrialProposed,
    TrialRefused,
    TrialResumed,
    TrialStopped,
)
from cerebro_hydra.plan.messages.instructions import EndEpoch, FinishTrial, Instruction
from cerebro_hydra.tune.searchers.searcher import (
    Fork,
    Pause,
    SearchDecision,
    Searcher,
    Stop,
    TrainTo,
)
from cerebro_hydra.tune.searchers.space import as_json


@dataclass(frozen=True)
class Target:
    """Says when a run has reached what was asked of it: a trial measures all of it in one epoch.

    Args:
        values: by the names of what epochs measure, such as "val_accuracy".
        directions: returns "min" or "max" of each metric, by its name alone. Only the first trial
            that is admitted says so.
    """

    values: Mapping[str, float]
    directions: Callable[[], Mapping[str, str]]

    def check(self) -> None:
        """Refuse a metric that is not measured.

        Raises:
            ConfigurationError: it is named, with those that are.
        """
        for name in self.values:
            if _bare(name) not in self.directions():
                raise ConfigurationError(
                    f"target has {name!r}, which is not measured; the trials measure "
                    f"{list(self.directions())}"
                )

    def reached(self, instructions: Sequence[Instruction]) -> str:
        """Return in words who has reached it; empty if nobody."""
        for each in instructions:
            if isinstance(each, EndEpoch) and all(
                self._is_reached(name, each.metrics.get(name, nan)) for name in self.values
            ):
                found = ", ".join(f"{name} {each.metrics[name]:.6g}" for name in self.values)
                return f"trial {each.trial} has reached {found} after epoch {each.epoch + 1}"
        return ""

    def _is_reached(self, name: str, value: float) -> bool:
        asked = self.values[name]
        if not isfinite(value):
            return False
        return value <= asked if self.directions()[_bare(name)] == "min" else value >= asked


def checked_target(target: Any, validation: Any) -> dict[str, float] | None:
    """Return the target that a search is given.

    Raises:
        ConfigurationError: it names no metrics, no numbers, or what is not measured.
    """
    if target is None:
        return None
    if not isinstance(target, Mapping) or not target:
        raise ConfigurationError(
            f'target is {target!r}; give a dictionary such as {{"accuracy": 0.97}}, or None'
        )
    for name, value in target.items():
        if not isinstance(name, str) or isinstance(value, bool):
            raise ConfigurationError(f"target has {name!r}: {value!r}; give a metric and a number")
        if not isinstance(value, int | float) or not isfinite(value):
            raise ConfigurationError(f"target has {name!r}: {value!r}; give a finite number")
        if validation is None and name not in ("loss", "train_loss"):
            raise ConfigurationError(
                f"target has {name!r} and validation is None, but metrics are measured on "
                "validation rows only; give validation=0.2, or a target of the training loss"
            )
    return dict(target)


def _bare(name: str) -> str:
    return name.removeprefix("val_").removeprefix("train_")


@dataclass(slots=True)
class _Candidate:
    """Knows of one candidate what its searcher does."""

    budget: int
    parent: int | None
    told: int = 0  # epochs
    resting: bool = False
    stopped: bool = False  # and perhaps not over yet
    over: bool = False
    admitted: bool = False
    refused: bool = False
    forks: int = 0  # that wait to be admitted, during which it does not go on
    held: list[Event] = field(default_factory=list)  # what was decided of it meanwhile, or before

    @property
    def trains(self) -> bool:
        """Return whether something will be told of it, if only its end."""
        at_work = not self.resting and self.told < self.budget
        return not self.over and (self.stopped or at_work)


class AskAndTell:
    """Asks and tells one searcher; it knows no thread and no clock.

    It is given each event of the run with its instructions, as the journal has them, and answers
    with events to handle next. What it answers depends on nothing else, so that `replay` brings a
    new searcher to where the one of an interrupted run was.

    A trial that is forked waits until the fork is admitted, because its workers drop a state as
    soon as the next one is safe.
    """

    DECIDED = (
        BudgetExtended, SearchClosed, TrialPaused, TrialProposed, TrialResumed, TrialStopped
    )  # fmt: skip
    """The kinds of events that it answers with."""

    def __init__(self, searcher: Searcher, num_epochs: int, partitions: int) -> None:
        """Ask nothing yet; no trial may train for more than `num_epochs`.

        Raises:
            ConfigurationError: it is no searcher.
        """
        if not isinstance(searcher, Searcher):
            raise ConfigurationError(
                f"{searcher!r} is no searcher; give an object with epochs, closed, ask and tell"
            )
        self._searcher, self._num_epochs, self._partitions = searcher, num_epochs, partitions
        self._trials: list[_Candidate] = []
        self._training: set[int] = set()  # the trials of which something will be told
        self._forks = 0  # that wait to be admitted
        self._closed = False

    def begin(self) -> list[Event]:
        """Return what is proposed before the first trial trains.

        Raises:
            ConfigurationError: the searcher proposes what can't be used, or nothing.
        """
        self._check_epochs("epochs", self._searcher.epochs, 0)
        return self._go_on([])

    def follow(self, event: Event, instructions: Sequence[Instruction]) -> list[Event]:
        """Return what the searcher decides when this has happened.

        Raises:
            ConfigurationError: it decides what can't be done, or waits although no trial trains.
        """
        if self._closed:
            return []
        decided, due = list[Event](), False  # whether the searcher is asked and may have closed
        for instruction in instructions:
            match instruction:
                # An epoch that is trained again, because its states were lost, was told already.
                # One that ends by itself is over then, and not only once its result is stored.
                case EndEpoch(trial, epoch, metrics, last) if epoch == self._trials[trial].told:
                    self._trials[trial].told += 1
                    self._trials[trial].over = last
                    decided += self._tell(trial, None if last else metrics)
                    due = True
                case FinishTrial(trial) if not self._trials[trial].over:
                    self._trials[trial].over = True
                    decided += self._tell(trial, None)
                    due = True
        match event:
            case TrialAdded(config):
                decided += self._admitted(config.trial)
                due |= bool(decided)
            case TrialForked(config):
                decided += [*self._admitted(config.trial), *self._fork_settled(config.trial)]
                due = True
            case TrialRefused(trial):
                self._trials[trial].refused, self._trials[trial].held = True, []
                decided += self._fork_settled(trial)
        return self._go_on(decided) if due else []

    def replay(self, records: Iterable[tuple[Event, Sequence[Instruction]]]) -> list[Event]:
        """Bring a new searcher to where a journal ends; return what is still to be handled.

        Raises:
            JournalError: the searcher decides otherwise than the journal says.
        """
        expected = self.begin()
        for event, instructions in records:
            if isinstance(event, self.DECIDED):
                if not expected or expected[0] != event:
                    raise JournalError(
                        f"the journal says {event}, and the searcher {expected[:1]}; resume the "
                        "run with the searcher that it was started with"
                    )
                del expected[0]
            expected += self.follow(event, instructions)
        return expected

    # ------------------------------------------------------------------ parts of `follow`

    def _tell(self, trial: int, metrics: Mapping[str, float] | None) -> Iterator[Event]:
        if not self._searcher.closed:  # else the search only waits for forks to be admitted
            for decision in self._searcher.tell(trial, self._trials[trial].told, metrics):
                yield from self._decided(decision)
        self._note(trial)

    def _decided(self, decision: SearchDecision) -> Iterator[Event]:
        if not isinstance(decision, SearchDecision):
            raise ConfigurationError(
                f"the searcher decides {decision!r}; return TrainTo, Pause, Stop or Fork"
            )
        number = decision.parent if isinstance(decision, Fork) else decision.trial
        if number not in range(len(self._trials)):
            raise ConfigurationError(
                f"the searcher decides {decision}, and proposed {len(self._trials)} candidates; "
                "number them from 0"
            )
        trial = self._trials[number]
        if isinstance(decision, Fork):
            yield from self._forked(decision, trial)
        elif trial.refused:
            return
        elif trial.forks or not trial.admitted:
            trial.held += self._events(decision, trial)
        else:
            yield from self._events(decision, trial)
        self._note(number)

    def _note(self, number: int) -> None:
        if self._trials[number].trains:
            self._training.add(number)
        else:
            self._training.discard(number)

    def _events(self, decision: TrainTo | Pause | Stop, trial: _Candidate) -> Iterator[Event]:
        match decision:
            case TrainTo(number, epochs):
                self._check_epochs(f"the epochs of trial {number}", epochs, trial.told)
                trial.budget = max(trial.budget, epochs)
                yield BudgetExtended(number, epochs)
                if trial.resting:
                    trial.resting = False
                    yield TrialResumed(number)
            case Pause(number, rung):
                trial.resting = True
                yield TrialPaused(number, rung)
            case Stop(number, reason):
                trial.stopped = True
                yield TrialStopped(number, reason)

    def _forked(self, fork: Fork, parent: _Candidate) -> Iterator[Event]:
        if not parent.told:
            raise ConfigurationError(
                f"the searcher decides {fork}, but trial {fork.parent} has ended no epoch; fork it "
                "after an epoch of it was told"
            )
        if parent.trains and not (parent.stopped or parent.forks):
            parent.held.append(TrialResumed(fork.parent))
            yield TrialPaused(fork.parent)
        parent.forks += 1
        self._forks += 1
        self._check_epochs("the epochs of a fork", fork.epochs, parent.told)
        state = parent.told * self._partitions
        yield self._proposed(fork.params, fork.epochs, fork.parent, state)

    def _proposed(
        self, params: Mapping[str, Any], epochs: int, parent: int | None = None, state: int = 0
    ) -> TrialProposed:
        number = len(self._trials)
        if not isinstance(params, Mapping):
            raise ConfigurationError(
                f"the searcher proposes {params!r}; give a dict of parameters, or None"
            )
        known = as_json(f"candidate {number} is", dict(params))
        told = self._trials[parent].told if parent is not None else 0
        self._trials.append(_Candidate(epochs, parent, told))
        self._training.add(number)
        return TrialProposed(number, known, epochs, parent, state)

    def _admitted(self, number: int) -> list[Event]:
        """Return what was decided of a trial before it was admitted."""
        trial = self._trials[number]
        trial.admitted, held, trial.held = True, trial.held, []
        return held

    def _fork_settled(self, number: int) -> list[Event]:
        """Let the parent of a fork go on, which was admitted or refused."""
        index = self._trials[number].parent
        if index is None:
            return []
        parent = self._trials[index]
        parent.forks -= 1
        self._forks -= 1
        held, parent.held = ([], parent.held) if parent.forks else (parent.held, [])
        return held

    def _go_on(self, decided: list[Event]) -> list[Event]:
        """Ask for candidates, and close the search when it is over."""
        while not self._searcher.closed and (params := self._searcher.ask()) is not None:
            decided.append(self._proposed(params, self._searcher.epochs))
        if not self._trials:
            raise ConfigurationError(
                f"{self._searcher!r} proposes nothing; let its first `ask` return parameters"
            )
        if not self._searcher.closed and not self._training:
            raise ConfigurationError(
                f"{self._searcher!r} waits to be told of a trial, and none trains; let `tell` "
                "return a TrainTo or `ask` parameters, or let `closed` be True"
            )
        settled = self._searcher.closed and not self._forks
        if settled and not any(trial.held for trial in self._trials):
            self._closed = True
            decided.append(SearchClosed(self._num_epochs))
        return decided

    def _check_epochs(self, name: str, epochs: Any, told: int) -> None:
        if type(epochs) is not int or not told < epochs <= self._num_epochs:
            raise ConfigurationError(
                f"{name} is {epochs!r}; it is a whole number from {told + 1} to num_epochs="
                f"{self._num_epochs}"
            )
