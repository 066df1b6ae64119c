"""Samplers of Optuna draw what the space has, and know what they are told, whoever came first."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    GridSampler,
    NSGAIISampler,
    PartialFixedSampler,
    RandomSampler,
    TPESampler,
)

from cerebro_hydra.testing.searcher_case import SearcherCase
from cerebro_hydra.tune.searchers.optuna_space import OptunaSpace
from cerebro_hydra.tune.searchers.sampled import SampledCandidates
from cerebro_hydra.tune.searchers.searcher import Searcher
from cerebro_hydra.tune.searchers.space import (
    hp_choice,
    hp_int,
    hp_log,
    hp_loguniform,
    hp_qloguniform,
    hp_quniform,
    hp_uniform,
)
from cerebro_hydra.tune.searchers.studies import check_known, study_of_run, study_to_json
from tests.golden import assert_golden, refusal
from tests.tune.searchers import RUN

optuna.logging.set_verbosity(optuna.logging.WARNING)

NESTED = hp_choice(
    [{"name": "adam"}, {"name": "sgd", "momentum": hp_uniform(0, 0.9), "deep": {"n": hp_int(1, 3)}}]
)
SPACE = {
    "lr": hp_log(1e-4, 1e-1),
    "width": hp_int(16, 100, step=16),
    "heads": hp_int(1, 64, log=True),
    "drop": hp_quniform(0, 0.9, 0.1),
    "rows": hp_quniform(3, 50, 8),
    "decay": hp_loguniform(-4, -1.5),
    "units": hp_qloguniform(0, 2, 5),
    "mixed": hp_choice([None, True, 1, "a", [1, 2], {"k": 2}]),
    "optimizer": NESTED,
}


def sampled(
    sampler: BaseSampler | None = None,
    count: int = 9,
    at_once: int = 3,
    epochs: int = 2,
    space: Any = SPACE,
    known: Any = (),
    seed: int = 3,
) -> SampledCandidates:
    study = study_of_run(sampler or TPESampler(n_startup_trials=3), seed, known)
    return SampledCandidates(OptunaSpace(space), study, count, epochs, at_once, RUN, True)


class TestTPE(SearcherCase):
    def searcher(self) -> Searcher:
        return sampled()


class TestGeneticSampler(SearcherCase):
    def searcher(self) -> Searcher:
        return sampled(NSGAIISampler(population_size=3))


class TestGridThatIsExhausted(SearcherCase):
    def searcher(self) -> Searcher:
        return sampled(GridSampler({"n": [1, 2, 3, 4]}), 40, space={"n": hp_int(1, 9)})


def play(searcher: SampledCandidates, choose: Callable[[list[int]], int]) -> list[Any]:
    """Let trials end one at a time, in the order that is chosen; return what was drawn."""
    drawn: list[Any] = []
    running: list[int] = []
    while not searcher.closed or running:
        while not searcher.closed and (params := searcher.ask()) is not None:
            running.append(len(drawn))
            drawn.append(params)
        assert running, "the searcher waits for nobody"
        trial = choose(running)
        running.remove(trial)
        loss = abs(np.log10(drawn[trial]["lr"]) + 2) + drawn[trial]["drop"]
        for epoch in range(1, searcher.epochs + 1):
            searcher.tell(trial, epoch, {RUN.metric: loss / epoch})
        if trial % 5 == 4:
            searcher.tell(trial, searcher.epochs, None)
    return drawn


SHORT = {"lr": hp_log(1e-4, 1), "drop": hp_uniform(0, 1), "optimizer": NESTED}
EXPECTED = play(sampled(count=14, at_once=4, space=SHORT), min)


@given(st.data())
def test_what_is_drawn_does_not_depend_on_who_ends_first(data: st.DataObject) -> None:
    def choose(running: list[int]) -> int:
        assert len(running) <= 4
        return data.draw(st.sampled_from(running))

    assert play(sampled(count=14, at_once=4, space=SHORT), choose) == EXPECTED


def test_one_after_the_other_draws_what_optuna_draws_itself() -> None:
    def objective(trial: optuna.Trial) -> float:
        lr = trial.suggest_float("lr", 1e-4, 1, log=True)
        return float(abs(np.log10(lr) + 2) + trial.suggest_float("drop", 0, 1)) / 2

    study = optuna.create_study(sampler=TPESampler(seed=3))
    study.optimize(objective, 25)
    space = {"lr": hp_log(1e-4, 1), "drop": hp_uniform(0, 1)}
    searcher = sampled(TPESampler(), 25, at_once=1, space=space)
    drawn: list[Any] = []
    while (params := searcher.ask()) is not None:
        drawn.append(params)
        loss = abs(np.log10(params["lr"]) + 2) + params["drop"]
        for epoch in (1, 2):
            searcher.tell(len(drawn) - 1, epoch, {RUN.metric: loss / epoch})
    assert drawn == [trial.params for trial in study.trials]


def test_a_value_that_has_overflowed_is_no_success_to_a_sampler() -> None:
    searcher = sampled(count=3, at_once=1)
    for trial, (first, second) in enumerate([(0.5, -inf), (-inf, -inf), (inf, 0.25)]):
        searcher.ask()
        searcher.tell(trial, 1, {RUN.metric: first})
        searcher.tell(trial, 2, {RUN.metric: second})
    searcher.ask()
    known = [trial.value for trial in searcher._study.trials]
    assert known == [0.5, None, 0.25]


def test_it_learns_where_the_best_are() -> None:
    drawn = play(sampled(count=60, at_once=4, space=SHORT), min)
    late = [abs(np.log10(params["lr"]) + 2) for params in drawn[40:]]
    early = [abs(np.log10(params["lr"]) + 2) for params in drawn[:20]]
    assert np.median(late) < np.median(early) / 2


@given(st.integers(0, 2**40), st.sampled_from(["random", "tpe"]))
def test_what_is_drawn_is_of_the_space_and_known_by_its_paths(seed: int, kind: str) -> None:
    sampler = RandomSampler() if kind == "random" else TPESampler(n_startup_trials=1)
    searcher, space = sampled(sampler, 4, at_once=4, seed=seed), OptunaSpace(SPACE)
    for trial in range(4):
        params = dict(searcher.ask() or {})
        assert json.loads(json.dumps(params)) == params
        assert 1e-4 <= params["lr"] <= 1e-1
        assert params["width"] in range(16, 97, 16) and type(params["width"]) is int
        assert 1 <= params["heads"] <= 64
        assert params["drop"] == round(params["drop"] / 0.1) * 0.1
        assert params["rows"] in range(0, 49, 8) and type(params["rows"]) is int
        assert 1e-4 <= params["decay"] <= 10**-1.5
        assert params["units"] in range(0, 101, 5)
        assert params["mixed"] in (None, True, "a", [1, 2], {"k": 2})
        assert params["optimizer"].keys() in ({"name"}, {"name", "momentum", "deep"})
        theirs = searcher._study.get_trials(deepcopy=False)[trial].params
        mine = space.labelled(params)
        assert mine.keys() == theirs.keys()
        unlike = {name for name in mine if mine[name] != theirs[name]}
        assert unlike <= {"units"} | {n for n in unlike if abs(mine[n] - theirs[n]) < 1e-9}


def test_every_option_of_unlike_types_is_drawn_as_it_is() -> None:
    options = [1, True, 1.0, "1", "[1]", [1]]
    searcher = sampled(RandomSampler(), 80, at_once=80, space={"a": hp_choice(options)})
    found = {json.dumps(params["a"]) for params in iter(searcher.ask, None)}
    assert found == {json.dumps(each) for each in options}


class Own(BaseSampler):
    """A sampler of a user, with generators of its own."""

    def __init__(self) -> None:
        self.generators: Any = np.random.default_rng()
        self.state, self.random = np.random.RandomState(), random.Random()
        self.wrapped = RandomSampler()

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        part = self.generators.random() + self.state.random() + self.random.random()
        mine = self.wrapped.sample_independent(study, trial, name, distribution)
        return (mine + part) / 4


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(
    "make",
    [
        Own,
        RandomSampler,
        TPESampler,
        NSGAIISampler,
        BruteForceSampler,
        partial(PartialFixedSampler, {"a": 0.5}, RandomSampler()),
    ],
)
def test_a_sampler_without_a_seed_draws_by_that_of_the_search(make: Any) -> None:
    space = {"a": hp_quniform(0, 2, 0.5), "b": hp_quniform(0, 4, 0.5)}
    if make is Own:
        space = {"a": hp_uniform(0, 2), "b": hp_uniform(0, 2)}

    def drawn(sampler: BaseSampler, seed: int) -> list[Any]:
        searcher = sampled(sampler, 12, at_once=12, space=space, seed=seed)
        return list(iter(searcher.ask, None))

    used = make()
    assert drawn(used, 1) == drawn(make(), 1) == drawn(used, 1)
    assert drawn(used, 1) != drawn(used, 2)


# ---------------------------------------------------------------------- studies


def studied(trials: int = 12, direction: str = "minimize") -> optuna.Study:
    study = optuna.create_study(study_name="mine", direction=direction, sampler=TPESampler(seed=1))
    for number in range(trials):
        trial = study.ask()
        lr = trial.suggest_float("lr", 1e-4, 1, log=True)
        drop = trial.suggest_float("drop", 0, 1)
        if number == 3:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        trial.report(0.5, 1)
        loss = float(abs(np.log10(lr) + 2) + drop)
        study.tell(trial, loss if direction == "minimize" else -loss)
    return study


PLAIN = {"lr": hp_log(1e-4, 1), "drop": hp_uniform(0, 1)}


def test_the_sampler_goes_on_where_a_study_is_whatever_its_direction() -> None:
    drawn = []
    for direction in ("minimize", "maximize"):
        known = json.loads(json.dumps(study_to_json(studied(direction=direction))))
        check_known(known, OptunaSpace(PLAIN))
        searcher = sampled(TPESampler(), 5, at_once=5, space=PLAIN, known=known["trials"])
        drawn.append(list(iter(searcher.ask, None)))
        assert len(searcher._study.trials) == 12 + 5
    assert drawn[0] != list(iter(sampled(TPESampler(), 5, at_once=5, space=PLAIN).ask, None))
    known["trials"] = known["trials"][:0]
    first = study_to_json(studied())["trials"][4]
    assert first["value"] == repr(studied().trials[4].value)


def test_those_that_wait_in_a_study_are_drawn_first_and_the_others_with_them() -> None:
    study = studied(2)
    study.enqueue_trial({"lr": 0.5, "drop": 0.25})
    study.enqueue_trial({"drop": 0.75})
    known = study_to_json(study)
    check_known(known, OptunaSpace(PLAIN))
    searcher = sampled(space=PLAIN, known=known["trials"])
    assert searcher.ask() == {"lr": 0.5, "drop": 0.25}
    second = searcher.ask()
    assert second is not None and second["drop"] == 0.75 and 1e-4 <= second["lr"] <= 1
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2 + ["WAITING"] * 2


def enqueued(**params: Any) -> optuna.Study:
    study = studied(0)
    study.enqueue_trial(params)
    return study


def of_space(study: optuna.Study, space: Any) -> None:
    check_known(study_to_json(study), OptunaSpace(space))


def first_of(sampler: BaseSampler, space: Any = PLAIN) -> None:
    sampled(sampler, space=space).ask()


class Broken(RandomSampler):
    def sample_independent(self, *args: Any) -> Any:
        raise RuntimeError("no luck")


WRONG: dict[str, Callable[[], None]] = {
    "a study with another parameter": partial(of_space, studied(1), {"lr": hp_log(1e-4, 1)}),
    "a study with another kind of it": partial(
        of_space, studied(1), {**PLAIN, "drop": hp_choice([0, 1])}
    ),
    "a study of logarithms": partial(of_space, studied(1), {**PLAIN, "lr": hp_uniform(0, 1)}),
    "a study that lacks one": partial(of_space, studied(1), {**PLAIN, "n": hp_int(1, 3)}),
    "one that waits beyond the space": partial(of_space, enqueued(lr=7.0), PLAIN),
    "one that waits for what is not there": partial(of_space, enqueued(depth=3), PLAIN),
    "a grid beyond the space": partial(
        first_of, GridSampler({"lr": [5.0], "drop": [0.1]})
    ),
    "a grid between the steps": partial(
        first_of, GridSampler({"n": [2]}), {"n": hp_int(1, 9, step=2)}
    ),
    "a grid of other options": partial(
        first_of, GridSampler({"n": ["c"]}), {"n": hp_choice(["a", "b"])}
    ),
    "a grid without a parameter": partial(first_of, GridSampler({"lr": [0.5]})),
    "a sampler that fails": partial(first_of, Broken()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The value")
def test_what_is_not_of_the_space_is_refused(tmp_path: Path) -> None:
    found = {name: refusal(wrong) for name, wrong in WRONG.items()}
    assert_golden(Path(__file__).with_name("golden") / "refused_draws.txt", found)
