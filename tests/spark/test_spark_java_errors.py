"""What is said when the Java of a session is killed, and when a heap or a disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest
from py4j.protocol import Py4JError

from cerebro_hydra.errors import DataError, SetupError, StoreError
from cerebro_hydra.spark.java import explained_java
from tests.processes import run_python

SCRIPT = """
import os, signal, sys, threading, time, types
import torch
import cerebro_hydra
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.errors import SetupError
from cerebro_hydra.spark.transform import Inference
from cerebro_hydra.storage import LocalStore
from pyspark import SparkContext
from pyspark.sql import functions as F

def told(what, call):
    try:
        call()
    except SetupError as error:
        print(f"{what}: {error}", flush=True)
    else:
        print(f"{what}: nothing was raised", flush=True)

def slow(value):
    time.sleep(60)
    return value

spark = cerebro_hydra.local_spark(workers=1)
backend = cerebro_hydra.SparkBackend(spark, num_workers=1, verbose=0)
rows = spark.range(100).select(F.col("id").cast("float").alias("x"))
slowed = rows.select(F.udf(slow, "float")("x").alias("x"))
java = SparkContext._gateway.proc.pid
threading.Timer(2.0, os.kill, (java, signal.SIGKILL)).start()
spec = DataSpec.checked(["x"])
told("prepare", lambda: backend.prepare(LocalStore(sys.argv[1]), slowed, spec))
told("doctor", lambda: cerebro_hydra.doctor(spark, 1))
inference = Inference(None, [ColumnSpec("x", "float32", ())], 10)
outputs = types.SimpleNamespace(names=["prediction"])
told("transform", lambda: inference.transform(rows, outputs))
spark = cerebro_hydra.local_spark(workers=1)
print("rows", spark.range(7).count(), flush=True)
spark.stop()
"""


@pytest.mark.long
def test_a_killed_java_is_told_in_a_sentence_and_a_new_session_starts(tmp_path: Path) -> None:
    done = run_python("-c", SCRIPT, tmp_path / "store")
    *told, rows = done.stdout.splitlines()
    assert rows == "rows 7"
    assert [line.partition(":")[0] for line in told] == ["prepare", "doctor", "transform"]
    doings = ("preparing rows", "looking at Spark", "adding predictions to a DataFrame")
    for line, doing in zip(told, doings, strict=True):
        assert f"Java, in which Spark runs, ended while {doing}" in line
        assert "(signal SIGKILL): start a session anew with local_spark()" in line
        assert "spark.driver.memory" in line
    assert "Traceback" not in done.stderr
    assert "Py4J" not in done.stderr


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (Py4JError("java.lang.OutOfMemoryError: Java heap space"), SetupError, "heap of 1g was"),
        (RuntimeError("GC overhead limit exceeded"), SetupError, "start a session anew with more"),
        (Py4JError("java.io.IOException: No space left on device"), StoreError, "spark.local.dir"),
    ],
)
def test_what_is_full_is_told_with_the_remedy(error, kind, message: str) -> None:
    with pytest.raises(kind, match=message) as raised, explained_java(None, "preparing rows"):
        raise error
    assert raised.value.__cause__ is None
    assert "\n" not in str(raised.value)


def test_files_that_keep_a_column_in_several_types_are_told_as_spark_4_says_so() -> None:
    says = (
        "[FAILED_READ_FILE.PARQUET_COLUMN_DATA_TYPE_MISMATCH] Encountered error while reading file "
        "s3a://rows/part-1.parquet. Data type mismatches when reading Parquet column <`y`>. "
        "Expected Spark type int, actual Parquet type INT64.\nCaused by: "
        "SchemaColumnConvertNotSupportedException: column: [y, list, element], physicalType: "
        "INT64, logicalType: int\n\tat org.apache.spark"
    )
    told = r"^column 'y' is INT64 in 's3a://rows/part-1.parquet', and Spark reads it as int, "
    with pytest.raises(DataError, match=told), explained_java(None, "preparing rows"):
        raise Py4JError(says)


def test_other_errors_pass() -> None:
    with pytest.raises(Py4JError, match="no such method"), explained_java(None, "preparing rows"):
        raise Py4JError("no such method")
