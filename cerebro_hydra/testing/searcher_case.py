"""Conformance suite for searchers: what a search and the resume of a run rely on.

A new searcher passes by inheriting it::

    class TestMySearcher(SearcherCase):
        def searcher(self) -> Searcher:
            return MySearcher(seed=3)

Each test lets the real decisions run over simulated workers, which train in a random order.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import nan
from random import Random

import pytest

from cerebro_hydra.plan.messages.codec import from_json, to_json
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.messages.events import (
    Checkpointed,
    Event,
    Hop,
    SubEpochDone,
    TaskFailed,
    TrialAdded,
    TrialForked,
    TrialProposed,
    TrialRefused,
    WorkerJoined,
)
from cerebro_hydra.plan.messages.instructions import Cancel, Checkpoint, Instruction, StartSubEpoch
from cerebro_hydra.plan.policy.policy import Scheduler
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.tune.decisions import AskAndTell
from cerebro_hydra.tune.searchers.searcher import Searcher

MOST_EVENTS = 20_000

_SHARDS = (("frozen", "trainable"),)


class SearcherCase(ABC):
    """Inherit it, and return a new searcher."""

    num_epochs = 9
    """The most epochs that the searcher lets a trial train."""

    @abstractmethod
    def searcher(self) -> Searcher:
        """Return a new searcher, which decides as every other one that this returns."""

    def _run(self, seed: int, **faults: frozenset[int]) -> SimulatedSearch:
        return SimulatedSearch(self.searcher(), self.num_epochs, seed, **faults)

    @pytest.mark.parametrize("seed", range(4))
    def test_whatever_order_trials_train_in_the_search_ends(self, seed: int) -> None:
        run = self._run(seed)
        assert run.searcher.closed
        assert run.searcher.ask() is None

    @pytest.mark.parametrize(("number", "seed"), [(0, 0), (0, 1), (1, 2)])
    def test_a_refused_candidate_is_told_and_the_others_go_on(self, number: int, seed: int) -> None:
        whole, run = self._run(seed), self._run(seed, refused=frozenset({number}))
        first = [event for event in whole.events[: whole.begun] if isinstance(event, TrialProposed)]
        assert run.events[: len(first)] == first, "a refusal changes no proposal made before it"

    @pytest.mark.parametrize("seed", range(2))
    def test_failed_trials_are_told_and_the_others_go_on(self, seed: int) -> None:
        self._run(seed, failing=frozenset({0, 2, 3}))

    def test_a_search_of_which_every_candidate_is_refused_ends(self) -> None:
        self._run(0, refused=frozenset(range(MOST_EVENTS)))

    def test_parameters_are_json(self) -> None:
        for event in self._run(0).events:
            if isinstance(event, TrialProposed):
                assert json.loads(json.dumps(event.params)) == event.params

    def test_proposals_and_decisions_depend_on_what_was_told_alone(self) -> None:
        assert self._run(4).events == self._run(4).events

    @pytest.mark.parametrize("seed", range(2))
    def test_a_new_searcher_that_is_told_the_same_decides_the_same(self, seed: int) -> None:
        run = self._run(seed, refused=frozenset({1}), failing=frozenset({2}))
        decided = [event for event in run.events if isinstance(event, AskAndTell.DECIDED)]
        for length in range(0, len(run.journal), 1 + len(run.journal) // 50):
            ask_and_tell = AskAndTell(self.searcher(), self.num_epochs, run.partitions)
            begun = run.journal[:length]
            passed = sum(isinstance(event, AskAndTell.DECIDED) for event, _ in begun)
            left = ask_and_tell.replay(begun)
            assert left == decided[passed : passed + len(left)]


class SimulatedSearch:
    """Runs a search to its end: real decisions, and workers that end their tasks at random.

    Args:
        searcher: a new one.
        num_epochs: the most that a trial may train.
        seed: of what the trials measure, and of the order in which they train.
        refused: the candidates that can't be built.
        failing: the trials that fail in their second epoch.

    Attributes:
        journal: every event with its instructions.
        events: the events alone.
        begun: how many of them came before the first trial trained.
    """

    partitions = 2

    def __init__(
        self,
        searcher: Searcher,
        num_epochs: int,
        seed: int,
        *,
        refused: frozenset[int] = frozenset(),
        failing: frozenset[int] = frozenset(),
    ) -> None:
        self.searcher, self._seed, self._failing, self._refused = searcher, seed, failing, refused
        self._random = Random(seed_of(seed, "order"))
        self.journal: list[tuple[Event, Sequence[Instruction]]] = []
        self._ask_and_tell = AskAndTell(searcher, num_epochs, self.partitions)
        self._scheduler = Scheduler(HopConfig(self.partitions, evaluate=False))
        self.state = self._scheduler.state
        self._coming: list[Event] = []
        self._handle(self._ask_and_tell.begin())
        self.begun = len(self.journal)
        self._handle([WorkerJoined(n, f"agent-{n}", (n,)) for n in range(self.partitions)])
        while not self.state.finished:
            assert self._coming, "nothing will happen any more, and the search has not ended"
            assert len(self.journal) < MOST_EVENTS, "the search does not end"
            self._handle([self._coming.pop(self._random.randrange(len(self._coming)))])

    @property
    def events(self) -> list[Event]:
        """Return everything that happened."""
        return [event for event, _ in self.journal]

    def _handle(self, events: list[Event]) -> None:
        waiting = list(events)
        while waiting:
            for event, instructions in self._scheduler.handle(waiting.pop(0)):
                assert from_json(to_json(event)) == event
                self.state.validate()
                self.journal.append((event, instructions))
                waiting += self._ask_and_tell.follow(event, instructions)
                if isinstance(event, TrialProposed):
                    self._coming.append(self._admitted(event))
                for instruction in instructions:
                    self._carry_out(instruction)

    def _admitted(self, proposed: TrialProposed) -> Event:
        if proposed.trial in self._refused:
            return TrialRefused(proposed.trial, "it can't be built")
        config = TrialConfig(proposed.trial, 1.0, 1, _SHARDS)
        if proposed.parent is None:
            return TrialAdded(config, proposed.budget)
        return TrialForked(config, proposed.parent, proposed.state, proposed.budget)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case StartSubEpoch():
                self._coming.append(self._trained(instruction))
            case Checkpoint(trial, state, incarnation):
                self._coming.append(Checkpointed(trial, state, incarnation))
            case Cancel(attempt):
                self._coming = [e for e in self._coming if getattr(e, "attempt", None) != attempt]

    def _trained(self, task: StartSubEpoch) -> Event:
        if task.trial in self._failing and task.epoch == 1:
            return TaskFailed(task.attempt, task.incarnation, "it fails")
        random = Random(seed_of(self._seed, "loss", task.trial, task.epoch))
        loss = random.choice([nan, 0.25, random.random()])
        return SubEpochDone(
            task.attempt, task.incarnation, 1, loss, _SHARDS, 1, 1.0, Hop(0, 0, 0.0)
        )
