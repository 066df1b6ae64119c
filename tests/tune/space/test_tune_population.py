"""A population lets its worst give way to forks of its best, in whatever order members come."""

from __future__ import annotations

from math import ceil
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.testing.searcher_case import SearcherCase
from cerebro_hydra.tune.searchers.population import Mutation, Population
from cerebro_hydra.tune.searchers.searcher import (
    Fork,
    Pause,
    SearchDecision,
    Searcher,
    Stop,
    TrainTo,
)
from cerebro_hydra.tune.searchers.space import (
    draws,
    grid,
    hp_choice,
    hp_int,
    hp_log,
    hp_loguniform,
    hp_quniform,
    hp_uniform,
)
from tests.tune.searchers import RUN
from tests.tune.space.test_tune_rung_searchers import World, candidates

SPACE = {
    "lr": hp_log(1e-4, 1e-1),
    "width": hp_int(16, 100, step=16),
    "drop": hp_quniform(0, 0.9, 0.1),
    "decay": hp_loguniform(-4, -1.5),
    "plain": hp_uniform(-2, -1),
    "rows": hp_choice([8, 16, 32]),
    "optimizer": hp_choice(
        [{"name": "adam"}, {"name": "sgd", "momentum": hp_choice([0, 0.5, 0.9])}]
    ),
}


def population(count: int, *rungs: int, quantile: float = 0.25) -> Population:
    mutation = Mutation({"n": hp_int(0, 10_000)}, 0.25)
    return Population(candidates(count), rungs, quantile, mutation, Random(5), RUN)


class TestPopulation(SearcherCase):
    def searcher(self) -> Searcher:
        return population(7, 2, 4, 6, 9)


class TestPairs(SearcherCase):
    def searcher(self) -> Searcher:
        return population(5, 1, 2, 3, 9, quantile=0.5)


class Lineages(World):
    """Takes forks, and checks at each comparison who gave way to whom."""

    def __init__(self, searcher: Searcher, data: st.DataObject, quantile: float) -> None:
        super().__init__(searcher, data)
        self._quantile, self.forks, self._there = quantile, 0, set[int]()

    def _take(self, decision: SearchDecision) -> None:
        if isinstance(decision, Pause):
            super()._take(decision)
            self._there = self.resting - self.over - self.stopped
        elif isinstance(decision, Fork):
            number, parent = len(self.budget), decision.parent
            count = ceil(len(self._there) * self._quantile)
            assert parent in self._ranked()[:count]
            self.budget[number], self.told[number] = decision.epochs, self.told[parent]
            self.forks += 1
        elif isinstance(decision, Stop):
            count = ceil(len(self._there) * self._quantile)
            assert decision.trial in self._ranked()[-count:]
            super()._take(decision)
            self.resting.discard(decision.trial)
            self.over.add(decision.trial)
        else:
            super()._take(decision)

    def _tell(self, trial: int, metrics: Any) -> None:
        if metrics is None:
            self._there.discard(trial)
        super()._tell(trial, metrics)

    def _ranked(self) -> list[int]:
        there = sorted(self._there)
        value = {each: self.loss[each, self.told[each]] for each in there}
        return sorted(there, key=lambda each: (value[each] != value[each], value[each], each))


@given(st.data(), st.integers(2, 9), st.integers(1, 3), st.sampled_from([0.25, 0.4, 0.5]))
def test_a_population_ends_and_only_its_worst_give_way_to_forks_of_its_best(
    data: st.DataObject, count: int, interval: int, quantile: float
) -> None:
    rungs = (*range(interval, 7, interval), 7)
    world = Lineages(population(count, *rungs, quantile=quantile), data, quantile)
    faults = data.draw(st.booleans())
    world.run(faults)
    members = [each for each in world.budget if each not in world.over]
    assert faults or len(members) == count, "its size stays"
    assert faults or world.forks == (len(rungs) - 1) * min(ceil(count * quantile), count // 2)


@given(st.permutations(range(6)))
def test_a_comparison_decides_alike_in_whatever_order_members_come(order: list[int]) -> None:
    losses = [0.3, 0.1, 0.2, float("nan"), 0.4, 0.15]
    searcher = population(6, 1, 2)
    while searcher.ask() is not None:
        pass
    decided = [each for n in order for each in searcher.tell(n, 1, {RUN.metric: losses[n]})]
    assert decided[:6] == [Pause(trial, 1) for trial in order]
    first, fork, second, other, *went_on = decided[6:]
    assert isinstance(first, Stop) and first.trial == 3
    assert first.reason.startswith("among the worst 2 of 6 trials after epoch 1, so that trial 6")
    assert isinstance(second, Stop) and second.trial == 4
    assert isinstance(fork, Fork) and isinstance(other, Fork)
    assert {fork.parent, other.parent} <= {1, 5} and fork.epochs == other.epochs == 2
    assert went_on == [TrainTo(trial, 2) for trial in (0, 1, 2, 5)]
    assert searcher.closed


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.25, 1.0]))
def test_what_is_mutated_stays_in_its_space(seed: int, resample: float) -> None:
    (params,) = draws(SPACE, 1, Random(seed))
    options = [each["optimizer"] for each in grid({"optimizer": SPACE["optimizer"]})]
    random, changed = Random(seed), params
    for _ in range(5):
        before, changed = changed, Mutation(SPACE, resample).of(changed, random)
        assert changed.keys() == SPACE.keys()
        assert 1e-4 <= changed["lr"] <= 1e-1
        assert changed["width"] in range(16, 97, 16)
        assert changed["drop"] in [number * 0.1 for number in range(10)]
        assert 1e-4 <= changed["decay"] <= 10**-1.5
        assert -2 <= changed["plain"] <= -1
        assert changed["rows"] in (8, 16, 32)
        assert changed["optimizer"] in options
        if resample == 0:
            moved = changed["lr"] / before["lr"]
            assert round(moved, 9) in (1.2, 0.8) or changed["lr"] in (1e-4, 1e-1)
            assert abs(changed["width"] - before["width"]) in (0, 16, 32)
            assert changed["optimizer"]["name"] == before["optimizer"]["name"] or (
                "momentum" not in before["optimizer"]
            )


def test_only_what_mutates_changes() -> None:
    (params,) = draws(SPACE, 1, Random(1))
    changed = Mutation({"lr": SPACE["lr"]}, 0.25).of(params, Random(2))
    assert {name for name in params if changed[name] != params[name]} == {"lr"}
