"""Models, classes and stores that no search can use: refused with a sentence before any agent.

What only Spark can meet is in tests/end_to_end/test_bad_input.py.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.errors import AllTrialsFailed, ConfigurationError, StoreError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import GridSearch, HyperbandSearch, hp_choice
from tests.tune import tune_models
from tests.tune.test_tune_search import arguments, rows


def changed(params: dict[str, Any]) -> Recipe:
    """The small net with one thing changed."""
    return replace(tune_models.small({}), **params)


def another_width(params: dict[str, Any]) -> Recipe:
    """Takes 100 features, where the data has 16."""
    model = torch.nn.Linear(params["width"], 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model=model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())


def no_estimator(params: dict[str, Any]) -> Any:
    """What a newcomer may return first."""
    return tune_models.small({}).model


def with_label(label: int) -> Arrays:
    data = rows(60)
    labels = data.arrays["label"].copy()
    labels[7] = label
    return Arrays({**data.arrays, "label": labels})


@pytest.mark.parametrize(
    ("factory", "space", "metric", "said"),
    [
        (
            another_width, {"width": [100]}, "loss",
            r"forward .*failed on .* features \(features: float32\[\d+, 16\].*\(\d+x16 and 100x4\)",
        ),
        (
            changed, {"metrics": [["acuracy"]]}, "accuracy",
            r"unknown metric 'acuracy'; known are \['acc', 'accuracy', .*\].*\{name: \(function",
        ),
        (changed, {"shards": [["layer9"]]}, "accuracy", r"'layer9'.*modules"),
        (changed, {"replicas": [0]}, "accuracy", r"replicas is 0; it is a whole number from 1"),
        (changed, {"replicas": [1.5]}, "accuracy", r"replicas is 1.5; it is a whole number from 1"),
        (
            changed, {"replicas": [3]}, "accuracy",
            r"replicas is 3, and there are 2 partitions; take at most so many, or prepare",
        ),
        (
            changed, {"replicas": [2], "schedule": ["2bw"], "shards": [2]}, "accuracy",
            r"replicas is 2 and schedule is '2bw', .*one device.*take schedule='sequential'",
        ),
        (
            no_estimator, {"lr": [0.1]}, "accuracy",
            r"estimator_gen_fn returned a Sequential; return a SparkEstimator or a Recipe",
        ),
    ],
)  # fmt: skip
def test_estimators_that_can_not_be_trained(
    tmp_path: Path, factory: Any, space: dict[str, list[Any]], metric: str, said: str
) -> None:
    choices = {name: hp_choice(values) for name, values in space.items()}
    search = GridSearch(
        **arguments(
            tmp_path, estimator_gen_fn=factory, search_space=choices, evaluation_metric=metric
        )
    )
    with pytest.raises((AllTrialsFailed, ConfigurationError), match=f"(?s){said}"):
        search.fit(rows())
    assert not list(tmp_path.glob("runs/*/journal")), "a run was begun"


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (
            9,
            r"label: int64\[16\] from 0 to 9\), label 9 is no class of a model with 4 outputs",
        ),
        (-1, r"label -1 is no class of a model with 4 outputs, whose classes are 0 to 3; give"),
    ],
)
def test_classes_that_the_model_does_not_have(tmp_path: Path, label: int, said: str) -> None:
    with pytest.raises(AllTrialsFailed, match=f"(?s){said}"):
        GridSearch(**arguments(tmp_path, validation=0.1)).fit(with_label(label))
    assert not list(tmp_path.glob("runs/*/journal")), "a run was begun"


def test_a_store_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    said = r"can't create '.*file/store/data': .*choose another folder"
    with pytest.raises(StoreError, match=said):
        LocalStore(prefix_path=str(tmp_path / "file" / "store"))
    # A store whose runs' place is taken shows it before anything trains, too.
    store = LocalStore(prefix_path=str(tmp_path / "store"))
    os.rmdir(tmp_path / "store" / "runs")
    (tmp_path / "store" / "runs").write_text("no folder")
    with pytest.raises((AllTrialsFailed, StoreError), match=r"can't .*runs.*choose another folder"):
        GridSearch(**arguments(tmp_path, store=store)).fit(rows())


def test_half_written_and_other_data_in_a_store(tmp_path: Path) -> None:
    store, backend = LocalStore(str(tmp_path)), LocalBackend(2)
    data = Arrays({"half": np.full((60, 1), 0.5), "label": np.arange(60) % 4})
    spec = DataSpec.checked(["half"], ["label"], None, 0.2)
    manifest = backend.prepare(store, data, spec)
    said = r"no column 'features', its columns are \['half', 'label'\].*backend.prepare_data"
    with pytest.raises(ConfigurationError, match=said):
        GridSearch(**arguments(tmp_path)).fit_on_prepared_data()
    folder = Path(store.data_path(manifest.fingerprint))
    next(folder.glob("*/split=train/partition=00001/*.parquet")).unlink()
    said = r"prepared data doesn't match its manifest: .*partition=00001.*delete '.*and prepare"
    for given in (manifest, None):
        with pytest.raises(StoreError, match=said):
            GridSearch(**arguments(tmp_path, feature_columns=["half"])).fit_on_prepared_data(given)
    # Without its manifest a preparation has not ended: it is none, and made anew.
    (folder / "manifest.json").unlink()
    with pytest.raises(ConfigurationError, match="it holds none"):
        GridSearch(**arguments(tmp_path, feature_columns=["half"])).fit_on_prepared_data()
    assert backend.prepare(store, data, spec) == manifest
    assert json.loads((folder / "manifest.json").read_text())["fingerprint"] == folder.name


def misspelled(params: dict[str, Any]) -> Recipe:
    return replace(tune_models.small({}), bacth_size=3)  # type: ignore[call-arg]


class Untouched(LocalBackend):
    """Fails a search that begins to prepare rows."""

    def prepare(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("rows were prepared before a model was built")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"estimator_gen_fn": misspelled}, "bacth_size"),
        (
            {"estimator_gen_fn": another_width, "search_space": {"width": hp_choice([9])}},
            "16 and 9",
        ),
        ({"evaluation_metric": "f1"}, r"'f1', which is not measured; .*\['loss', 'accuracy'\]"),
        ({"target": {"auc": 0.9}}, "'val_auc', which is not measured"),
        ({"estimator_gen_fn": lambda params: tune_models.small(params)}, "can't import"),
    ],
)
def test_what_the_first_model_shows_is_told_before_rows_are_prepared(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    search = GridSearch(**{**arguments(tmp_path), "backend": Untouched(2), **changes})
    with pytest.raises((AllTrialsFailed, ConfigurationError), match=said):
        search.fit(rows())
    assert not [*(tmp_path / "runs").glob("*")], "no run is left that could be resumed"


def test_a_candidate_that_can_not_be_built_fails_alone_if_another_one_can(tmp_path: Path) -> None:
    space = {"width": hp_choice([100, 16])}
    search = GridSearch(
        **{
            **arguments(tmp_path, evaluation_metric="loss"),
            "backend": Untouched(2),
            "estimator_gen_fn": another_width,
            "search_space": space,
        }
    )
    with pytest.raises(AssertionError, match="rows were prepared"):
        search.fit(rows())


def test_a_misspelled_argument_of_a_search_names_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"GridSearch .*'num_epoch'; did you mean 'num_epochs'\?"):
        GridSearch(**arguments(tmp_path), num_epoch=1)
    with pytest.raises(TypeError, match=r"HyperbandSearch .*'model_num'; .*'eta',.*'num_models',"):
        HyperbandSearch(**arguments(tmp_path), model_num=4)
    with pytest.raises(TypeError, match="'num_model'; did you mean 'num_models'"):
        HyperbandSearch(**arguments(tmp_path), num_model=4)


def test_a_batch_that_is_larger_than_a_partition_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = GridSearch(
        **{
            **arguments(tmp_path, num_epochs=1, evaluation_metric="loss", verbose=1),
            "estimator_gen_fn": changed,
            "search_space": {"batch_size": hp_choice([500, 500, 8])},
        }
    )
    search.fit(rows(60))
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "batch_size is" in each)
    assert line == (
        "trial-000: batch_size is 500, and a partition has at most 24 training rows, so that these "
        "are one batch"
    )
