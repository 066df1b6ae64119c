"""When a preparation may take the names, sizes and times of files for their rows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from cerebro_hydra.data.manifest import Manifest, RowsFound
from cerebro_hydra.data.preparation.prepare import first_rows, identify, prepare
from cerebro_hydra.data.preparation.source_files import reads_files_only, source_files
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.storage import LocalStore

pytestmark = pytest.mark.spark(group=1)

MOST_FIELDS = "spark.sql.debug.maxToStringFields"
SPEC = DataSpec.checked(["x"], ["y"])


def write(spark: SparkSession, path: Path, rows: int, factor: int = 2) -> None:
    x = F.col("id").cast("float")
    df = spark.range(rows).select(x.alias("x"), (F.col("id") * factor).alias("y"))
    df.coalesce(1).write.mode("overwrite").parquet(str(path))
    settle(path)


@contextmanager
def setting(spark: SparkSession, name: str, value: str | None) -> Iterator[None]:
    """Let a setting have a value for the block; None leaves it as it is."""
    if value is not None:
        spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.unset(name)


def settle(path: Path, seconds: float = 100.0) -> None:
    """Let the files have been written some time ago."""
    for file in path.iterdir():
        os.utime(file, times=(time.time() - seconds,) * 2)


class Preparation:
    def __init__(self, store: LocalStore) -> None:
        self.store = store
        self.told: list[str] = []
        self.reported: list[str] = []

    def __call__(self, df: DataFrame, spec: DataSpec = SPEC, recheck: bool = False) -> Manifest:
        self.told.clear()
        self.reported.clear()
        told, reported = self.told.append, self.reported.append
        return prepare(df, self.store, 2, spec, told, reported, recheck)


@pytest.fixture
def preparation(tmp_path: Path) -> Preparation:
    return Preparation(LocalStore(tmp_path / "store"))


def test_rows_are_read_for_other_arguments_and_queries_and_not_for_unchanged_files(
    spark: SparkSession, tmp_path: Path, preparation: Preparation
) -> None:
    write(spark, tmp_path / "rows", 50)

    def read() -> DataFrame:
        return spark.read.parquet(str(tmp_path / "rows"))

    first = preparation(read().where("y < 40"))
    assert preparation.told[0] == "checking rows"
    assert not preparation.reported
    for df, spec in (
        (read().where("y < 41"), SPEC),
        (read().where("y < 40").withColumn("x", F.col("x") + 1), SPEC),
        (read().where("y < 40"), DataSpec.checked(["x"], ["y"], seed=1)),
        (read().where("y < 40"), DataSpec.checked(["x"], ["y"], validation=0.2)),
    ):
        preparation(df, spec)
        assert preparation.told[0] == "checking rows"
    assert preparation(read().where("y < 40")) == first
    assert not preparation.told
    (line,) = preparation.reported
    assert line.startswith("files unchanged since 20")
    assert preparation(read().where("y < 40"), recheck=True) == first
    assert preparation.told == ["checking rows"]


def csv_column(sep: str) -> Column:
    return F.from_csv("s", "a string, b string", {"sep": sep}).b.substr(1, 1).cast("int")


def wide_columns(sep: str) -> list[Column]:
    """What is behind as many columns as Spark names in a text."""
    return [*(F.col("x").alias(f"c{n}") for n in range(30)), csv_column(sep).alias("x"), F.col("y")]


def long_array(sep: str) -> list[Column]:
    """What is behind as many elements."""
    return [F.array(*(F.lit(n) for n in range(30)), csv_column(sep)).alias("x"), F.col("y")]


@pytest.mark.parametrize("columns", [wide_columns, long_array])
@pytest.mark.parametrize("most", [None, "3"])
def test_queries_that_differ_in_an_option_behind_many_columns_are_two(
    spark: SparkSession,
    tmp_path: Path,
    preparation: Preparation,
    columns: Callable[[str], list[Column]],
    most: str | None,
) -> None:
    """Spark's JSON of a plan has no options of from_csv, and its text only as many columns."""
    write(spark, tmp_path / "rows", 50)

    def read(sep: str) -> DataFrame:
        rows = spark.read.parquet(str(tmp_path / "rows"))
        return rows.withColumn("s", F.lit("1,5;9,1")).select(*columns(sep))

    with setting(spark, MOST_FIELDS, most):
        first = preparation(read(";"))
        second = preparation(read(","))
        assert preparation.told[0] == "checking rows"
        assert second.fingerprint != first.fingerprint
        found = [identify(read(sep), preparation.store, 2, SPEC) for sep in ";,"]
        assert [each.fingerprint for each in found] == [first.fingerprint, second.fingerprint]
        assert {each.compared for each in found} == {
            "the query, and names, sizes and times of its 1 files"
        }
        assert preparation(read(";")) == first
        assert not preparation.told
        assert spark.conf.get(MOST_FIELDS, None) == most


