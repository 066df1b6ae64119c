"""Tables and paths in place of DataFrames, on real Spark, with a search that has no labels."""

from __future__ import annotations

import gzip
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, SparkEstimator, hp_choice
from cerebro_hydra.data.preparation.prepare import identify, prepare
from cerebro_hydra.data.preparation.tables import dataframe_of, refuse_tables_as_files
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark(group=2)


def table(rows: int = 90) -> pd.DataFrame:
    values = np.random.default_rng(3).normal(size=(rows, 6)).astype(np.float32)
    return pd.DataFrame({"features": list(values), "name": [f"row {i}" for i in range(rows)]})


def reconstruction(outputs: Tensor, features: Tensor) -> Tensor:
    return F.mse_loss(outputs, features)


def noisy(batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
    x = batch["features"]
    return {"input": x + 0.1 * torch.randn_like(x) if training else x, "features": x}


def autoencoder(params: dict[str, float]) -> SparkEstimator:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=params["lr"])
    metrics = {"error": (reconstruction, "min")}
    return SparkEstimator(
        model, optimizer, reconstruction, metrics, batch_size=16, shards=["2"], collate=noisy
    )


def test_tables_and_paths_become_dataframes(spark: SparkSession, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")  # not in every stack that the tests run with
    rows = table()
    parquet, csv = tmp_path / "rows.parquet", tmp_path / "rows.csv"
    rows.to_parquet(parquet)
    pd.DataFrame({"a": [1.5, 2.0], "b": [1, 2]}).to_csv(csv, index=False)
    before = spark.conf.get("spark.sql.execution.arrow.pyspark.enabled")
    expected = {
        "struct<features:array<float>,name:string>": [rows, polars.from_pandas(rows), parquet],
        "struct<a:double,b:int>": [str(csv)],
        "struct<pixels:array<array<bigint>>>": [
            pd.DataFrame({"pixels": [np.full((2, 2), i, np.uint8) for i in range(3)]})
        ],
    }
    for schema, given in expected.items():
        for each in given:
            assert dataframe_of(each, lambda: spark).schema.simpleString() == schema
    assert spark.conf.get("spark.sql.execution.arrow.pyspark.enabled") == before
    found = dataframe_of(rows, lambda: spark).toPandas()
    assert np.array_equal(np.stack(found["features"]), np.stack(rows["features"]))
    with pytest.raises(ConfigurationError, match=r"'none.parquet' can't be read .*PATH_NOT_FOUND"):
        dataframe_of("none.parquet", lambda: spark)


def read_csv(spark: SparkSession, file: Path, text: str) -> Any:
    file.write_text(text, newline="")
    return dataframe_of(file, lambda: spark)


def test_csv_is_read_as_pandas_reads_it(spark: SparkSession, tmp_path: Path) -> None:
    rows = ('0.5,1,"two\nlines, 1"', '1.5,0,"a ""b"", c"', "", '2.5,1,5"', "3.5,0")
    text = "\r\n".join(["x,label,words", *rows, ""])
    found = read_csv(spark, tmp_path / "rows.csv", text).toPandas()
    expected = pd.read_csv(tmp_path / "rows.csv")
    read, expected = (each.fillna("").to_numpy().tolist() for each in (found, expected))
    assert read == expected and len(read) == 4
    with gzip.open(tmp_path / "rows.csv.gz", "wt", newline="") as file:
        file.write(text)
    assert dataframe_of(tmp_path / "rows.csv.gz", lambda: spark).count() == 4


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("1,5,0", r"has the row '1,5,0' of 3 cells under a header of 2; .*decimals with a point"),
        ('"a\n1,2",5,0', r"of 3 cells under a header of 2"),
        ('"1,5', r"rows.csv' has quotes in row 2 that are never closed"),
        ('1,"a"b\n"1,5', r"rows.csv' has quotes in row 3 that are never closed"),
        ("1,a\u2028b,0", r"of 3 cells under a header of 2"),
    ],
)
def test_rows_of_csv_that_would_be_others_are_refused(
    spark: SparkSession, tmp_path: Path, row: str, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        read_csv(spark, tmp_path / "rows.csv", f"x,label\n0.5,1\n{row}\n2.5,1\n")


def test_files_of_csv_are_read_together_if_they_have_one_header(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder = tmp_path / "rows.csv"
    folder.mkdir()
    for number in range(2):
        (folder / f"part-{number}.csv").write_text(f"x,label\n{number}.5,1\n")
    assert dataframe_of(folder, lambda: spark).count() == 2
    (folder / "part-1.csv").write_text("label,x\n1,1.5\n")
    with pytest.raises(DataError, match=r"begins with .* and .*; files .* need one header"):
        dataframe_of(folder, lambda: spark)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.csv", gzip.compress(b"x,label\n1,2\n", mtime=0), r"begins with b'\\x1f\\x8b"),
        ("rows.csv", b"PAR1 and more", r"begins with b'PAR1'"),
        ("rows.csv.gz", b"x,label\n1,2\n", r"that gzip compressed and begins with b'x,la'"),
        (
            "rows.csv.gz",
            gzip.compress(b"x,label\n1,2\n" * 99, mtime=0)[:-12],
            "is damaged: Compressed file",
        ),
    ],
)
def test_what_is_named_as_csv_and_is_something_else_is_told(
    spark: SparkSession, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        dataframe_of(tmp_path / name, lambda: spark)


@pytest.mark.parametrize("text", ["", "x,label\n"])
def test_csv_without_rows_is_told(spark: SparkSession, tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"rows.csv' has no rows below its header"):
        read_csv(spark, tmp_path / "rows.csv", text)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rows.tsv", r"rows.tsv' is neither Parquet, for it begins with b'x,la', nor named as CSV"),
        ("_rows.csv", r"_rows.csv' has a name that begins with '_', and Spark reads no such file"),
        (".rows.parquet", "begins with '.', and Spark reads no such file"),
    ],
)
def test_a_file_that_is_no_table_is_told_before_java_sees_it(
    spark: SparkSession, tmp_path: Path, name: str, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read_csv(spark, tmp_path / name, "x,label\n1,2\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("label=1/notes.txt", "notes.txt' is no Parquet, for it begins with b'read'"),
        ("label=1/b.parquet", None),
        ("label=1_$folder$", None),
        ("c._COPYING_", None),
        ("label=1/torn.parquet", "torn.parquet' is not a whole Parquet file"),
        ("_done", None),
        ("label=1/.crc", None),
    ],
)
def test_a_folder_with_a_file_that_is_no_parquet_is_told(
    spark: SparkSession, tmp_path: Path, name: str, said: str | None
) -> None:
    for label in range(2):
        (tmp_path / f"label={label}").mkdir()
        pd.DataFrame({"x": [1.5]}).to_parquet(tmp_path / f"label={label}" / "a.parquet")
    empty = name.endswith(("b.parquet", "$"))
    (tmp_path / name).write_text("" if empty else "PAR1" if "torn" in name else "read me")
    with pytest.raises(ConfigurationError, match=said) if said else nullcontext():
        assert dataframe_of(tmp_path, lambda: spark).count() == 2


