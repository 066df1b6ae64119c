from __future__ import annotations

import decimal
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml.linalg import SparseVector, Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from cerebro_hydra.data.manifest import ROW_ID, ColumnSpec, Manifest, stored_name
from cerebro_hydra.data.parquet import ParquetFolder
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.preparation import prepare as spark_prepare
from cerebro_hydra.data.preparation import row_facts
from cerebro_hydra.data.rows import checksum
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.errors import ConfigurationError, DataError
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.datasets import write_dataset
from tests.golden import assert_golden, refusal
from tests.processes import run_python

pytestmark = pytest.mark.spark(group=1)

ROWS = 101


def prepare(
    df: DataFrame,
    store: LocalStore,
    partitions: int,
    validation: float | str | None,
    columns: Sequence[str],
    seed: int = 0,
) -> Manifest:
    spec = DataSpec.checked(columns, validation=validation, seed=seed)
    return spark_prepare.prepare(df, store, partitions, spec)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "a store"))


@pytest.fixture(scope="module")
def numbers(spark: SparkSession) -> DataFrame:
    """Rows 0..100 in four Spark partitions, one of them empty, with one column of each kind."""
    rows = spark.range(ROWS).repartitionByRange(3, "id")
    rows = rows.union(spark.range(0)).withColumnRenamed("id", "n")
    x = F.col("n").cast("double")
    return rows.select(
        F.col("n").cast("int").alias("n"),
        (x / 3).alias("a.third"),
        (F.col("n") % 2 == 0).alias("even"),
        F.array(x, x + 0.5).alias("pair"),
        F.array(
            *(F.array(*(F.col("n") * 6 + 3 * i + j for j in range(3))) for i in range(2))
        ).alias("grid"),
        (F.col("n") % 5 == 0).cast("int").alias("held_back"),
        F.format_string("text %d", "n").alias("text"),
    ).persist()


COLUMNS = ["n", "a.third", "even", "pair", "grid"]


@pytest.fixture(scope="module")
def prepared(
    numbers: DataFrame, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LocalStore, Manifest]:
    """The numbers in four partitions, with 30 rows held back; nobody changes them."""
    store = LocalStore(str(tmp_path_factory.mktemp("prepared")))
    return store, prepare(numbers, store, 4, 0.3, COLUMNS)


def columns_of(store: LocalStore, manifest: Manifest, split: str) -> dict[str, np.ndarray]:
    """All rows of a split, partition after partition."""
    parts = [
        CachedPartition.build(info, manifest, store, f"{store.prefix}/cache")
        for info in manifest.partitions
        if info.split == split
    ]
    return {
        spec.name: np.concatenate([part.columns[spec.name] for part in parts])
        for spec in manifest.columns
    }


def frame(spark: SparkSession, values: Sequence[object], kind: T.DataType) -> DataFrame:
    schema = T.StructType([T.StructField("id", T.IntegerType()), T.StructField("x", kind)])
    return spark.createDataFrame(list(enumerate(values)), schema).coalesce(1)


def test_every_row_comes_back_once_with_its_type_and_shape(
    prepared: tuple[LocalStore, Manifest],
) -> None:
    store, manifest = prepared
    assert [info.rows for info in manifest.partitions] == [18, 18, 18, 17, 8, 8, 7, 7]
    assert manifest.has_validation and manifest.num_partitions == 4
    assert manifest.columns == (
        ColumnSpec("n", "int64", ()),
        ColumnSpec("a.third", "float32", ()),
        ColumnSpec("even", "bool", ()),
        ColumnSpec("pair", "float32", (2,)),
        ColumnSpec("grid", "int64", (2, 3)),
    )
    train, val = columns_of(store, manifest, "train"), columns_of(store, manifest, "val")
    assert (len(train["n"]), len(val["n"])) == (71, 30)
    rows = {name: np.concatenate([train[name], val[name]]) for name in train}
    n = rows["n"]
    assert sorted(n.tolist()) == list(range(ROWS))
    np.testing.assert_array_equal(rows["a.third"], (n / 3).astype(np.float32))
    np.testing.assert_array_equal(rows["even"], n % 2 == 0)
    np.testing.assert_array_equal(rows["pair"], np.stack([n, n + 0.5], axis=1))
    np.testing.assert_array_equal(rows["grid"], (n[:, None] * 6 + np.arange(6)).reshape(-1, 2, 3))


