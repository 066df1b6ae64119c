"""Says where a Spark job's processes are reached and may write; sets environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from cerebro_hydra.kernels import KERNELS
from cerebro_hydra.spark.checks import DAEMON_MODULE
from cerebro_hydra.worker_imports import by_own_workers

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

_T = TypeVar("_T")

LOCAL_IP = "SPARK_LOCAL_IP"
"""Spark's own variable for the one address of a machine that its servers shall use."""


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set variables of this process's environment during the block, and put all back after it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def with_kernels(rdd: RDD[_T], numerics: str) -> RDD[_T]:
    """Let the Python workers that compute an RDD choose kernels so; see `KERNELS`.

    Spark keeps Python workers by their variables, so those of other jobs, which may have called MKL
    already, are not used again. A daemon of ours, and so its workers, chooses "fast" by itself.
    """
    context = rdd.context
    variables = dict(KERNELS[numerics])
    if numerics == "fast":
        if context.getConf().get("spark.python.daemon.module") == DAEMON_MODULE:
            return by_own_workers(rdd)
        chosen = {**os.environ, **context.environment}
        variables = {name: chosen.get(name, value) for name, value in variables.items()}
    return by_own_workers(rdd, variables)


def driver_host(spark_context: SparkContext) -> str:
    """Return the address by which executors reach the driver, as Spark itself uses it."""
    return str(spark_context.getConf().get("spark.driver.host"))


def spark_folder() -> str:
    """Return a folder of this executor that Spark deletes at its end, even after a kill."""
    from pyspark import SparkFiles

    folders = os.environ.get("SPARK_LOCAL_DIRS") or os.environ.get("SPARK_EXECUTOR_DIRS")
    return folders.split(",")[0] if folders else SparkFiles.getRootDirectory()
