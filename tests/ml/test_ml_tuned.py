"""A search as one estimator: its Params, what it refuses, its runs on real agents; no JVM."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import cerebro_hydra
from cerebro_hydra import LocalStore, TunedEstimator, tune
from cerebro_hydra.ml import SparkModel
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import (
    BOHBSearch,
    CustomSearch,
    GridSearch,
    HyperbandSearch,
    PBTSearch,
    RandomSearch,
    SearchResult,
    SuccessiveHalvingSearch,
    hp_choice,
    hp_log,
)
from cerebro_hydra.tune.search import Search
from cerebro_hydra.tune.searchers.searcher import CandidateList
from tests.golden import assert_golden, refusal
from tests.ml import nets

SPACE = {"lr": hp_log(1e-3, 1.0), "hidden": hp_choice([4, 8])}


def tuned(path: Path, searcher: Any = SuccessiveHalvingSearch, **arguments: Any) -> TunedEstimator:
    given = {
        "search_space": SPACE,
        "num_epochs": 2,
        "store": LocalStore(str(path)),
        "backend": LocalBackend(2),
        "order": "seeded",
        "verbose": 0,
        **arguments,
    }
    return TunedEstimator(nets.made, searcher, **given)


def test_every_search_gives_its_own_arguments_as_params() -> None:
    for name in tune.__all__:
        kind = getattr(tune, name)
        if not isinstance(kind, type) or not issubclass(kind, Search):
            continue
        estimator = TunedEstimator(nets.made, kind)
        names = {param.name for param in estimator.params}
        assert {"num_epochs", "store", "time_budget", "target", "predictionCol"} <= names
        assert ("search_space" in names) == (kind is not CustomSearch)
        assert "estimator_gen_fn" not in names
    assert TunedEstimator(nets.made, BOHBSearch).hasParam("eta")
    assert TunedEstimator(nets.made, BOHBSearch).getValidation() == 0.2


@pytest.mark.slow
def test_the_model_is_that_of_the_best_trial_and_a_map_changes_the_search(tmp_path: Path) -> None:
    estimator = tuned(tmp_path, num_models=4, eta=2, predictionCol="guess")
    eta, epochs = estimator.getParam("eta"), estimator.num_epochs
    rows: Any = nets.arrays()
    assert estimator.copy({eta: 4}).getOrDefault(eta) == 4 and estimator.getOrDefault(eta) == 2
    first, second = estimator.fit(rows, [{eta: 4}, {epochs: 1}])
    assert isinstance(first, SparkModel) and first.getPredictionCol() == "guess"
    assert first.uid == estimator.uid and first.run_path != second.run_path
    result = SearchResult.open(first.run_path)
    assert [trial.status for trial in result.trials].count("stopped") == 3, "one in four goes on"
    assert first.trial.trial_id == result.best_trial.trial_id
    assert len(first.history["train_loss"]) == 2 and len(second.history["train_loss"]) == 1
    report = cerebro_hydra.replay(first.run_path, first.trial.trial_id)
    assert report.identical, str(report)


@pytest.mark.slow
def test_a_search_that_its_target_ends_gives_the_best_so_far(tmp_path: Path) -> None:
    arguments = {"target": {"loss": 100.0}, "num_models": 2, "num_epochs": 3}
    rows: Any = nets.arrays()
    model = tuned(tmp_path, RandomSearch, **arguments).fit(rows)
    assert len(model.history["train_loss"]) < 3
    own = partial(CandidateList, [{"lr": 0.1, "hidden": 4}], 1)
    arguments = {"make_searcher": own, "num_epochs": 1, "store": LocalStore(str(tmp_path))}
    custom = TunedEstimator(nets.made, CustomSearch, backend=LocalBackend(2), **arguments)
    assert custom.fit(rows).trial.params == {"lr": 0.1, "hidden": 4}


class OfOne(GridSearch):
    """A search of a user's own."""


NOTHING: Any = None
WRONG: dict[str, Any] = {
    "a searcher that is none": lambda path: TunedEstimator(nets.made, "hyperband"),  # type: ignore[arg-type]
    "a search that is made": lambda path: TunedEstimator(
        nets.made,
        tuned(path, num_models=2)._search(NOTHING),  # type: ignore[arg-type]
    ),
    "the base of all searches": lambda path: TunedEstimator(nets.made, Search),
    "no function": lambda path: TunedEstimator(3, GridSearch),  # type: ignore[arg-type]
    "eta = 1": lambda path: tuned(path, HyperbandSearch, eta=1).fit(NOTHING),
    "num_epochs below grace_epochs": lambda path: tuned(path, BOHBSearch, grace_epochs=3).fit(
        NOTHING
    ),
    "validation = None": lambda path: tuned(path, num_models=3, validation=None).fit(NOTHING),
    "an unknown mutation": lambda path: tuned(
        path, PBTSearch, num_models=3, mutations=["momentum"]
    ).fit(NOTHING),
    "no num_models": lambda path: tuned(path).fit(NOTHING),
    "no search_space": lambda path: TunedEstimator(
        nets.made, GridSearch, num_epochs=2, store=LocalStore(str(path))
    ).fit(NOTHING),
    "no num_epochs": lambda path: TunedEstimator(nets.made, GridSearch).fit(NOTHING),
    "no store": lambda path: TunedEstimator(nets.made, GridSearch, num_epochs=1).fit(NOTHING),
}


def test_what_can_not_be_used_is_refused_before_training(tmp_path: Path) -> None:
    found = {name: refusal(partial(wrong, tmp_path)) for name, wrong in WRONG.items()}
    found = {name: re.sub(r"(Estimator)_\w+", r"\1_1", text) for name, text in found.items()}
    assert_golden(Path(__file__).with_name("golden") / "refused_searches.txt", found)
    assert not list((tmp_path / "runs").iterdir()), "nothing was begun"
    for searcher, name in ((GridSearch, "eta"), (HyperbandSearch, "num_model"), (OfOne, "trials")):
        with pytest.raises(TypeError, match=rf"of {searcher.__name__} has no argument '{name}'"):
            tuned(tmp_path, searcher, **{name: 3})
