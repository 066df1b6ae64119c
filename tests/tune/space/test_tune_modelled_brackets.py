"""BOHB draws by what rungs measured, whoever came first, and decides as Hyperband does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf, log10, nan
from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.testing.searcher_case import SearcherCase
from cerebro_hydra.tune.searchers import modelled_brackets
from cerebro_hydra.tune.searchers.modelled_brackets import ModelledBrackets
from cerebro_hydra.tune.searchers.optuna_space import OptunaSpace
from cerebro_hydra.tune.searchers.rungs import Bracket, hyperband_brackets, shared_out
from cerebro_hydra.tune.searchers.searcher import Pause, SearchedRun, Searcher, Stop, TrainTo
from cerebro_hydra.tune.searchers.space import hp_choice, hp_int, hp_log, hp_uniform
from tests.tune.searchers import RUN
from tests.tune.space.test_tune_rung_searchers import Compared

optuna.logging.set_verbosity(optuna.logging.WARNING)

SPACE = {"lr": hp_log(1e-4, 1), "drop": hp_uniform(0, 1)}
NESTED = {
    "lr": hp_log(1e-4, 1),
    "width": hp_int(1, 64, log=True),
    "optimizer": hp_choice([{"name": "adam"}, {"name": "sgd", "momentum": hp_uniform(0, 0.9)}]),
}


def bohb(
    num_epochs: int = 9,
    eta: int = 3,
    trials: int | None = None,
    at_once: int = 3,
    space: Mapping[str, Any] = SPACE,
    seed: int = 5,
    run: SearchedRun = RUN,
    brackets: Sequence[Bracket] | None = None,
) -> ModelledBrackets:
    brackets = brackets or hyperband_brackets(1, num_epochs, eta)
    if trials is not None:
        brackets = shared_out(brackets, trials)
    return ModelledBrackets(OptunaSpace(space), brackets, eta, at_once, seed, run)


class TestBOHB(SearcherCase):
    def searcher(self) -> Searcher:
        return bohb(trials=14)


class TestBOHBOfANestedSpace(SearcherCase):
    def searcher(self) -> Searcher:
        return bohb(trials=14, space=NESTED, at_once=4)


# ---------------------------------------------------------------------- worlds of all kinds


class Windowed(Compared):
    """Checks that no more candidates begin than may, and that each is of the space."""

    def __init__(self, *arguments: Any, at_once: int) -> None:
        super().__init__(*arguments)
        self._at_once = at_once

    def check_candidate(self, number: int, params: Mapping[str, Any]) -> None:
        assert params.keys() == SPACE.keys()
        begun = [each for each in range(number - self._at_once + 1)]
        assert all(each in self.over or self.told[each] for each in begun)


@given(st.data(), st.integers(2, 4), st.integers(1, 9), st.integers(1, 14), st.integers(1, 5))
def test_bohb_ends_and_compares_within_a_bracket(
    data: st.DataObject, eta: int, num_epochs: int, trials: int, at_once: int
) -> None:
    brackets = shared_out(hyperband_brackets(1, num_epochs, eta), trials)
    bracket_of = [at for at, bracket in enumerate(brackets) for _ in range(bracket.trials)]
    searcher = bohb(eta=eta, brackets=brackets, at_once=at_once)
    world = Windowed(searcher, data, eta, bracket_of.__getitem__, at_once=at_once)
    world.run()
    assert len(world.budget) == trials


def value_of(params: Mapping[str, Any], epochs: int) -> float:
    return float(abs(log10(params["lr"]) + 2) + params["drop"]) + 1 / epochs


def play(searcher: Searcher, choose: Callable[[list[int]], int]) -> tuple[list[Any], set[Any]]:
    """Let trials end their epochs in the order that is chosen; return draws and decisions."""
    drawn, decided = list[Any](), set[Any]()
    budget: dict[int, int] = {}
    told, idle = Counter[int](), set[int]()
    while True:
        while not searcher.closed and (params := searcher.ask()) is not None:
            budget[len(drawn)] = searcher.epochs
            drawn.append(params)
        able = [n for n in budget if n not in idle and told[n] < budget[n]]
        if searcher.closed:
            return drawn, decided
        assert able, "the searcher waits for nobody"
        trial = choose(able)
        told[trial] += 1
        fails = trial % 7 == 6 and told[trial] == 2
        loss = nan if trial % 5 == 4 else value_of(drawn[trial], told[trial])
        for each in searcher.tell(trial, told[trial], None if fails else {RUN.metric: loss}):
            decided.add(each)
            match each:
                case Pause(number) | Stop(number):
                    idle.add(number)
                case TrainTo(number, epochs):
                    idle.discard(number)
                    budget[number] = epochs
        if fails:
            idle.add(trial)


EXPECTED = play(bohb(), min)


@settings(max_examples=20)
@given(st.data())
def test_what_is_drawn_and_decided_does_not_depend_on_who_comes_first(data: st.DataObject) -> None:
    assert play(bohb(), lambda able: data.draw(st.sampled_from(able))) == EXPECTED


@pytest.mark.parametrize("order", [max, min])
def test_whoever_comes_first_long_runs_are_alike(order: Callable[[list[int]], int]) -> None:
    expected = play(bohb(27, at_once=4), lambda able: able[len(able) // 2])
    assert play(bohb(27, at_once=4), order) == expected


def test_another_seed_draws_otherwise_and_larger_values_may_be_better() -> None:
    assert play(bohb(seed=6), min)[0] != EXPECTED[0]
    first = bohb(run=SearchedRun("train_loss", lambda: "max", 2), brackets=[Bracket(3, (1, 3))])
    params = [first.ask(), first.ask(), first.ask()]
    assert None not in params and first.ask() is None
    for trial, value in ((0, 0.1), (1, 0.9), (2, 0.5)):
        first.tell(trial, 1, {RUN.metric: value})
    assert [drawn.values for drawn in first._drawn] == [{1: -0.1}, {1: -0.9}, {1: -0.5}]


# ---------------------------------------------------------------------- what the model is told


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Collect what each model is told before it draws, where one does."""
    told: list[list[float]] = []
    plain = modelled_brackets.draw

    def draw(study: Any, space: OptunaSpace) -> Any:
        if known := study.get_trials():
            told.append([trial.value for trial in known])
        return plain(study, space)

    monkeypatch.setattr(modelled_brackets, "draw", draw)
    return told


