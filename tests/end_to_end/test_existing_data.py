"""Whole runs over files that others wrote: Cerebro's store, and what Spark writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cerebro_hydra import LocalStore, SparkBackend
from cerebro_hydra.errors import ConfigurationError, DataError
from cerebro_hydra.testing.local_backend import LocalBackend
from tests.data.existing.existing_stores import CEREBRO_STORE, joined, read_all
from tests.end_to_end import models
from tests.end_to_end.runs import assert_replays, grid

pytestmark = pytest.mark.slow


def search(backend: Any, store: LocalStore, space: dict[str, list[Any]], **options: Any) -> Any:
    return grid(backend, store, models.feed_forward, space, **options)


def test_what_cerebro_prepared_is_trained_on_and_replays(tmp_path: Path) -> None:
    pytest.importorskip("petastorm")
    shutil.copytree(CEREBRO_STORE, tmp_path / "store")
    before = sorted(path for path in (tmp_path / "store").rglob("*") if path.is_file())
    space = {"lr": [0.01, 0.003], "inputs": [4], "dropout": [0.3], "batch_size": [8]}
    result = search(
        LocalBackend(3), LocalStore(str(tmp_path / "store")), space
    ).fit_on_prepared_data()
    for trial in result.trials:
        assert sorted(trial.visit_log) == [(e, p) for e in range(2) for p in range(3)]
    assert_replays(result)
    assert len(result.get_best_model().history["val_accuracy"]) == 2
    # Nothing was copied: the data's folder has a manifest, and Cerebro's files are all there.
    data = [path.name for path in (tmp_path / "store" / "data").rglob("*") if path.is_file()]
    assert data == ["manifest.json"]
    assert all(path.is_file() for path in before)


def test_files_of_other_columns_are_refused_before_any_run(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path), f"{CEREBRO_STORE}/train_data", f"{CEREBRO_STORE}/val_data")
    given = search(LocalBackend(2), store, {"lr": [0.1]}, feature_columns=["pixels"])
    with pytest.raises(DataError, match="'pixels' is not in"):
        given.fit_on_prepared_data()
    absent = LocalStore(str(tmp_path), f"{tmp_path}/absent")
    with pytest.raises(ConfigurationError, match=r"train_path .*absent' does not exist"):
        search(LocalBackend(2), absent, {"lr": [0.1]}).fit_on_prepared_data()
    assert store.list(f"{store.prefix}/runs") == []


@pytest.mark.spark(group=1)
def test_what_spark_writes_is_read_by_spark_and_trained_on(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors
    from pyspark.sql import functions as F

    random = np.random.default_rng(3)
    labels = np.arange(160) * 4 // 160  # sorted: what is held back must not be one class
    x = random.normal(size=(160, 16)) + labels[:, None]
    x[::2, 1::3] = 0
    rows = [
        (
            i,
            Vectors.dense(x[i])
            if i % 2
            else Vectors.sparse(16, {j: float(x[i, j]) for j in np.flatnonzero(x[i])}),
            int(labels[i]),
            [[i, 1], [2, int(labels[i])]],
            i % 3 == 0,
        )
        for i in range(160)
    ]
    df = spark.createDataFrame(rows, ["i", "features", "label", "grid", "even"])
    df = df.withColumn("a.quarter", (F.col("i") / 4).cast("decimal(12,4)")).coalesce(3)
    df.union(df.limit(0)).write.parquet(f"{tmp_path}/rows")
    store = LocalStore(str(tmp_path / "store"), str(tmp_path / "rows"))
    columns = ["features", "grid", "a.quarter", "even", "i"]
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=3)
    existing = backend.existing_data(store, 0.2, columns, ["label"])
    parts = [read_all(store, existing, split, tmp_path / "c") for split in ("train", "val")]
    i = np.concatenate([joined(each, "i") for each in parts])
    assert sorted(i) == list(range(160))
    expected = {
        "features": x.astype(np.float32),
        "grid": np.array([row[3] for row in rows]),
        "a.quarter": np.arange(160, dtype=np.float32) / 4,
        "even": np.arange(160) % 3 == 0,
        "label": labels,
    }
    for name, values in expected.items():
        own = np.concatenate([joined(each, name) for each in parts])
        assert own.dtype == values.dtype
        np.testing.assert_array_equal(own, values[i])
    held = joined(parts[1], "label")
    assert len(held) == 32
    assert np.bincount(held, minlength=4).min() >= 2

    result = search(backend, store, {"lr": [0.01]}).fit_on_prepared_data()
    assert_replays(result)
    out = result.set_output_columns(["prediction"]).transform(df.select("features")).toPandas()
    assert np.stack(out.prediction).shape == (160, 4)
    metadata = backend.get_metadata_from_parquet(store, ["label"], ["features"])
    assert (metadata.train_rows, metadata.val_rows) == (160, 0)
    assert metadata.metadata["features"].shape == (16,)
