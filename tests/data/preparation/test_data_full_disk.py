"""A disk that fills up while rows are prepared ends that in one sentence with the remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import run_python
from tests.small_disk import on_small_disk

pytestmark = pytest.mark.long

PROGRAM = """
import sys
from pathlib import Path
from pyspark.sql import functions as F
import cerebro_hydra
from cerebro_hydra.errors import CerebroHydraError

small, roomy, case = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
folder = str(small if case == "shuffle" else roomy)
spark = cerebro_hydra.local_spark(workers=2, **{"spark.local.dir": folder})
numbers = (F.rand(i).cast("float") for i in range(64))
rows = spark.range(100_000).select(F.array(*numbers).alias("x"), (F.col("id") % 2).alias("y"))
rows.write.parquet(str(roomy / "rows"))
df = spark.read.parquet(str(roomy / "rows"))
backend = cerebro_hydra.SparkBackend(spark, num_workers=2, verbose=0)

def prepare(store):
    columns = {"feature_columns": ["x"], "label_columns": ["y"]}
    backend.prepare_data(cerebro_hydra.LocalStore(str(store)), df, validation=0.2, **columns)

try:
    prepare((small if case == "store" else roomy) / "store")
except CerebroHydraError as error:
    print(f"{type(error).__name__}: {error}")
if case == "store":  # the session goes on
    prepare(roomy / "another store")
    print("prepared")
"""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "store",
            "StoreError: can't write '{small}/store/.*; the disk is full: free space .*\nprepared",
        ),
        (
            "shuffle",
            "StoreError: a disk was full while preparing rows: .*{small}.*\\(spark.local.dir\\)",
        ),
    ],
)
def test_a_disk_that_fills_up_is_told(case: str, said: str, tmp_path: Path) -> None:
    small, roomy = tmp_path / "small", tmp_path / "roomy"
    small.mkdir()
    roomy.mkdir()
    if not (around := on_small_disk(small, 8 << 20)):
        pytest.skip("no disk of its own can be mounted: that needs root, or namespaces of users")
    done = run_python("-c", PROGRAM, small, roomy, case, around=around)
    expected = said.format(small=re.escape(str(small)))
    assert re.fullmatch(expected, done.stdout.strip()), done.stdout
