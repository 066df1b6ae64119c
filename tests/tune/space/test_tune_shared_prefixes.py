"""Candidates are one trial as long as they train alike, in whatever order trials come and end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.testing.searcher_case import SearcherCase
from cerebro_hydra.tune import GridSearch, hp_choice
from cerebro_hydra.tune.searchers.searcher import Fork, Pause, SearchDecision, Searcher, TrainTo
from cerebro_hydra.tune.searchers.shared_prefixes import SharedPrefixes
from tests.tune.searchers import RUN
from tests.tune.space.test_tune_rung_searchers import World, candidates
from tests.tune.test_tune_search import arguments
from tests.tune.tune_models import small

# Candidates 1 to 3 part from 0 after epochs 4, 4 and 2, and 4 from 3 after 6; 5 is alone.
KINDS = [
    [0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 1, 1, 1, 1, 1],
    [0, 0, 0, 0, 2, 2, 2, 2, 2],
    [0, 0, 3, 3, 3, 3, 3, 3, 3],
    [0, 0, 3, 3, 3, 3, 4, 4, 4],
    [5, 5, 5, 5, 5, 5, 5, 5, 5],
]


def shared(kinds: Sequence[Sequence[int]]) -> SharedPrefixes:
    return SharedPrefixes(candidates(len(kinds)), kinds)


class TestSharedPrefixes(SearcherCase):
    def searcher(self) -> Searcher:
        return shared(KINDS)


class TestNothingShared(SearcherCase):
    def searcher(self) -> Searcher:
        return shared([[number] * 9 for number in range(4)])


class TestEqualCandidates(SearcherCase):
    def searcher(self) -> Searcher:
        return shared([[0] * 9 for _ in range(4)])


class Tree(World):
    """Takes forks, and checks that each has trained as its candidate would have."""

    def __init__(
        self, searcher: SharedPrefixes, data: st.DataObject, kinds: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(searcher, data)
        self._kinds = kinds
        self.lives: dict[int, list[int]] = {}  # the kinds of the epochs that each trial has
        self.of_trial: dict[int, int] = {}
        self.trained = 0

    def _ask(self) -> None:
        while (params := self.searcher.ask()) is not None:
            number = len(self.budget)
            self.budget[number], self.told[number] = self.searcher.epochs, 0
            self.of_trial[number], self.lives[number] = params["n"], []

    def _tell(self, trial: int, metrics: Any) -> None:
        if metrics is not None:
            self.trained += 1
            self.lives[trial].append(self._kinds[self.of_trial[trial]][self.told[trial] - 1])
        super()._tell(trial, metrics)

    def _take(self, decision: SearchDecision) -> None:
        match decision:
            case Fork(parent, params, epochs):
                number = len(self.budget)
                assert parent in self.resting and parent not in self.over
                self.budget[number], self.told[number] = epochs, self.told[parent]
                self.of_trial[number] = params["n"]
                self.lives[number] = list(self.lives[parent])
            case TrainTo(trial, epochs) if trial not in self.resting:
                assert self.told[trial] == self.budget[trial] < epochs
                self.budget[trial] = epochs
            case _:
                super()._take(decision)


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """Draw schedules of few epochs that often agree for a while, by any two and in any order."""
    epochs = draw(st.integers(1, 5))
    schedule = st.lists(st.integers(0, 1), min_size=epochs, max_size=epochs)
    steps = draw(st.lists(schedule, min_size=1, max_size=8))
    known: dict[tuple[int, ...], int] = {}
    return [
        [known.setdefault(tuple(each[: n + 1]), len(known)) for n in range(epochs)]
        for each in steps
    ]


@given(st.data(), trees(), st.booleans())
def test_every_candidate_trains_its_own_epochs_and_none_twice(
    data: st.DataObject, kinds: list[list[int]], faults: bool
) -> None:
    searcher = shared(kinds)
    saved = searcher.shared_epochs
    world = Tree(searcher, data, kinds)
    world.run(faults)
    for trial in world.training:  # nobody decides any more, and they train to their ends
        assert world.budget[trial] == len(kinds[0])
    assert sorted(world.of_trial.values()) == list(range(len(kinds))), "each candidate is a trial"
    for trial, life in world.lives.items():
        assert life == kinds[world.of_trial[trial]][: len(life)]
    left = sum(len(kinds[0]) - len(world.lives[trial]) for trial in world.training)
    assert faults or world.trained + left == len(kinds) * len(kinds[0]) - saved
    distinct = {tuple(each[: n + 1]) for each in kinds for n in range(len(each))}
    ends = len(kinds) - len({tuple(each) for each in kinds})  # equal ones train their last epoch
    assert faults or world.trained + left == len(distinct) + ends


def test_forks_are_numbered_alike_in_whatever_order_trials_come() -> None:
    kinds = [[0, 0, 0], [0, 1, 1], [2, 2, 2], [2, 3, 3]]
    found = []
    for order in ((0, 1), (1, 0)):
        searcher = shared(kinds)
        assert [searcher.ask(), searcher.ask(), searcher.ask()] == [{"n": 0}, {"n": 2}, None]
        decided = [each for trial in order for each in searcher.tell(trial, 1, {RUN.metric: 1.0})]
        assert decided[:2] == [Pause(trial) for trial in order]
        found.append(decided[2:])
        assert searcher.closed
    forks = [Fork(0, {"n": 1}, 3), Fork(1, {"n": 3}, 3)]
    assert found == [[*forks, TrainTo(0, 3), TrainTo(1, 3)]] * 2


def test_where_a_trial_fails_the_first_that_was_to_fork_it_begins_anew() -> None:
    searcher = shared([[0, 0, 0], [0, 0, 1], [0, 0, 2], [3, 3, 3]])
    assert [searcher.ask(), searcher.ask(), searcher.ask()] == [{"n": 0}, {"n": 3}, None]
    assert list(searcher.tell(0, 1, None)) == []
    assert [searcher.ask(), searcher.ask()] == [{"n": 1}, None]
    assert list(searcher.tell(2, 2, {RUN.metric: 1.0})) == [
        Pause(2), Fork(2, {"n": 2}, 3), TrainTo(2, 3),
    ]  # fmt: skip


def raises(params: Mapping[str, Any]) -> Any:
    if params["lr"] < 0.2:
        raise (KeyboardInterrupt if params["lr"] < 0.1 else asyncio.CancelledError)
    return small(params)


def test_what_a_factory_raises_while_schedules_are_compared_fails_no_other_trial(
    tmp_path: Path,
) -> None:
    space = {"lr": hp_choice([0.05, 0.1, 0.2, 0.3])}
    options = {"estimator_gen_fn": raises, "search_space": space, "share_prefixes": True}
    kinds = GridSearch(**arguments(tmp_path, **options)).given(RUN)["share_prefixes"]
    alone = {*kinds[0], *kinds[1]}
    assert len(alone) == 4 and alone.isdisjoint(kinds[2] + kinds[3])
