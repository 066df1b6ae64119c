"""Spark's own progress line, which only a session of its own process can show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.processes import run_python

pytestmark = [pytest.mark.spark, pytest.mark.long]

PROGRAM = """
import os, sys, time
import pyspark
from cerebro_hydra.spark.launcher import no_progress_line
from cerebro_hydra.spark.session import started

settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "true"}
spark = started({"spark.master": "local[2]", **settings})
context = spark.sparkContext
context.setLogLevel("ERROR")

def job():
    context.parallelize(range(2), 2).map(lambda _: time.sleep(3)).collect()
    sys.stderr.flush()

with no_progress_line(context):
    print("hidden", file=sys.stderr, flush=True)
    job()
print("shown", file=sys.stderr, flush=True)
job()
with no_progress_line(context):
    spark.stop()
"""

EXECUTORS = {"PYSPARK_PYTHON": sys.executable}
BACKEND = """
import sys
from cerebro_hydra import LocalStore, SparkBackend
from cerebro_hydra.spark.session import started

settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "true"}
spark = started({"spark.master": "local[2,2]", **settings})
spark.sparkContext.setLogLevel("ERROR")
df = spark.range(60).selectExpr("array(float(id), 1f) AS features", "id % 2 AS label")
SparkBackend(spark, num_workers=2).prepare_data(LocalStore(sys.argv[1]), df)
"""


def test_checks_and_preparation_tell_lines_of_ours_alone(tmp_path: Path) -> None:
    assert "[Stage" not in run_python("-c", BACKEND, tmp_path, **EXECUTORS).stderr


def test_the_line_stays_away_for_a_while_and_comes_back() -> None:
    done = run_python("-c", PROGRAM, **EXECUTORS)
    hidden, shown = done.stderr.partition("hidden\n")[2].split("shown\n")
    assert "[Stage" not in hidden
    assert "[Stage" in shown