@pytest.mark.parametrize("length", ["40", "0"])
def test_a_query_whose_text_is_cut_is_read_again(
    spark: SparkSession, tmp_path: Path, preparation: Preparation, length: str
) -> None:
    write(spark, tmp_path / "rows", 50)
    df = spark.read.parquet(str(tmp_path / "rows")).where("y < 40")
    with setting(spark, "spark.sql.maxPlanStringLength", length):
        assert source_files(df) is None
        first = preparation(df)
        assert preparation(df) == first
        assert preparation.told[0] == "checking rows"


@contextmanager
def zone_of_java(spark: SparkSession, name: str) -> Iterator[None]:
    """Let Java's time zone, which that of the session follows, be another one for the block."""
    assert spark._jvm is not None
    zone: Any = spark._jvm.java.util.TimeZone
    before = zone.getDefault()
    zone.setDefault(zone.getTimeZone(name))
    try:
        yield
    finally:
        zone.setDefault(before)


def test_another_time_zone_of_java_is_another_query(spark: SparkSession, tmp_path: Path) -> None:
    write(spark, tmp_path / "rows", 5)
    found = []
    with setting(spark, "spark.sql.session.timeZone", "UTC"):  # ORC asks Java
        for zone in ("Asia/Tokyo", "America/Lima", "Asia/Tokyo"):
            with zone_of_java(spark, zone):
                found.append(source_files(spark.read.parquet(str(tmp_path / "rows"))))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("by", ["session", "hadoop"])
def test_other_settings_of_how_files_are_read_are_another_query(
    by: str, spark: SparkSession, tmp_path: Path, preparation: Preparation
) -> None:
    spark.range(50).selectExpr("float(id) as x", "float(-id) as y").write.orc(
        str(tmp_path / "rows")
    )
    settle(tmp_path / "rows")

    def read() -> DataFrame:
        return spark.read.schema("y float, x float").orc(str(tmp_path / "rows"))

    first, name = preparation(read()), "orc.force.positional.evolution"
    assert preparation(read()) == first
    assert not preparation.told
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    holder = spark.conf if by == "session" else hadoop
    holder.set(name, "true")
    try:
        assert preparation(read()).fingerprint != first.fingerprint
    finally:
        holder.unset(name)


def test_a_time_of_day_is_one_of_the_present_day(spark: SparkSession, tmp_path: Path) -> None:
    write(spark, tmp_path / "rows", 5)
    (tmp_path / "times.csv").write_text("time,y\n10:15:00,1\n")

    def queries() -> list[DataFrame]:
        rows = spark.read.parquet(str(tmp_path / "rows"))
        return [
            rows.where("timestamp'2024-01-01' < '10:15:00'"),
            rows.where(F.lit("10:15:00").cast("timestamp") > F.lit("2024-01-01").cast("date")),
            spark.read.csv(str(tmp_path / "times.csv"), header=True, inferSchema=True),
            rows,
        ]

    found = []
    for zone in ("Etc/GMT+12", "Etc/GMT-14"):  # which are never at the same day
        with setting(spark, "spark.sql.session.timeZone", zone):
            found.append([json.loads(each.query) for each in map(source_files, queries()) if each])
    for here, there in zip(*found, strict=True):
        for key in ("settings", "shown", "plan"):  # in which the zone stands
            here.pop(key), there.pop(key)
    assert [here == there for here, there in zip(*found, strict=True)] == [False] * 3 + [True]


def test_sums_in_another_order_are_another_query(spark: SparkSession, tmp_path: Path) -> None:
    write(spark, tmp_path / "rows", 5)
    sums = ["(x + 1e16) + y", "x + (1e16 + y)", "(x + 1e16) + y"]
    rows = [spark.read.parquet(str(tmp_path / "rows")).selectExpr(each) for each in sums]
    found = [source_files(df.toDF("x")) for df in rows]
    assert found[0] == found[2] != found[1]