@pytest.mark.parametrize("column", ["label", "Label"])
@pytest.mark.parametrize("is_link", [False, True])
def test_a_column_that_files_have_otherwise_than_the_names_of_their_folders_is_refused(
    spark: SparkSession, tmp_path: Path, column: str, is_link: bool
) -> None:
    rows = tmp_path / ("elsewhere" if is_link else "rows/label=1")
    rows.mkdir(parents=True)
    (tmp_path / "rows").mkdir(exist_ok=True)
    if is_link:
        (tmp_path / "rows" / "label=1").symlink_to(rows)
    pd.DataFrame({"x": [1.5], column: [1]}).to_parquet(rows / "a.parquet")
    assert dataframe_of(tmp_path / "rows", lambda: spark).count() == 1
    pd.DataFrame({"x": [1.5], column: [9]}).to_parquet(rows / "b.parquet")
    with pytest.raises(ConfigurationError, match=r"b.parquet' has other values of column '\wabel'"):
        dataframe_of(tmp_path / "rows", lambda: spark)


@pytest.mark.parametrize("types", [("int32", "int64"), ("int64", "int32")])
def test_files_that_keep_a_column_in_several_types_are_told_with_column_file_and_types(
    spark: SparkSession, tmp_path: Path, types: tuple[str, str]
) -> None:
    rows = tmp_path / "some rows"
    rows.mkdir()
    for number, kind in enumerate(types):
        labels = np.arange(40).astype(kind)
        frame = pd.DataFrame({"x": labels.astype("float32"), "y": labels})
        frame.to_parquet(rows / f"part-{number}.parquet")
    backend = SparkBackend(spark, num_workers=2, verbose=0)
    there, expected = {"int32": ("INT64", "int"), "int64": ("INT32", "bigint")}[types[0]]
    told = (
        rf"^column 'y' is {there} in 'file:.*part-1.parquet', and Spark reads it as {expected}, as "
        r"another file or the given schema has it: write all files with one schema"
    )
    with pytest.raises(DataError, match=told):
        backend.prepare_data(LocalStore(str(tmp_path / "store")), str(rows), 0.2, ["x"], ["y"])


