"""A Spark on this machine whose executors find GPUs by the discovery script of the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import cerebro_hydra
from cerebro_hydra.spark import gpu_discovery
from cerebro_hydra.spark.places import environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MEMORY_MIB = 2048


@contextmanager
def gpu_spark(
    folder: Path, workers: int = 1, gpus: int = 1, listed: str | None = None
) -> Iterator[SparkSession]:
    """Start executors in processes of their own: Spark's threads have no GPUs to give to tasks.

    Args:
        folder: where executors work.
        workers: how many executors, each with a slot for an agent and one for other jobs.
        gpus: how many each has.
        listed: the GPUs that the machine shall have, as `CUDA_VISIBLE_DEVICES` names them.
    """
    import pyspark

    home = folder / "spark"
    home.mkdir()
    for each in Path(pyspark.__file__).parent.iterdir():
        (home / each.name).symlink_to(each)
    script = folder / "gpus"
    shown = "" if listed is None else f"export CUDA_VISIBLE_DEVICES={listed}\n"
    script.write_text(f"#!/bin/bash\n{shown}exec {sys.executable} {gpu_discovery.__file__}\n")
    script.chmod(0o755)
    with environment(SPARK_HOME=str(home), SPARK_LOCAL_IP="127.0.0.1"):
        session = cerebro_hydra.local_spark(
            workers,
            verbose=0,
            **{
                "spark.master": f"local-cluster[{workers},1,{MEMORY_MIB}]",
                "spark.executor.memory": f"{MEMORY_MIB}m",
                "spark.worker.resource.gpu.amount": gpus,
                "spark.worker.resource.gpu.discoveryScript": script,
                "spark.executor.resource.gpu.amount": gpus,
                "spark.task.resource.gpu.amount": gpus,
                "spark.executorEnv.OMP_NUM_THREADS": 1,
            },
        )
        try:
            yield session
        finally:
            session.stop()
