"""Searches that stop early refuse what they can't use, before anything trains."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest

from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import (
    ASHASearch,
    BOHBSearch,
    HyperbandSearch,
    MedianStopping,
    OptunaSearch,
    PBTSearch,
    RandomSearch,
    SuccessiveHalvingSearch,
    TPESearch,
    hp_log,
)
from cerebro_hydra.tune.decisions import AskAndTell
from tests.golden import assert_golden, refusal
from tests.processes import run_python
from tests.tune.searchers import RUN
from tests.tune.test_tune_search import arguments, rows


def given(path: Path, **changes: Any) -> dict[str, Any]:
    fixed = {"num_models": 4, "num_epochs": 9, "search_space": {"lr": hp_log(1e-4, 1e-1)}}
    return arguments(path, **{**fixed, **changes})


WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "eta = 1": (SuccessiveHalvingSearch, {"eta": 1}),
    "eta = 2.5": (ASHASearch, {"eta": 2.5}),
    "grace_epochs = 0": (HyperbandSearch, {"grace_epochs": 0}),
    "num_epochs below grace_epochs": (HyperbandSearch, {"num_epochs": 2, "grace_epochs": 3}),
    "num_models = None": (SuccessiveHalvingSearch, {"num_models": None}),
    "num_models of Hyperband = 0": (HyperbandSearch, {"num_models": 0}),
    "no validation": (
        SuccessiveHalvingSearch, {"validation": None, "evaluation_metric": "loss"},
    ),
    "eta of BOHB = 1": (BOHBSearch, {"eta": 1}),
    "num_epochs of BOHB below grace_epochs": (BOHBSearch, {"num_epochs": 2, "grace_epochs": 3}),
    "no validation of BOHB": (BOHBSearch, {"validation": None, "evaluation_metric": "loss"}),
    "no validation to stop by": (
        RandomSearch,
        {"validation": None, "evaluation_metric": "loss", "stopping": MedianStopping()},
    ),
    "a seeded ASHA": (ASHASearch, {"order": "seeded"}),
    "a seeded median": (RandomSearch, {"order": "seeded", "stopping": MedianStopping()}),
    "stopping = 'median'": (RandomSearch, {"stopping": "median"}),
    "a population of one": (PBTSearch, {"num_models": 1, "mutations": ["lr"]}),
    "an unknown mutation": (PBTSearch, {"mutations": ["lr", "momentum"]}),
    "mutations = 'lr'": (PBTSearch, {"mutations": "lr"}),
    "no mutations": (PBTSearch, {"mutations": []}),
    "no comparison": (PBTSearch, {"mutations": ["lr"], "perturbation_interval": 9}),
    "quantile_fraction = 0.6": (PBTSearch, {"mutations": ["lr"], "quantile_fraction": 0.6}),
    "a population without validation": (
        PBTSearch, {"mutations": ["lr"], "validation": None, "evaluation_metric": "loss"},
    ),
    "num_models of TPE = 0": (TPESearch, {"num_models": 0}),
    "neither sampler nor study": (OptunaSearch, {}),
    "sampler = 'tpe'": (OptunaSearch, {"sampler": "tpe"}),
    "study = 'digits'": (OptunaSearch, {"study": "digits"}),
    "a study of two objectives": (
        OptunaSearch,
        {"study": optuna.create_study(study_name="two", directions=["minimize", "maximize"])},
    ),
}  # fmt: skip


def test_unusable_arguments_are_refused_with_what_to_give(tmp_path: Path) -> None:
    found = {
        name: refusal(partial(kind, **given(tmp_path, **changes)))
        for name, (kind, changes) in WRONG.items()
    }
    assert_golden(Path(__file__).with_name("golden") / "refused_early_searches.txt", found)


@pytest.mark.parametrize("kind", [SuccessiveHalvingSearch, BOHBSearch, ASHASearch])
def test_a_metric_that_is_not_measured_stops_before_any_agent(tmp_path: Path, kind: Any) -> None:
    backend = LocalBackend(2)
    launcher = backend.agents
    search = kind(**given(tmp_path, backend=backend, evaluation_metric="recall"))
    with pytest.raises(ConfigurationError, match="'recall', which is not measured"):
        search.fit(rows())
    assert backend.agents is launcher, "agents were launched"


def test_prepared_data_without_validation_rows_is_refused(tmp_path: Path) -> None:
    search = SuccessiveHalvingSearch(**given(tmp_path))
    spec = DataSpec.checked(["features"], ["label"], None, None)
    manifest = search.backend.prepare(search.store, rows(), spec)
    said = "it has no validation rows.*prepare it with backend.prepare_data"
    with pytest.raises(ConfigurationError, match=said):
        search.fit_on_prepared_data(manifest)


def test_hyperband_has_the_trials_of_the_paper_or_as_many_as_are_given(tmp_path: Path) -> None:
    def brackets(**changes: Any) -> list[int]:
        search = HyperbandSearch(**given(tmp_path, **changes))
        assert search.num_models == sum(each.trials for each in search.brackets)
        return [each.trials for each in search.brackets]

    assert brackets(num_models=None, num_epochs=81) == [81, 34, 15, 8, 5]
    assert brackets(num_models=17) == [9, 5, 3]
    assert brackets(num_models=2) == [1, 1]
    search = HyperbandSearch(**given(tmp_path, num_models=None, num_epochs=81))
    begun = AskAndTell(search.searcher(RUN), 81, 2).begin()
    budgets = Counter(event.budget for event in begun)  # type: ignore[union-attr]
    assert budgets == {1: 81, 3: 34, 9: 15, 27: 8, 81: 5}
    assert {event.budget for event in begun[:20]} == {1, 3, 9, 27, 81}  # type: ignore[union-attr]


def test_more_trials_begin_with_the_same_draws(tmp_path: Path) -> None:
    def drawn(kind: Any, count: int) -> list[dict[str, Any]]:
        search = kind(**given(tmp_path, num_models=count))
        begun = AskAndTell(search.searcher(RUN), 9, 2).begin()
        return [event.params for event in begun]  # type: ignore[union-attr]

    assert drawn(SuccessiveHalvingSearch, 9)[:4] == drawn(SuccessiveHalvingSearch, 4)
    assert drawn(ASHASearch, 9) == drawn(ASHASearch, 4) == drawn(HyperbandSearch, 4)


def test_without_optuna_the_searches_say_what_to_install() -> None:
    code = """
import sys
sys.modules["optuna"] = None
from cerebro_hydra import BOHBSearch, GridSearch, OptunaSearch, TPESearch
for kind in (OptunaSearch, TPESearch, BOHBSearch):
    try:
        kind(search_space={}, num_models=1)
    except Exception as error:
        print(type(error).__name__, error)
"""
    said = run_python("-c", code).stdout.splitlines()
    remedy = "needs optuna; install it with pip install 'cerebro-hydra[optuna]'"
    kinds = ("OptunaSearch", "TPESearch", "BOHBSearch")
    assert said == [f"SetupError {kind} {remedy}" for kind in kinds]
