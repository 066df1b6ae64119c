"""A tiny job that asks every slot whether an agent could start there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cerebro_hydra.data.petastorm_reader import obstacle
from cerebro_hydra.spark.checks import Finding

if TYPE_CHECKING:
    from pyspark import SparkContext


def required_modules() -> tuple[str, ...]:
    """What an agent imports; petastorm where the driver has it, so that all read alike."""
    petastorm = () if obstacle() else ("petastorm.reader",)
    return ("cerebro_hydra", "torch", "numpy", "pyarrow.flight", *petastorm)


def probe(
    spark_context: SparkContext, slots: int, modules: Iterable[str] | None = None
) -> list[Finding]:
    """Import what an agent needs in one task per slot, and report where that fails.

    Args:
        slots: tasks to run; with all slots free, Spark places one on each.
        modules: names that have to be importable; None takes `required_modules`.
    """
    names = required_modules() if modules is None else tuple(modules)

    # Nested, so that it is pickled by value and runs where this package can't be imported.
    def visit(rows: Iterable[int]) -> Iterator[tuple[str, str, str]]:
        import importlib
        import socket

        for _ in rows:
            pass
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:
                yield socket.gethostname(), name, f"{type(error).__name__}: {error}"

    job = spark_context.parallelize(range(slots), slots).mapPartitions(visit)
    try:
        failures = set(job.collect())
    except Exception as error:
        return [worker_failure(str(error))]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [
        Finding(
            f"executor on {host}",
            f"its Python {python} can't import {name}: {message}",
            f"install {name.split('.')[0]} there, or set PYSPARK_PYTHON to a Python that has it",
        )
        for host, name, message in sorted(failures)
    ]


def worker_failure(text: str) -> Finding:
    """Turn the failure of a Spark job whose Python could not start into a finding.

    Args:
        text: the message of Spark's exception.
    """
    where = re.search(r"\(TID \d+\) \(([^ )]+)", text)
    host = f"executor on {where[1]}" if where else "executors"
    versions = re.search(r"Python in worker has different version.*?(\d+\.\d+).*?(\d+\.\d+)", text)
    if versions or "PYTHON_VERSION_MISMATCH" in text:
        ran = f" ({versions[1]}, the driver has {versions[2]})" if versions else ""
        return Finding(
            host,
            f"its Python has another minor version than the driver{ran}",
            "set PYSPARK_PYTHON to the same Python on the driver and on every executor",
        )
    missing = re.search(r"No module named '?([\w.]+)'?", text)
    if missing:
        return Finding(
            host,
            f"its Python can't import {missing[1]} (No module named {missing[1]!r})",
            f"install {missing[1].split('.')[0]} there, or ship it with sc.addPyFile",
        )
    return Finding(
        host, f"its Python can't start: {text[:2000]}", "see the message of Spark's Python worker"
    )
