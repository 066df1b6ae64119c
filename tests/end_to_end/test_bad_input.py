"""Whatever a user gives that can't be trained on is met with a sentence, before an agent starts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from cerebro_hydra import TLS, GridSearch, LocalStore, SparkBackend, SparkEstimator, hp_choice
from cerebro_hydra.errors import CerebroHydraError
from tests.end_to_end import models

pytestmark = pytest.mark.spark

ROWS, WORKERS = 60, 2


def built(params: dict[str, Any]) -> Any:
    """The small net with one thing changed."""
    recipe = models.feed_forward({"lr": 0.01})
    return replace(recipe, **params)


def another_width(params: dict[str, Any]) -> Any:
    """Takes 100 features, where the data has 16."""
    import torch

    model = torch.nn.Linear(params["width"], 4)
    return SparkEstimator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.CrossEntropyLoss()
    )


def no_estimator(params: dict[str, Any]) -> Any:
    """What a newcomer may return first."""
    return models.feed_forward({"lr": 0.01}).model


@pytest.fixture(scope="module")
def backend(spark: Any) -> SparkBackend:
    return SparkBackend(spark_context=spark, num_workers=WORKERS)


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    return spark.range(ROWS).select(
        F.transform(F.sequence(F.lit(1), F.lit(16)), lambda i: F.sin(i * F.col("id"))).alias(
            "features"
        ),
        (F.col("id") % 4).alias("label"),
        F.concat(F.lit("row "), F.col("id")).alias("text"),
        F.lit(0.5).alias("half"),
    )


def with_row(df: Any, column: str, value: str) -> Any:
    """The DataFrame with one value changed in its seventh row."""
    return df.withColumn(
        column, F.when(F.col("text") == "row 7", F.expr(value)).otherwise(F.col(column))
    )


DATA: dict[str, tuple[Any, dict[str, Any], str]] = {
    "missing column": (
        lambda df: df.drop("label"),
        {},
        r"no column 'label'; its columns are \['features', 'text', 'half'\]",
    ),
    "null": (
        lambda df: with_row(df, "label", "null"),
        {},
        r"'label' is null, .* in 1 of 60 rows, as in Row\(.*'row 7'.*\): fill or drop",
    ),
    "NaN": (
        lambda df: with_row(df, "features", "array_repeat(double('nan'), 16)"),
        {},
        r"'features' holds NaN, infinity.* in 1 of 60 rows.*'row 7'",
    ),
    "ragged": (
        lambda df: with_row(df, "features", "array(0d, 1d)"),
        {},
        r"'features' has arrays of different lengths, from 2 to 16.*'row 7'.*pad or cut",
    ),
    "text": (
        lambda df: df,
        {"feature_columns": ["text"]},
        r"'text' is string: .*StringIndexer or a tokenizer",
    ),
    "empty": (lambda df: df.where("half > 1"), {}, "the DataFrame is empty"),
    "fewer rows than partitions": (
        lambda df: df.limit(1),
        {"validation": None, "evaluation_metric": "loss"},
        r"1 training rows are fewer than 2",
    ),
    "class out of range": (
        lambda df: with_row(df, "label", "9"),
        {},
        r"label column 'label' holds values from 0 to 9, .*\[\d+, 4\] fails at 9: .*correct",
    ),
    "negative class": (
        lambda df: with_row(df, "label", "-1"),
        {},
        r"the loss failed on a batch .* \(label: int64\[\d+\] from -1 to 3\): .*outputs that fit",
    ),
}

FACTORIES: dict[str, tuple[Any, dict[str, list[Any]], dict[str, Any], str]] = {
    "forward that does not fit": (
        another_width,
        {"width": [100]},
        {"evaluation_metric": "loss"},
        r"forward failed on .* features \(features: float32\[\d+, 16\].*\(\d+x16 and 100x4\); give",
    ),
    "unknown metric": (
        built,
        {"metrics": [["acuracy"]]},
        {},
        r"unknown metric 'acuracy'; known are \['acc', 'accuracy', .*\].*\{name: \(function",
    ),
    "metric that is not measured": (
        built,
        {"batch_size": [8]},
        {"evaluation_metric": "f1"},
        r"evaluation_metric is 'f1', which is not measured; .*\['loss', 'accuracy'\]; add it",
    ),
    "unknown module": (built, {"shards": [["layer9"]]}, {}, r"'layer9'.*modules"),
    "factory of a wrong type": (
        no_estimator,
        {"lr": [0.1]},
        {},
        r"estimator_gen_fn returned a Sequential; return a SparkEstimator",
    ),
}


def search(backend: SparkBackend, path: Path, **changes: Any) -> GridSearch:
    given = {
        "backend": backend,
        "store": LocalStore(prefix_path=str(path)),
        "estimator_gen_fn": models.feed_forward,
        "search_space": {"lr": hp_choice([0.1])},
        "num_epochs": 1,
        "evaluation_metric": "accuracy",
        "verbose": 0,
    }
    return GridSearch(**{**given, **changes})


@pytest.mark.parametrize("name", DATA)
def test_data_that_can_not_be_trained_on(
    backend: SparkBackend, df: Any, tmp_path: Path, name: str
) -> None:
    change, options, said = DATA[name]
    with pytest.raises(CerebroHydraError, match=f"(?s){said}"):
        search(backend, tmp_path, **options).fit(change(df))
    assert not list(tmp_path.glob("runs/*/journal")), "a run was begun"


@pytest.mark.parametrize("name", FACTORIES)
def test_estimators_that_can_not_be_trained(
    backend: SparkBackend, df: Any, tmp_path: Path, name: str
) -> None:
    factory, space, options, said = FACTORIES[name]
    choices = {param: hp_choice(values) for param, values in space.items()}
    with pytest.raises(CerebroHydraError, match=f"(?s){said}"):
        search(backend, tmp_path, estimator_gen_fn=factory, search_space=choices, **options).fit(df)
    assert not list(tmp_path.glob("runs/*/journal")), "a run was begun"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"search_space": {}}, r"search_space is empty; give at least one"),
        ({"search_space": {"lr": [0.1]}}, r"'lr'.*hp_choice"),
        ({"validation": 1.5}, r"validation is 1\.5; a share lies between 0 and 1"),
        ({"validation": 0}, r"validation is 0; .*None is for no validation"),
    ],
)
def test_arguments_that_mean_nothing(
    backend: SparkBackend, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CerebroHydraError, match=said):
        search(backend, tmp_path, **changes)


@pytest.mark.parametrize(
    ("features", "labels", "said"),
    [
        ("features", ["label"], r"feature_columns is 'features'; give a list: \['features'\]"),
        ([], ["label"], r"feature_columns is \[\]; give a list of column names"),
        (["features"], "label", r"label_columns is 'label'; give a list: \['label'\]"),
        (["label"], ["label"], r"together names 'label' more than once"),
    ],
)
def test_columns_that_a_backend_can_not_take(
    backend: SparkBackend, df: Any, tmp_path: Path, features: Any, labels: Any, said: str
) -> None:
    store = LocalStore(tmp_path / "store", tmp_path)
    for call in (
        lambda: backend.prepare_data(store, df, 0.2, features, labels),
        lambda: backend.existing_data(store, 0.2, features, labels),
        lambda: backend.get_metadata_from_parquet(store, labels, features),
    ):
        with pytest.raises(CerebroHydraError, match=said):
            call()


def test_a_path_is_no_store(backend: SparkBackend, df: Any, tmp_path: Path) -> None:
    path: Any = str(tmp_path)
    for call in (backend.existing_data, backend.get_metadata_from_parquet):
        with pytest.raises(CerebroHydraError, match=r"store is '.*', a str; give a store"):
            call(path)
    with pytest.raises(CerebroHydraError, match=r"store is '.*', a str; give a store"):
        backend.prepare_data(path, df)


def test_more_workers_than_slots_are_counted_and_named(spark: Any) -> None:
    said = r"(?s)9 workers need 9 slots and Spark has 4; worker 4.*set num_workers=4"
    with pytest.raises(CerebroHydraError, match=said):
        SparkBackend(spark_context=spark, num_workers=9)


def test_certificates_that_can_not_be_used(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(CerebroHydraError, match="tls is 'yes'; give True, False or a TLS"):
        SparkBackend(spark_context=spark, num_workers=WORKERS, tls="yes")  # type: ignore[arg-type]
    tls = TLS(certificate=tmp_path / "none.pem", key=tmp_path / "none.key")
    with pytest.raises(CerebroHydraError, match=r"the certificate .*none\.pem can't be used"):
        SparkBackend(spark_context=spark, num_workers=WORKERS, tls=tls)


def test_a_store_that_can_not_be_written(backend: SparkBackend, df: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    said = r"can't create '.*file/store/data': .*choose another folder"
    with pytest.raises(CerebroHydraError, match=said):
        LocalStore(prefix_path=str(tmp_path / "file" / "store"))
    # A store whose runs' place is taken shows it before anything trains, too.
    store = LocalStore(prefix_path=str(tmp_path / "store"))
    os.rmdir(tmp_path / "store" / "runs")
    (tmp_path / "store" / "runs").write_text("no folder")
    with pytest.raises(CerebroHydraError, match=r"can't .*runs.*choose another folder"):
        search(backend, tmp_path, store=store).fit(df)


def test_half_written_and_other_data_in_a_store(
    backend: SparkBackend, df: Any, tmp_path: Path
) -> None:
    store = LocalStore(prefix_path=str(tmp_path))
    manifest = backend.prepare_data(store, df, 0.2, ["half"], ["label"])
    said = r"no column 'features', its columns are \['half', 'label'\].*backend.prepare_data"
    with pytest.raises(CerebroHydraError, match=said):
        search(backend, tmp_path, store=store).fit_on_prepared_data()
    folder = Path(store.data_path(manifest.fingerprint))
    next(folder.glob("split=train/partition=00001/*.parquet")).unlink()
    said = r"prepared data doesn't match its manifest: .*partition=00001.*delete '.*and prepare"
    with pytest.raises(CerebroHydraError, match=said):
        search(backend, tmp_path, feature_columns=["half"]).fit_on_prepared_data(manifest)
    # Without its manifest a preparation has not ended: it is none, and made anew.
    (folder / "manifest.json").unlink()
    with pytest.raises(CerebroHydraError, match="it holds none"):
        search(backend, tmp_path, feature_columns=["half"]).fit_on_prepared_data()
    again = backend.prepare_data(store, df, 0.2, ["half"], ["label"])
    assert again == manifest
    assert json.loads((folder / "manifest.json").read_text())["fingerprint"] == again.fingerprint
