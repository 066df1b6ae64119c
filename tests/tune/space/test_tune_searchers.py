"""Searchers keep what a search and a resume rely on, and what can't be used is named."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from cerebro_hydra.errors import ConfigurationError, JournalError
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.testing.searcher_case import SearcherCase, SimulatedSearch
from cerebro_hydra.tune.decisions import AskAndTell
from cerebro_hydra.tune.searchers.searcher import (
    CandidateList,
    Fork,
    Pause,
    Searcher,
    Stop,
    TrainTo,
)
from cerebro_hydra.tune.searchers.space import draws, grid, hp_choice, hp_uniform
from tests.tune.searchers import Rungs


class TestGrid(SearcherCase):
    def searcher(self) -> Searcher:
        return CandidateList(grid({"a": hp_choice([1, 2, 3]), "b": hp_choice(["x", None])}), 3)


class TestRandomDraws(SearcherCase):
    def searcher(self) -> Searcher:
        return CandidateList(draws({"lr": hp_uniform(0, 1)}, 5, Random(3)), 2)


class TestRungs(SearcherCase):
    def searcher(self) -> Searcher:
        return Rungs()


class OneAtATime:
    """Proposes a candidate when the one before has ended its epochs."""

    epochs = 2

    def __init__(self) -> None:
        self.told: list[tuple[int, int, bool]] = []
        self._proposed, self._busy = 0, False

    @property
    def closed(self) -> bool:
        return self._proposed == 4 and not self._busy

    def ask(self) -> dict[str, Any] | None:
        if self._busy or self._proposed == 4:
            return None
        self._proposed, self._busy = self._proposed + 1, True
        return {"n": self._proposed}

    def tell(self, trial: int, epochs: int, metrics: Any) -> list[Any]:
        self.told.append((trial, epochs, metrics is None))
        self._busy = metrics is not None and epochs < self.epochs
        return []


class TestOneAtATime(SearcherCase):
    def searcher(self) -> Searcher:
        return OneAtATime()


def test_none_means_not_now_until_the_searcher_is_closed() -> None:
    searcher = OneAtATime()
    run = SimulatedSearch(searcher, 2, 0, refused=frozenset({1}))
    assert [e.params["n"] for e in run.events if isinstance(e, ev.TrialProposed)] == [1, 2, 3, 4]
    ends = [(0, 1, False), (0, 2, False), (1, 0, True), (2, 1, False), (2, 2, False)]
    assert searcher.told[:5] == ends


class Deciding:
    """Proposes one candidate, and decides what it is given when it is told of it."""

    closed = False

    def __init__(
        self, *decisions: Any, params: Any = None, epochs: Any = 1, closes: bool = False
    ) -> None:
        self.epochs, self._decisions, self._closes = epochs, decisions, closes
        self._params: list[Any] = [None, params or {}]
        self.told = 0

    def ask(self) -> Any:
        return self._params.pop() if self._params else None

    def tell(self, trial: int, epochs: int, metrics: Any) -> list[Any]:
        self.told += 1
        self.closed = self._closes
        return list(self._decisions)


def test_rungs_pause_resume_stop_and_fork_through_events_of_the_journal() -> None:
    run = SimulatedSearch(Rungs(), 9, 0)
    kinds = {type(event) for event in run.events}
    assert kinds >= {
        ev.TrialPaused, ev.TrialResumed, ev.TrialStopped, ev.BudgetExtended, ev.TrialForked
    }  # fmt: skip
    (first, *_) = (event for event in run.events if isinstance(event, ev.TrialForked))
    parent, fork = run.state.trials[first.parent], run.state.trials[first.config.trial]
    assert first.state == 2, "after its first epoch, of two partitions"
    assert list(fork.visits)[:2] == list(parent.visits)[:2]
    assert len(fork.history) > 1


def test_a_parent_that_trains_waits_until_its_fork_is_admitted() -> None:
    for seed in range(5):
        restless = Deciding(Fork(0, {"lr": 1}, 3), TrainTo(0, 4), epochs=3, closes=True)
        run = SimulatedSearch(restless, 4, seed)
        kept = (
            ev.TrialPaused, ev.TrialForked, ev.TrialResumed, ev.BudgetExtended, ev.SearchClosed
        )  # fmt: skip
        assert [type(event) for event in run.events if isinstance(event, kept)] == list(kept)
        assert [trial.status for trial in run.state.trials.values()] == ["finished"] * 2
        assert [len(trial.history) for trial in run.state.trials.values()] == [4, 3]


def test_a_search_closes_with_the_admission_of_its_last_fork() -> None:
    searcher = Deciding(Fork(0, {}, 2), closes=True)
    run = SimulatedSearch(searcher, 2, 0)
    assert searcher.told == 1, "nothing is told after the end"
    assert [trial.status for trial in run.state.trials.values()] == ["finished"] * 2
    kinds = [type(event) for event in run.events]
    assert kinds.index(ev.SearchClosed) == kinds.index(ev.TrialForked) + 1


class FirstWins:
    """Stops all others as soon as one has ended an epoch, also those that were not begun."""

    epochs = 3

    def __init__(self) -> None:
        self._proposed, self._over, self.closed = 0, 0, False

    def ask(self) -> dict[str, Any] | None:
        if self._proposed == 6:
            return None
        self._proposed += 1
        return {"n": self._proposed}

    def tell(self, trial: int, epochs: int, metrics: Any) -> list[Any]:
        self._over += metrics is None
        self.closed = metrics is not None or self._over == 6
        return (
            []
            if metrics is None
            else [Stop(other, "another was first") for other in range(6) if other != trial]
        )


class TestFirstWins(SearcherCase):
    def searcher(self) -> Searcher:
        return FirstWins()


def test_what_is_decided_of_a_candidate_happens_once_it_is_admitted_and_never_if_refused() -> None:
    for seed in range(20):
        run = SimulatedSearch(FirstWins(), 3, seed, refused=frozenset({1, 4}))
        ends = sorted(trial.status for trial in run.state.trials.values())
        assert ends == ["finished", "stopped", "stopped", "stopped"]


def test_the_end_of_a_stopped_trial_is_told() -> None:
    class OneAfterAnother:
        epochs = 3

        def __init__(self) -> None:
            self._busy, self._left = False, 3

        @property
        def closed(self) -> bool:
            return not self._left and not self._busy

        def ask(self) -> Any:
            if self._busy or not self._left:
                return None
            self._busy, self._left = True, self._left - 1
            return {}

        def tell(self, trial: int, epochs: int, metrics: Any) -> list[Any]:
            self._busy = metrics is not None
            return [Stop(trial, "enough")] if metrics is not None else []

    run = SimulatedSearch(OneAfterAnother(), 3, 0)
    assert [trial.status for trial in run.state.trials.values()] == ["stopped"] * 3


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: print, "is no searcher; give an object with epochs, closed, ask and tell"),
        (lambda: CandidateList([], 1), "proposes nothing; let its first `ask` return parameters"),
        (lambda: Deciding(epochs=9), "epochs is 9; it is a whole number from 1 to num_epochs=4"),
        (lambda: Deciding(epochs=1.0), "epochs is 1.0"),
        (lambda: Deciding(params=[3]), r"proposes \[3\]; give a dict of parameters, or None"),
        (lambda: Deciding(params={"f": print}), "candidate 0 is .* which JSON can't hold"),
        (lambda: Deciding("stop"), "decides 'stop'; return TrainTo, Pause, Stop or Fork"),
        (lambda: Deciding(Stop(7, "")), "proposed 1 candidates; number them from 0"),
        (lambda: Deciding(TrainTo(0, 9)), "the epochs of trial 0 is 9; .* from 2 to num_epochs=4"),
        (lambda: Deciding(Fork(0, {}, 1)), "the epochs of a fork is 1; .* from 2"),
        (lambda: Deciding(Pause(0)), "waits to be told of a trial, and none trains; let `tell`"),
        (lambda: Deciding(), "waits to be told of a trial, and none trains"),
    ],
)
def test_what_can_not_be_decided_is_named(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        SimulatedSearch(make(), 4, 0)


def test_another_searcher_than_the_journals_is_noticed() -> None:
    run = SimulatedSearch(Rungs(seed=1), 9, 0)
    with pytest.raises(JournalError, match="resume the run with the searcher that it was started"):
        AskAndTell(Rungs(seed=2), 9, run.partitions).replay(run.journal)
