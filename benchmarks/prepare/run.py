"""Measures preparation against Spark's own rewrite of the same rows, and petastorm's converter."""

from __future__ import annotations

import argparse
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyspark
import torch
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, SparkEstimator, hp_choice
from cerebro_hydra.data.batches import batches, row_order
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.preparation.prepare import prepare
from cerebro_hydra.data.spec import DataSpec

EVERY_SECONDS = 0.25
FLOATS = 64
ROWS_PER_GB = 4_000_000  # 986 MB of Parquet
SHAPES = ("array", "columns", "images")
IMAGE_FLOATS = 37_500  # 150 KB


class Peaks:
    """Samples the memory of Java and of its Python workers while it is entered."""

    def __init__(self, java: Any, pid: int) -> None:
        self._java, self._pid = java, pid
        self.heap = self.python = 0

    def __enter__(self) -> Peaks:
        self._ended = threading.Event()
        for pool in self._pools():
            pool.resetPeakUsage()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.heap = sum(pool.getPeakUsage().getUsed() for pool in self._pools())

    def _pools(self) -> list[Any]:
        pools = self._java.java.lang.management.ManagementFactory.getMemoryPoolMXBeans()
        return [pool for pool in pools if pool.getType().name() == "HEAP"]

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            self.python = max(self.python, sum(map(_pss, _descendants(self._pid))))


