"""DataFrames and clusters that can't be trained on: refused with a sentence before any agent.

What needs no Spark is in tests/tune/test_tune_bad_input.py, and what each row may hold in
tests/data/preparation/test_data_prepare.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from cerebro_hydra import TLS, LocalStore, SparkBackend
from cerebro_hydra.errors import CerebroHydraError
from tests.end_to_end import models
from tests.end_to_end.runs import grid

pytestmark = pytest.mark.spark(group=1)

ROWS, WORKERS = 60, 2


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


DATA = {
    "missing column": (
        lambda df: df.drop("label"),
        r"no column 'label'; its columns are \['features', 'text', 'half'\]",
    ),
    "ragged": (
        lambda df: with_row(df, "features", "array(0d, 1d)"),
        r"'features' has arrays of different lengths, from 2 to 16.*'row 7'.*pad or cut",
    ),
    "empty": (lambda df: df.where("half > 1"), "the DataFrame is empty"),
}


@pytest.mark.parametrize("name", DATA)
def test_data_that_can_not_be_trained_on(
    backend: SparkBackend, df: Any, tmp_path: Path, name: str
) -> None:
    change, said = DATA[name]
    with pytest.raises(CerebroHydraError, match=f"(?s){said}"):
        grid(backend, tmp_path, models.feed_forward, {"lr": [0.1]}).fit(change(df))
    assert not list(tmp_path.glob("runs/*/journal")), "a run was begun"


@pytest.mark.parametrize("path_for_a_store", [True, False])
def test_a_store_and_columns_that_a_backend_can_not_take(
    backend: SparkBackend, df: Any, tmp_path: Path, path_for_a_store: bool
) -> None:
    store: Any = LocalStore(tmp_path / "store", tmp_path)
    features: Any = "features"
    said = r"feature_columns is 'features'; give a list: \['features'\]"
    if path_for_a_store:
        store, features, said = str(tmp_path), ["features"], r"store is '.*', a str; give a store"
    for call in (
        lambda: backend.prepare_data(store, df, 0.2, features, ["label"]),
        lambda: backend.existing_data(store, 0.2, features, ["label"]),
        lambda: backend.get_metadata_from_parquet(store, ["label"], features),
    ):
        with pytest.raises(CerebroHydraError, match=said):
            call()


def test_more_workers_than_slots_are_counted_and_named(spark: Any) -> None:
    said = r"(?s)9 workers need 9 slots and Spark has 4; worker 4.*set num_workers=4"
    with pytest.raises(CerebroHydraError, match=said):
        SparkBackend(spark_context=spark, num_workers=9)


def test_a_verbose_that_is_no_number(spark: Any) -> None:
    with pytest.raises(CerebroHydraError, match="verbose is 'a'; it is 0 or 1"):
        SparkBackend(spark_context=spark, num_workers=WORKERS, verbose="a")  # type: ignore[arg-type]


def test_certificates_that_can_not_be_used(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(CerebroHydraError, match="tls is 'yes'; give True, False or a TLS"):
        SparkBackend(spark_context=spark, num_workers=WORKERS, tls="yes")  # type: ignore[arg-type]
    tls = TLS(certificate=tmp_path / "none.pem", key=tmp_path / "none.key")
    with pytest.raises(CerebroHydraError, match=r"the certificate .*none\.pem can't be used"):
        SparkBackend(spark_context=spark, num_workers=WORKERS, tls=tls)