def test_times_that_are_read_in_another_time_zone_are_other_rows(
    spark: SparkSession, tmp_path: Path, preparation: Preparation
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.csv").write_text(
        "".join(f"2024-01-01 {i % 24:02}:00:00,{i}\n" for i in range(50))
    )
    settle(tmp_path / "rows")

    def read() -> DataFrame:
        rows = spark.read.csv(str(tmp_path / "rows"), "time timestamp, y int")
        seconds = F.col("time").cast("long").cast("float")
        return rows.select(seconds.alias("x"), "y")

    with zone_of_java(spark, "Asia/Tokyo"):
        first = preparation(read())
        assert preparation(read()) == first
        assert not preparation.told
    with zone_of_java(spark, "America/Lima"):
        assert preparation(read()).fingerprint != first.fingerprint


def test_a_query_whose_sources_are_exchanged_is_another_one(
    spark: SparkSession, tmp_path: Path, preparation: Preparation
) -> None:
    for name, factor in (("cats", 2), ("dogs", 5)):
        write(spark, tmp_path / name, 20, factor)
    files = {n: [str(f) for f in (tmp_path / n).glob("*.parquet")] * 2 for n in ("cats", "dogs")}

    def union(first: str, second: str) -> DataFrame:
        x = F.col("y").cast("float").alias("x")
        one, other = (spark.read.parquet(*files[name]) for name in (first, second))
        return one.select(x, F.lit(0).alias("y")).union(other.select(x, F.lit(1).alias("y")))

    first = preparation(union("cats", "dogs"))
    assert preparation(union("dogs", "cats")).fingerprint != first.fingerprint
    assert preparation(union("cats", "dogs")) == first
    assert not preparation.told


def touch(spark: SparkSession, path: Path) -> None:
    settle(path, 50.0)


def rewrite(spark: SparkSession, path: Path) -> None:
    write(spark, path, 50, factor=3)


def add(spark: SparkSession, path: Path) -> None:
    (file,) = path.glob("*.parquet")
    (path / "another.parquet").write_bytes(file.read_bytes())
    settle(path)


def test_files_of_another_time_size_or_number_are_read(
    spark: SparkSession, tmp_path: Path, preparation: Preparation
) -> None:
    write(spark, tmp_path / "rows", 50)
    first = preparation(spark.read.parquet(str(tmp_path / "rows")))
    for change in (touch, add, rewrite):
        change(spark, tmp_path / "rows")
        second = preparation(spark.read.parquet(str(tmp_path / "rows")))
        assert preparation.told[0] == "checking rows"
        assert (second == first) == (change is touch)


def test_files_that_spark_has_listed_before_they_changed_are_no_others(
    spark: SparkSession, tmp_path: Path, preparation: Preparation
) -> None:
    write(spark, tmp_path / "rows", 5)
    before = spark.read.parquet(str(tmp_path / "rows"))
    assert source_files(before)
    for file in (tmp_path / "rows").glob("*.parquet"):
        file.write_bytes(file.read_bytes())
    settle(tmp_path / "rows")
    assert source_files(before) is None
    assert source_files(spark.read.parquet(str(tmp_path / "rows")))


def test_a_query_that_is_cached_once_it_was_seen_is_no_longer_of_files(
    spark: SparkSession, tmp_path: Path
) -> None:
    write(spark, tmp_path / "rows", 5)
    rows = spark.read.parquet(str(tmp_path / "rows")).where("y < 200")
    assert source_files(rows)
    rows.persist()
    assert source_files(rows) is None
    rows.unpersist()
    assert source_files(rows)


def test_files_that_were_just_written_and_damaged_notes_are_read_again(
    spark: SparkSession, tmp_path: Path, preparation: Preparation
) -> None:
    write(spark, tmp_path / "rows", 50)
    settle(tmp_path / "rows", 0.0)
    first = preparation(spark.read.parquet(str(tmp_path / "rows")))
    assert not Path(preparation.store.prefix, "sources").exists()
    settle(tmp_path / "rows")
    preparation(spark.read.parquet(str(tmp_path / "rows")))
    (note,) = Path(preparation.store.prefix, "sources").iterdir()
    note.write_bytes(note.read_bytes().replace(b'"at"', b'"as"'))
    assert preparation(spark.read.parquet(str(tmp_path / "rows"))) == first
    assert preparation.told == ["checking rows"]