def test_a_path_of_a_table_whose_log_says_which_rows_count_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    for log, kind in ((".hoodie", "hudi"), ("_delta_log", "delta"), ("metadata", "iceberg")):
        root = tmp_path / kind
        (root / "day=1").mkdir(parents=True)
        pd.DataFrame({"a": [1.5]}).to_parquet(root / "day=1" / "rows.parquet")
        assert dataframe_of(root, lambda: spark).count() == 1
        (root / log).mkdir()
        (root / log / "v1.metadata.json").write_text("{}")
        for path in (root, root / "day=1", root / "day=1" / "rows.parquet"):
            with pytest.raises(DataError, match=rf"format\('{kind}'\)\.load\('{root}'\)"):
                dataframe_of(path, lambda: spark)


@pytest.mark.parametrize("path", ["t?", "t*/*.parquet", "{t1,plain}", "parts", "links"])
def test_a_table_behind_a_pattern_a_partition_or_a_link_is_refused_too(
    spark: SparkSession, tmp_path: Path, path: str
) -> None:
    for folder in ("t1", "plain", "parts/year=1", "links"):
        (tmp_path / folder).mkdir(parents=True)
        if folder != "links":
            pd.DataFrame({"a": [1.5]}).to_parquet(tmp_path / folder / "rows.parquet")
    (tmp_path / "links" / "rows.parquet").symlink_to(tmp_path / "t1" / "rows.parquet")
    assert dataframe_of(tmp_path / path, lambda: spark).count() >= 1
    for folder in ("t1", "parts/year=1"):
        (tmp_path / folder / "_delta_log").mkdir()
    with pytest.raises(DataError, match="of the Delta table"):
        dataframe_of(tmp_path / path, lambda: spark)


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_of_what_a_stream_has_written_only_the_rows_that_its_log_names_are_read(
    spark: SparkSession, tmp_path: Path, form: str
) -> None:
    source, sink = tmp_path / "source", tmp_path / "sink"
    spark.range(5).write.parquet(str(source))
    stream = spark.readStream.schema("id long").parquet(str(source)).writeStream.format(form)
    stream = stream.option("checkpointLocation", str(tmp_path / "marks")).option("header", True)
    stream.trigger(availableNow=True).start(str(sink)).awaitTermination()
    whole = next(each for each in sink.glob(f"part-*.{form}"))
    shutil.copy(whole, half := sink / f"half.{form}")  # as a stream leaves it that was killed
    (tmp_path / f"link.{form}").symlink_to(half)
    if form == "parquet":
        (tmp_path / "link").symlink_to(sink)
        for folder in (sink, tmp_path / "link"):
            assert dataframe_of(folder, lambda: spark).count() == 5
        refuse_tables_as_files(spark.read.parquet(str(sink)))
    for path in (f"sink/*.{form}", f"s*/h*.{form}", f"sink/{half.name}", f"link.{form}"):
        with pytest.raises(DataError, match=rf"streamed table .*\('{form}'\)\.load\('{sink}'\)"):
            dataframe_of(tmp_path / path, lambda: spark)


@pytest.mark.parametrize("log", ["_delta_log", ".hoodie", "metadata", "_spark_metadata"])
@pytest.mark.parametrize("version", ["1", "2"])
def test_a_query_over_files_of_a_table_whose_log_was_not_asked_is_refused(
    spark: SparkSession, tmp_path: Path, log: str, version: str
) -> None:
    """However Spark came to read them as Parquet, by its sources of either version."""
    file = tmp_path / "t" / "day=1" / "rows.parquet"
    file.parent.mkdir(parents=True)
    pd.DataFrame({"x": [1.5, 2.5], "y": [0, 1]}).to_parquet(file)
    spark.conf.set("spark.sql.sources.useV1SourceList", "parquet" if version == "1" else "")
    try:
        read = spark.read.parquet(str(file))
        spark.createDataFrame([(1.5, "a")], "x double, name string").createOrReplaceTempView(
            "names"
        )
        read.createOrReplaceTempView("files")
        of_subqueries = [
            "x <= (select max(x) from files)",
            "x in (select x from files)",
            "exists (select 1 from files where files.x = names.x)",
            "name = (select 'a' from range(1) where id in (select y from files))",
            "x <= (with found as (select x from files) select max(x) from found)",
        ]
        queries = [
            *(spark.sql(f"select * from names where {each}") for each in of_subqueries),
            spark.sql("select * from names, lateral (select y from files where x = names.x)"),
            read,
            spark.read.parquet(f"{tmp_path}/t/*/*.parquet"),
            spark.sql(f"select * from parquet.`{file}` where x > 0"),
            read.join(spark.table("names"), "x").union(spark.sql("select 2.5, 1, 'b'")),
            read.limit(1).cache(),
        ]
        for each in queries:
            refuse_tables_as_files(each)
        (tmp_path / "t" / log).mkdir()
        (tmp_path / "t" / log / "v1.metadata.json").write_text("{}")
        for each in queries:
            with pytest.raises(DataError, match=rf"the DataFrame has files of .*'{tmp_path}/t'"):
                refuse_tables_as_files(each)
        spec, store = DataSpec.checked(["x"], ["y"], None, 0.5), LocalStore(str(tmp_path / "store"))
        for asked in (prepare, identify):
            with pytest.raises(DataError, match=r"spark\.read\.format"):
                asked(read, store, 1, spec)
    finally:
        queries[-1].unpersist()
        spark.conf.unset("spark.sql.sources.useV1SourceList")


