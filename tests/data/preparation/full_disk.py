"""Prepares rows where a small disk is the store's or Spark's own, and prints what is said of it.

python -m tests.data.preparation.full_disk SMALL ROOMY store|shuffle
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import functions as F

import cerebro_hydra
from cerebro_hydra.errors import CerebroHydraError

ROWS, FLOATS = 100_000, 64


def main(small: Path, roomy: Path, case: str) -> None:
    spark = cerebro_hydra.local_spark(
        workers=2, **{"spark.local.dir": str(small if case == "shuffle" else roomy)}
    )
    numbers = (F.rand(i).cast("float") for i in range(FLOATS))
    rows = spark.range(ROWS).select(F.array(*numbers).alias("x"), (F.col("id") % 2).alias("y"))
    rows.write.parquet(str(roomy / "rows"))
    df = spark.read.parquet(str(roomy / "rows"))
    backend = cerebro_hydra.SparkBackend(spark, num_workers=2, verbose=0)
    store = cerebro_hydra.LocalStore(str((small if case == "store" else roomy) / "store"))
    try:
        backend.prepare_data(store, df, feature_columns=["x"], label_columns=["y"], validation=0.2)
    except CerebroHydraError as error:
        print(f"{type(error).__name__}: {error}")
    roomier = cerebro_hydra.LocalStore(str(roomy / "another store"))
    if case == "store":  # the session goes on
        backend.prepare_data(
            roomier, df, feature_columns=["x"], label_columns=["y"], validation=0.2
        )
        print("prepared")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