@pytest.mark.parametrize(
    ("chunk_bytes", "many_tasks", "few"),
    [(1 << 28, 3, 0), (400, 1 << 8, 0), (400, 5, row_facts._FEW)],
)
def test_chunks_and_the_tasks_that_share_them_and_who_finds_their_borders_change_no_row(
    prepared: tuple[LocalStore, Manifest],
    numbers: DataFrame,
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    chunk_bytes: int,
    many_tasks: int,
    few: int,
) -> None:
    monkeypatch.setattr(row_facts, "_FEW", few)
    monkeypatch.setattr(spark_prepare, "_CHUNK_BYTES", chunk_bytes)  # a row has 69
    monkeypatch.setattr(spark_prepare, "_MANY_TASKS", many_tasks)
    found = prepare(numbers, store, 4, 0.3, COLUMNS)
    before, expected = prepared
    assert len(found.partitions) == 8
    for part, other in zip(found.partitions, expected.partitions, strict=True):
        assert (part.rows, part.digests) == (other.rows, other.digests)
        files = sorted(Path(store.data_path(found.fingerprint), part.path).glob("*.parquet"))
        assert len(files) == (1 if chunk_bytes > 400 else -(-part.rows // 5))
    for split in ("train", "val"):
        rows, others = columns_of(store, found, split), columns_of(before, expected, split)
        assert all(np.array_equal(rows[name], others[name]) for name in COLUMNS)


def test_footers_vouch_that_prepared_data_holds_no_null(
    prepared: tuple[LocalStore, Manifest],
) -> None:
    """So that petastorm's reader needs no second look at any column."""
    store, manifest = prepared
    names = [ROW_ID, *(stored_name(i) for i in range(len(COLUMNS)))]
    for info in manifest.partitions:
        path = f"{store.data_path(manifest.fingerprint)}/{info.path}"
        assert ParquetFolder.open(path, names).null_free == set(names)


def test_marked_rows_are_held_back(numbers: DataFrame, store: LocalStore) -> None:
    manifest = prepare(numbers, store, 2, "held_back", ["n"])
    assert [info.rows for info in manifest.partitions] == [40, 40, 11, 10]
    assert sorted(columns_of(store, manifest, "val")["n"].tolist()) == list(range(0, ROWS, 5))
    flagged = numbers.withColumn("held_back", F.col("held_back") == 1)
    again = prepare(flagged, LocalStore(f"{store.prefix}/b"), 2, "held_back", ["n"])
    assert again == manifest


def test_result_does_not_depend_on_sparks_own_partitions(
    numbers: DataFrame, prepared: tuple[LocalStore, Manifest], store: LocalStore
) -> None:
    first, manifest = prepared
    again = prepare(numbers.orderBy(F.rand(1)).coalesce(2), store, 4, 0.3, COLUMNS)
    assert again == manifest
    for split in ("train", "val"):
        one, two = columns_of(first, manifest, split), columns_of(store, again, split)
        assert one["n"].tolist() == two["n"].tolist()


def test_seed_decides_where_rows_go(
    numbers: DataFrame, prepared: tuple[LocalStore, Manifest], store: LocalStore
) -> None:
    other = prepare(numbers, store, 4, 0.3, COLUMNS, seed=1)
    held_back = columns_of(*prepared, "val")["n"].tolist()
    assert held_back != columns_of(store, other, "val")["n"].tolist()


def test_rows_of_equal_content_are_all_kept(spark: SparkSession, store: LocalStore) -> None:
    same = spark.range(50).select(F.lit(1.5).alias("x"))
    manifest = prepare(same, store, 3, 0.2, ["x"])
    assert [info.rows for info in manifest.partitions] == [14, 13, 13, 4, 3, 3]
    assert columns_of(store, manifest, "train")["x"].tolist() == [1.5] * 40


def test_prepared_data_is_found_again(
    numbers: DataFrame, prepared: tuple[LocalStore, Manifest]
) -> None:
    store, manifest = prepared
    folder = Path(store.data_path(manifest.fingerprint))
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert prepare(numbers.repartition(2), store, 4, 0.3, COLUMNS) == manifest
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == written


def test_two_preparations_at_once_are_one(numbers: DataFrame, store: LocalStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: prepare(numbers, store, 2, None, ["n"]), range(2))
    assert one == other and not one.has_validation
    attempt = one.partitions[0].path.partition("/")[0]
    assert store.list(store.data_path(one.fingerprint)) == [attempt, "manifest.json"]
    assert sorted(columns_of(store, one, "train")["n"].tolist()) == list(range(ROWS))


def test_arrays_and_spark_give_the_same_kind_of_store(
    prepared: tuple[LocalStore, Manifest], store: LocalStore
) -> None:
    n = np.arange(ROWS)
    pair, grid = np.stack([n, n + 0.5], axis=1), (n[:, None] * 6 + np.arange(6)).reshape(-1, 2, 3)
    arrays = {"n": n, "a.third": n / 3, "even": n % 2 == 0, "pair": pair, "grid": grid}
    written = store, write_dataset(store, arrays, 4, 0.3)
    assert prepared[1].columns == written[1].columns
    # Rows are numbered by another hash of their content, so that only the digests differ.
    bare = [
        [replace(info, digests=()) for info in manifest.partitions]
        for manifest in (prepared[1], written[1])
    ]
    assert bare[0] == bare[1]
    for where, manifest in (prepared, written):
        splits = [columns_of(where, manifest, split) for split in ("train", "val")]
        together = np.concatenate([split["n"] for split in splits])
        assert sorted(together.tolist()) == n.tolist()
        for split in splits:
            np.testing.assert_array_equal(split["pair"][:, 1], split["n"] + 0.5)


def test_dense_and_sparse_vectors_become_arrays(spark: SparkSession, store: LocalStore) -> None:
    dense = Vectors.dense(0.0, 1.5, 0.0), Vectors.dense(4.0, 0.0, 0.0)
    vectors = [*dense, SparseVector(3, {2: 2.5}), SparseVector(3, {})]
    manifest = prepare(frame(spark, vectors, VectorUDT()), store, 2, None, ["id", "x"])
    assert manifest.columns[1] == ColumnSpec("x", "float32", (3,))
    rows = columns_of(store, manifest, "train")
    expected = np.stack([vectors[i].toArray() for i in rows["id"]])
    np.testing.assert_array_equal(rows["x"], expected)


KINDS = {
    "int8": (T.ByteType(), [-128, 127], "int64"),
    "int16": (T.ShortType(), [-32768, 5], "int64"),
    "int64": (T.LongType(), [2**62 + 1, -(2**63)], "int64"),
    "float": (T.FloatType(), [0.1, -1e38], "float32"),
    "decimal": (T.DecimalType(10, 2), [*map(decimal.Decimal, ("1.25", "-3"))], "float32"),
    "flags": (T.ArrayType(T.BooleanType()), [[True, False], [False, False]], "bool"),
    "cube": (
        T.ArrayType(T.ArrayType(T.ArrayType(T.FloatType()))),
        [[[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]], [[[0.0, 0.0]]] * 3],
        "float32",
    ),
}


def test_kinds_of_numbers(spark: SparkSession, store: LocalStore) -> None:
    fields = [T.StructField(name, kind) for name, (kind, _, _) in KINDS.items()]
    values = zip(*(values for _, values, _ in KINDS.values()), strict=True)
    df = spark.createDataFrame(list(values), T.StructType(fields))
    rows = columns_of(store, prepare(df, store, 1, None, list(KINDS)), "train")
    order = [0, 1] if rows["int8"][0] == -128 else [1, 0]
    for name, (_, given, dtype) in KINDS.items():
        assert rows[name].dtype == dtype
        expected = np.array([np.array(given[i]).astype(dtype) for i in order])
        np.testing.assert_array_equal(rows[name], expected, err_msg=name)


ARRAY, NESTED = T.ArrayType(T.FloatType()), T.ArrayType(T.ArrayType(T.IntegerType()))


UNUSABLE: tuple[tuple[T.DataType, list[Any]], ...] = (
    (T.IntegerType(), [1, None, 3]),
    (ARRAY, [[1.0, 2.0], [1.0, None]]),
    (NESTED, [[[1]], [None]]),
    (NESTED, [[[1]], [[None]]]),
    (VectorUDT(), [Vectors.dense(1.0), None]),
    (T.DoubleType(), [1.0, float("nan")]),
    (T.DoubleType(), [1.0, 2.0, 1e39]),
    (ARRAY, [[1.0, 2.0], [float("-inf"), 0.0]]),
    (VectorUDT(), [SparseVector(3, {1: float("inf")})]),
    (ARRAY, [[1.0, 2.0], [1.0], [1.0, 2.0]]),
    (NESTED, [[[1, 2]], [[1, 2], [3, 4]]]),
    (NESTED, [[[1, 2], [3, 4]], [[1, 2], [3]]]),
    (ARRAY, [[], []]),
    (T.StringType(), ["a"]),
    (T.ArrayType(T.StringType()), [["a"]]),
    (T.DateType(), []),
    (T.IntegerType(), []),
)
# Columns, validation and the number of partitions.
ARGUMENTS: tuple[tuple[str, Any, Any], ...] = (
    ("paar", None, 2), ("n", "heldback", 2), ("n", None, 0), ("n", None, 2.0), ("pair", None, 102),
    ("pair", 0.01, 2), ("pair", "held_back", 22), ("pair", "n", 2), ("pair", "text", 2),
)  # fmt: skip


def test_unusable_rows_and_arguments_are_named_before_anything_is_written(
    spark: SparkSession, numbers: DataFrame, store: LocalStore
) -> None:
    twice = numbers.withColumn("other", F.col("n")).withColumnRenamed("other", "N")
    uses = {
        **{
            f"{kind.simpleString()} {values}": partial(
                prepare, frame(spark, values, kind), store, 1, None, ["x"]
            )
            for kind, values in UNUSABLE
        },
        **{
            f"{column}, validation {validation!r}, {count} partitions": partial(
                prepare, numbers, store, count, validation, [column]
            )
            for column, validation, count in ARGUMENTS
        },
        "a column twice": partial(prepare, twice, store, 2, None, ["n"]),
        "a frame of pandas": partial(prepare, numbers.toPandas(), store, 2, None, ["n"]),
    }
    found = {what: refusal(use) for what, use in uses.items()}
    assert_golden(Path(__file__).with_name("golden") / "refused_rows.txt", found)
    assert store.list(f"{store.prefix}/data") == []


def test_a_stream_is_refused_with_a_remedy(spark: SparkSession, store: LocalStore) -> None:
    stream = spark.readStream.format("rate").load()
    for asked in (spark_prepare.prepare, spark_prepare.identify):
        with pytest.raises(ConfigurationError, match=r"is a stream, .* what spark\.read makes"):
            asked(stream, store, 2, DataSpec.checked(["value"]))


def test_rows_that_are_compared_are_told_to_be_none_in_the_same_words(
    numbers: DataFrame, store: LocalStore
) -> None:
    none = numbers.where("n > 1000").select(F.array("n").alias("n"))
    with pytest.raises(DataError, match="the DataFrame is empty"):
        spark_prepare.identify(none, store, 2, DataSpec.checked(["n"]))


def test_random_query_is_evaluated_once(spark: SparkSession, store: LocalStore) -> None:
    rolled = spark.range(1000).repartition(4).select(F.rand().alias("x"))
    manifest = prepare(rolled, store, 2, 0.2, ["x"])
    assert sum(len(columns_of(store, manifest, split)["x"]) for split in ("train", "val")) == 1000
    assert sum(info.checksum for info in manifest.partitions) % 2**64 == checksum(range(1000))


def test_rows_that_change_between_check_and_write_are_refused(
    spark: SparkSession, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for a query of files, a random one is run twice."""
    monkeypatch.setattr(spark_prepare, "reads_files_only", lambda df: True)
    roll = F.udf(lambda: random.SystemRandom().random(), "double").asNondeterministic()
    with pytest.raises(DataError, match="gives other rows when it is run again"):
        prepare(spark.range(100).select(roll().alias("x")), store, 2, 0.2, ["x"])
    assert all(not list(path.rglob("*.parquet")) for path in Path(store.prefix).iterdir())


def test_importing_the_room_needs_no_pyspark() -> None:
    code = (
        "import sys, cerebro_hydra.data.partition, cerebro_hydra.data.batches; "
        "print(sorted({'pyspark', 'torch'} & set(sys.modules)))"
    )
    assert run_python("-c", code).stdout.strip() == "[]"