def _descendants(pid: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {pid})


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def generate(spark: SparkSession, path: Path, rows: int, shape: str) -> None:
    """Write rows of random floats and a label; images repeat what a hundredth of them draws."""
    label = (F.col("id") % 10).alias("label")
    ids = spark.range(0, rows, 1, max(4, rows // 250_000))
    if shape == "images":
        part = F.array(*(F.rand(i).cast("float") for i in range(IMAGE_FLOATS // 100)))
        whole = F.flatten(F.array(*[F.col("part")] * 100)).alias("features")
        df = ids.repartition(64).withColumn("part", part).select(whole, label)
        writer = df.write.option("parquet.enable.dictionary", "false")
        writer.option("parquet.block.size", 32 << 20).parquet(str(path))
        return
    numbers = [F.rand(i).cast("float") for i in range(FLOATS)]
    if shape == "array":
        ids.select(F.array(*numbers).alias("features"), label).write.parquet(str(path))
    else:
        named = (number.alias(f"x{i}") for i, number in enumerate(numbers))
        ids.select(*named, label).write.parquet(str(path))


def ours(df: DataFrame, folder: str, workers: int) -> None:
    features = [name for name in df.columns if name != "label"]
    spec = DataSpec.checked(features, ["label"], None, 0.2)
    store = LocalStore(f"{folder}/store")
    manifest = prepare(df, store, workers, spec)
    start = time.perf_counter()
    part = CachedPartition.build(manifest.partition("train", 0), manifest, store, f"{folder}/cache")
    next(batches(part, features, ["label"], 64, row_order(part.rows, 0, 0, 0)))
    print(f"  first batch of a partition {time.perf_counter() - start:.1f} s after that")


def rewrite(df: DataFrame, folder: str, workers: int) -> None:
    """Rewrite the rows as Spark does: one shuffle, each part sorted, as many parts as we have."""
    hashed = df.withColumn("hash", F.xxhash64(*df.columns))
    parts = hashed.repartition(2 * workers, "hash").sortWithinPartitions("hash")
    parts.drop("hash").write.parquet(f"{folder}/rewritten")


def fit(df: DataFrame, folder: str, workers: int) -> None:
    """Prepare rows that have an array, and train a small net on them for an epoch."""
    (first,) = df.select("features").take(1)
    width = len(first["features"])

    def estimator_gen_fn(params: dict[str, Any]) -> SparkEstimator:
        model = torch.nn.Sequential(
            torch.nn.Linear(width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
        return SparkEstimator(
            model=model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), batch_size=1024
        )

    backend = SparkBackend(df.sparkSession, num_workers=workers, verbose=0)
    store = LocalStore(folder)
    columns: dict[str, Any] = {"feature_columns": ["features"], "label_columns": ["label"]}
    start = time.perf_counter()
    backend.prepare_data(store, df, validation=0.2, **columns)
    print(f"  prepared in {time.perf_counter() - start:.1f} s of that", flush=True)
    GridSearch(
        backend=backend,
        store=store,
        estimator_gen_fn=estimator_gen_fn,
        search_space={"lr": hp_choice([0.1])},
        num_epochs=1,
        evaluation_metric="loss",
        validation=0.2,
        verbose=0,
        **columns,
    ).fit(df)


def petastorm(df: DataFrame, folder: str, workers: int) -> None:
    from petastorm.spark import SparkDatasetConverter, make_spark_converter

    name = SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF
    df.sparkSession.conf.set(name, f"file://{folder}/petastorm")
    # It remembers queries that it converted; one more column makes another.
    make_spark_converter(df.withColumn("round", F.lit(time.time())))


RUNS: dict[str, Callable[[DataFrame, str, int], None]] = {
    "fit": fit,
    "ours": ours,
    "rewrite": rewrite,
    "petastorm": petastorm,
}
COMPARED = ["ours", "rewrite", "petastorm"]


def measure(
    spark: SparkSession, source: Path, base: Path, workers: int, rounds: int, names: list[str]
) -> dict[str, float]:
    """Return the least seconds of each; all run one after another, again and again."""
    megabytes = sum(file.stat().st_size for file in source.glob("*.parquet")) / 1e6
    context = spark.sparkContext
    gateway: Any = SparkContext._gateway
    least: dict[str, float] = {}
    for _ in range(rounds):
        for name in names:
            with tempfile.TemporaryDirectory(dir=base) as folder:
                start = time.perf_counter()
                with Peaks(context._jvm, gateway.proc.pid) as peaks:
                    try:
                        RUNS[name](spark.read.parquet(str(source)), folder, workers)
                    except Exception as error:
                        if name == "ours":
                            raise
                        print(f"{name}: {str(error).splitlines()[0][:200]}", flush=True)
                        continue
                seconds = time.perf_counter() - start
            least[name] = min(seconds, least.get(name, seconds))
            print(
                f"{name:10} {seconds:7.1f} s {megabytes / seconds:6.1f} MB/s  "
                f"heap {peaks.heap / 2**20:5.0f} MiB  Python {peaks.python / 2**20:5.0f} MiB",
                flush=True,
            )
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--shape", choices=SHAPES, default="array")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--heap", help="spark.driver.memory; the default is local_spark's own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=COMPARED)
    parser.add_argument("--folder", help="on a disk with ten times the gigabytes")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: 4,000 rows")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.gigabytes, arguments.rounds = [0.001], 1
    heap = {"spark.driver.memory": arguments.heap} if arguments.heap else {}
    spark = cerebro_hydra.local_spark(workers=arguments.workers, **heap)
    print(f"Python {platform.python_version()}, Spark {pyspark.__version__}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        base = Path(folder)
        for gigabytes in arguments.gigabytes:
            rows = int(gigabytes * ROWS_PER_GB)
            if arguments.shape == "images":
                rows = int(gigabytes * 2**30) // (4 * IMAGE_FLOATS)
            source = base / "source"
            generate(spark, source, rows, arguments.shape)
            size = sum(file.stat().st_size for file in source.glob("*.parquet")) / 1e6
            print(f"{rows:,} rows, {size:,.0f} MB", flush=True)
            run = partial(measure, spark, source, base, arguments.workers, arguments.rounds)
            least = run(arguments.runs)
            for name in ("rewrite", "petastorm"):
                if name in least and "ours" in least:
                    print(f"least seconds: {name} / ours = {least[name] / least['ours']:.2f}")
            shutil.rmtree(source)
    spark.stop()


if __name__ == "__main__":
    main()