def test_a_table_in_the_middle_of_a_chain_of_links_is_refused_too(
    spark: SparkSession, tmp_path: Path
) -> None:
    for folder in ("blobs", "table/_delta_log", "links"):
        (tmp_path / folder).mkdir(parents=True)
    pd.DataFrame({"a": [1.5]}).to_parquet(tmp_path / "blobs" / "7")
    (tmp_path / "table" / "rows.parquet").symlink_to("../blobs/7")
    (tmp_path / "links" / "mine.parquet").symlink_to(tmp_path / "table" / "rows.parquet")
    (tmp_path / "all").symlink_to("links")
    for path in ("links/mine.parquet", "links", "all", "all/*.parquet"):
        with pytest.raises(DataError, match=rf"of the Delta table '{tmp_path}/table'"):
            dataframe_of(tmp_path / path, lambda: spark)


def test_a_session_that_reads_files_by_version_2_reads_a_path(
    spark: SparkSession, tmp_path: Path
) -> None:
    spark.range(3).write.parquet(str(tmp_path / "rows"))
    name = "spark.sql.sources.useV1SourceList"
    before = spark.conf.get(name)
    spark.conf.set(name, "")
    try:
        assert dataframe_of(str(tmp_path / "rows"), lambda: spark).count() == 3
    finally:
        spark.conf.set(name, before)


@pytest.mark.parametrize("name", ["a b", "a%20b", "a#b", "a[1]", "a{b,c}", "a*b", "a\\b"])
def test_a_folder_that_is_there_is_no_pattern(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    pd.DataFrame({"a": [1.5]}).to_parquet(tmp_path / name / "rows.parquet")
    assert dataframe_of(tmp_path / name, lambda: spark).count() == 1


@pytest.mark.parametrize(
    "path", ["s3://bucket/x", "dbfs:/x", "https://host/x", "hdfs:/x", "file://localhost/x", "m:x"]
)
def test_a_path_of_a_file_system_that_is_not_there_is_told_in_a_sentence(
    spark: SparkSession, path: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"'{path}' can't be read as Parquet or CSV: "):
        dataframe_of(path, lambda: spark)


@pytest.mark.slow
def test_a_search_without_labels_trains_on_a_pandas_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows, store = table(), LocalStore(str(tmp_path))
    result = GridSearch(
        backend=SparkBackend(spark, num_workers=2, verbose=0),
        store=store,
        estimator_gen_fn=autoencoder,
        search_space={"lr": hp_choice([0.01])},
        num_epochs=2,
        evaluation_metric="error",
        label_columns=None,
        verbose=0,
    ).fit(rows)
    (trial,) = result.trials
    assert len(trial.visit_log) == 4
    report = cerebro_hydra.replay(result.run_path, trial.trial_id, autoencoder)
    assert report.identical, str(report)
    found = result.transform(rows)
    assert [*found.columns] == ["features", "name", "output"]
    by_spark = result.transform(dataframe_of(rows, lambda: spark)).toPandas()
    assert np.array_equal(np.stack(found["output"]), np.stack(by_spark["output"]))
    estimator = autoencoder({"lr": 0.1})
    backend = SparkBackend(spark, num_workers=2, verbose=0)
    estimator.setLabelColumns(None).setNumEpochs(1).setStore(store).setBackend(backend)
    model = estimator.fit(rows)
    assert [*model.transform(rows).columns] == ["features", "name", "prediction"]