def test_a_model_is_told_of_the_highest_rung_with_enough_results(
    models: list[list[float]],
) -> None:
    play(bohb(81, at_once=4), min)
    assert 60 < len(models) < 130, "a third is drawn at random"
    assert len(models[0]) >= 5, "three more than the two parameters"
    bests = [min(told) for told in models]  # the longer a trial trains, the smaller is its value
    assert bests[0] >= 1 and bests[-1] < 1 / 27 + 0.2, "the last ones know a high rung"
    assert any(inf in told for told in models), "a trial without a number is the worst"


def test_a_trial_that_goes_on_counts_at_its_next_rung_too() -> None:
    searcher = bohb(brackets=[Bracket(3, (1, 3, 9))])
    for trial, value in enumerate((0.3, 0.9, 0.5)):
        searcher.ask()
        searcher.tell(trial, 1, {RUN.metric: value})
    for epochs, value in ((2, 0.2), (3, 0.1)):
        searcher.tell(0, epochs, {RUN.metric: value})
    assert [drawn.values for drawn in searcher._drawn] == [{1: 0.3, 3: 0.1}, {1: 0.9}, {1: 0.5}]


def test_who_is_over_before_its_rung_counts_by_what_it_has_measured_last() -> None:
    searcher = bohb(brackets=[Bracket(4, (2, 4))], at_once=4)
    for _ in range(4):
        searcher.ask()
    searcher.tell(0, 1, {RUN.metric: 0.25})
    searcher.tell(0, 1, None)
    searcher.tell(1, 0, None)
    searcher.tell(2, 1, {RUN.metric: 0.5})
    searcher.tell(3, 2, {RUN.metric: -inf})  # it has overflowed
    assert [drawn.values for drawn in searcher._drawn] == [{2: 0.25}, {2: inf}, {}, {2: inf}]


def test_it_learns_where_the_best_are() -> None:
    drawn = [play(bohb(81, at_once=4, seed=seed), min)[0] for seed in range(3)]
    early = [value_of(params, 1) - 1 for each in drawn for params in each[:8]]
    late = [value_of(params, 1) - 1 for each in drawn for params in each[30:81]]
    assert np.median(late) < np.median(early) * 0.6, "although one in three is random"
