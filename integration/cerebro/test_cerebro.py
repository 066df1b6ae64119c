"""Tests the real searches of cerebro-dl over our hopper, in an environment of their own."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}

import numpy as np
import pytest
import torch
from cerebro.tune import GridSearch, RandomSearch, TPESearch, hp_choice, hp_uniform
from hopping import HoppingBackend, HoppingStore, hopping
from hopping.epochs import Epochs
from torch import nn

from cerebro_hydra import SparkBackend, SparkEstimator, local_spark, replay
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.replay.record import result_state
from cerebro_hydra.storage import RunFolder

WORKERS = 2
ROWS = 600
EPOCHS = 3


def make_factory() -> Any:
    """Return a factory that travels by value, as one from a notebook does."""

    def estimator_gen_fn(params: dict[str, Any]) -> SparkEstimator:
        if params["lr"] > 1:
            raise ValueError(f"lr is {params['lr']}")
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
        return SparkEstimator(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=params["lr"]),
            loss=nn.CrossEntropyLoss(),
            metrics=["accuracy"],
            batch_size=params.get("batch_size", 32),
            shards=2,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        )

    return estimator_gen_fn


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    session = local_spark(workers=WORKERS)
    yield session
    session.stop()


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    draw = np.random.default_rng(7)
    labels = draw.integers(0, 3, ROWS)
    features = draw.normal(labels[:, None], 1.0, (ROWS, 8)).astype("float32")
    rows = [(f.tolist(), int(n)) for f, n in zip(features, labels, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label long")


@pytest.fixture
def backend(spark: Any) -> HoppingBackend:
    return HoppingBackend(SparkBackend(spark_context=spark.sparkContext, num_workers=WORKERS))


def arguments(backend: HoppingBackend, tmp_path: Path, **others: Any) -> dict[str, Any]:
    return {
        "backend": backend,
        "store": HoppingStore(str(tmp_path)),
        "estimator_gen_fn": hopping(make_factory()),
        "num_epochs": EPOCHS,
        "validation": 0.2,
        "verbose": 0,
        **others,
    }


def check_visits(groups: list[Epochs], models: int, epochs: int) -> None:
    """Check by the journals that every model visited every partition once in every epoch."""
    for number, group in enumerate(groups):
        assert group.result is not None
        assert group.result.document.num_epochs == epochs
        assert len(group.result.trials) == models, f"group {number}"
        for trial in group.result.trials:
            expected = [(e, p) for e in range(epochs) for p in range(WORKERS)]
            assert sorted(trial.visit_log) == expected


def check_result(result: Any, models: int) -> None:
    assert len(result.get_all_models()) == models
    for model in result.get_all_models():
        history = model.getHistory()
        assert set(history) == {"train_loss", "val_loss", "val_accuracy"}
        assert all(len(values) == EPOCHS for values in history.values())
    losses = [model.getHistory()["val_loss"][-1] for model in result.get_all_models()]
    assert result.get_best_model_history()["val_loss"][-1] == min(losses)
    assert len(set(losses)) > 1


def test_grid_search_is_one_long_training_bit_for_bit(
    backend: HoppingBackend, df: Any, tmp_path: Path
) -> None:
    space = {"lr": hp_choice([0.01, 0.001]), "batch_size": hp_choice([16, 64])}
    search = GridSearch(search_space=space, **arguments(backend, tmp_path))
    result = search.fit(df)
    check_result(result, models=4)
    check_visits(backend.groups, models=4, epochs=EPOCHS)
    assert len(list((tmp_path / "logs").glob("*/events*"))) >= 4  # event files for TensorBoard

    (group,) = backend.groups
    assert group.result is not None
    assert len(list((tmp_path / "runs").iterdir())) == 1
    for model, trial in zip(result.get_all_models(), group.result.trials, strict=True):
        assert model.getHistory() == trial.history
        assert replay(
            group.result.run_path, trial.trial_id, search.estimator_gen_fn.__wrapped__
        ).identical
    predicted = result.set_output_columns(["scores"]).transform(df).collect()
    hits = sum(int(np.argmax(row.scores)) == row.label for row in predicted)
    assert len(predicted) == ROWS
    assert hits / ROWS > 0.8
    assert isinstance(result.get_best_model().torch(), nn.Sequential)


def test_random_search_trains_as_many_models_as_asked(
    backend: HoppingBackend, df: Any, tmp_path: Path
) -> None:
    space = {"lr": hp_uniform(0.001, 0.05), "batch_size": hp_choice([16, 32, 64])}
    search = RandomSearch(search_space=space, num_models=3, **arguments(backend, tmp_path))
    search.fit(df)
    again = RandomSearch(search_space=space, num_models=3, **arguments(backend, tmp_path))
    result = again.fit_on_prepared_data()
    check_result(result, models=3)
    check_visits(backend.groups, models=3, epochs=EPOCHS)
    assert len(backend.groups) == 2


def test_tpe_search_learns_from_its_first_models(
    backend: HoppingBackend, df: Any, tmp_path: Path
) -> None:
    search = TPESearch(
        search_space={"lr": hp_uniform(0.0005, 0.05)},
        num_models=4,
        **arguments(backend, tmp_path),
    )
    result = search.fit(df)
    check_result(result, models=4)
    check_visits(backend.groups, models=WORKERS, epochs=EPOCHS)
    assert len(backend.groups) == 2


def test_a_model_that_fails_is_never_the_best(
    backend: HoppingBackend, df: Any, tmp_path: Path
) -> None:
    space = {"lr": hp_choice([100.0, 0.01])}
    options = arguments(backend, tmp_path, num_epochs=2)
    result = GridSearch(search_space=space, **options).fit(df)
    broken, good = result.get_all_models()
    assert result.get_best_model() is good
    assert broken.getHistory()["val_loss"] == [math.inf, math.inf]
    with pytest.raises(ConfigurationError, match=r"lr is 100"):
        broken.trained()


def of_odd_estimators(backend: HoppingBackend, tmp_path: Path, **odd: Any) -> GridSearch:
    def estimator_gen_fn(params: dict[str, Any]) -> SparkEstimator:
        model = nn.Linear(8, 3)
        return SparkEstimator(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=params["lr"]),
            loss=nn.CrossEntropyLoss(),
            **odd,
        )

    options = arguments(backend, tmp_path, estimator_gen_fn=hopping(estimator_gen_fn))
    return GridSearch(search_space={"lr": hp_choice([0.1])}, **options)


def test_a_schedule_may_step_once_an_epoch(
    backend: HoppingBackend, df: Any, tmp_path: Path
) -> None:
    def plateau(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=0.9, factor=0.1
        )

    search = of_odd_estimators(backend, tmp_path, lr_scheduler=plateau)
    search.fit(df)
    (group,) = backend.groups
    assert group.result is not None
    assert replay(group.result.run_path, "trial-000", search.estimator_gen_fn.__wrapped__).identical
    # The second epoch does not improve by nine tenths, so the third has a tenth of the rate.
    folder = RunFolder.open(group.result.run_path)
    (shard,) = folder.read_state(0, result_state(folder, 0))["shards"]
    assert shard["cursor"] is not None
    assert shard["cursor"]["groups"][0]["lr"] == pytest.approx(0.01)


def test_early_stopping_is_refused(backend: HoppingBackend, df: Any, tmp_path: Path) -> None:
    search = of_odd_estimators(backend, tmp_path, early_stopping=1)
    with pytest.raises(ConfigurationError, match=r"early_stopping is 1; .*leave it out"):
        search.fit(df)


def test_a_search_without_validation_rows_is_refused(
    backend: HoppingBackend, tmp_path: Path, df: Any
) -> None:
    with pytest.raises(ConfigurationError, match=r"validation is None.*compare models on"):
        backend.prepare_data(HoppingStore(str(tmp_path)), df, validation=None)


def test_validation_before_training_is_refused(backend: HoppingBackend, tmp_path: Path) -> None:
    model = hopping(make_factory())({"lr": 0.1})
    with pytest.raises(ConfigurationError, match="has not been trained"):
        backend.train_for_one_epoch(
            [model], HoppingStore(str(tmp_path)), ["features"], ["label"], is_train=False
        )