def test_only_queries_that_give_the_same_again_count(spark: SparkSession, tmp_path: Path) -> None:
    write(spark, tmp_path / "rows", 5)
    rows = spark.read.parquet(str(tmp_path / "rows"))
    steady = [rows, rows.where("x > 1"), rows.selectExpr("x * 2 as x"), rows.union(rows)]
    assert all(source_files(df) for df in steady)
    assert reads_files_only(spark.range(5))
    assert source_files(spark.range(5)) is None  # there is no file
    identity = F.udf(lambda value: value, "float")
    rows.createOrReplaceTempView("rows")
    of_subqueries = [
        "exists (select 1 from rows)",  # whose files Spark doesn't name among those of the query
        "x in (select x from rows)",
        "x = (select max(x) from rows)",
    ]
    unsteady = [
        rows.withColumn("x", F.rand()),
        rows.withColumn("x", F.current_timestamp()),
        rows.withColumn("x", identity("x")),
        rows.limit(3),
        rows.repartition(2),
        rows.join(rows, "x"),
        rows.withColumn("x", F.monotonically_increasing_id()),
        spark.createDataFrame([(1.0,)], ["x"]),
        *(spark.sql(f"select * from rows where {each}") for each in of_subqueries),
    ]
    for each in ("now", " Today", "tomorrow", "yesterday"):
        day = F.lit(each).cast("date")
        assert source_files(rows.where(F.lit("2024-01-01").cast("date") < day)) is None
        assert source_files(rows.where(f"timestamp'2024-01-01' < '{each}'")) is None
    assert [reads_files_only(df) for df in unsteady] == [False] * len(unsteady)
    cached = spark.read.parquet(str(tmp_path / "rows")).where("y < 100").persist()
    cached.count()
    assert source_files(spark.read.parquet(str(tmp_path / "rows")).where("y < 100")) is None
    cached.unpersist()


def test_rows_are_told_from_others_without_preparing_them(
    spark: SparkSession, tmp_path: Path, preparation: Preparation
) -> None:
    """What a run goes on with is compared with the rows that it was begun on."""
    write(spark, tmp_path / "rows", 50)
    df = spark.read.parquet(str(tmp_path / "rows"))
    first = preparation(df)
    others = (
        (df, "the query, and names, sizes and times of its 1 files"),
        (df.orderBy(F.desc("y")).repartition(3), "the values of its 50 rows"),
        (spark.createDataFrame(df.toPandas()), "the values of its 50 rows"),
    )
    for rows, compared in others:
        found = identify(rows, preparation.store, 2, SPEC)
        assert found == RowsFound(first.fingerprint, 50, compared)
    for rows in (
        df.withColumn("y", F.col("y") + 1),
        df.where("y < 98"),
        df.withColumn("y", F.col("x")),
    ):
        assert identify(rows, preparation.store, 2, SPEC).fingerprint != first.fingerprint
    assert len(preparation.store.list(f"{preparation.store.prefix}/data")) == 1


def test_first_rows_are_those_that_are_at_hand_at_once(spark: SparkSession) -> None:
    df = spark.range(50).select(F.array(F.col("id"), F.lit(0.5)).alias("x"), F.col("id").alias("y"))
    found = first_rows(df, SPEC, 3)
    assert found is not None and found.rows == 3
    assert found.columns["x"].tolist() == [[0, 0.5], [1, 0.5], [2, 0.5]]
    assert (found.columns["x"].dtype, found.columns["y"].dtype) == (np.float32, np.int64)
    local = spark.createDataFrame([(1.0, 2)], "x float, y long")
    assert first_rows(local, SPEC, 1) is not None
    null = F.when(F.col("y") == 1, None)
    for none in (
        df.limit(2),
        df.orderBy(F.rand()),
        df.groupBy("y").agg(F.first("x").alias("x")),
        df.withColumn("x", null.otherwise(F.col("x"))),
        df.withColumn("x", F.when(F.col("y") == 1, F.array(F.lit(1.0))).otherwise(F.col("x"))),
        df.withColumn("x", F.when(F.col("y") == 1, F.lit(float("nan"))).otherwise(F.lit(1.0))),
    ):
        assert first_rows(none, SPEC, 3) is None
