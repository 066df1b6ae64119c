"""A tiny job that asks every slot whether an agent could start there, and with which versions."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cerebro_hydra
from cerebro_hydra.data.petastorm_reader import obstacle
from cerebro_hydra.spark.checks import Finding

if TYPE_CHECKING:
    from pyspark import SparkContext


def required_modules() -> tuple[str, ...]:
    """What an agent imports; petastorm where the driver has it, so that all read alike."""
    petastorm = () if obstacle() else ("petastorm.reader",)
    return ("cerebro_hydra", "torch", "numpy", "pyarrow.flight", *petastorm)


# What else decides the bits of a result, beside our own code.
COMPARED = ("torch", "numpy", "pyarrow")


@dataclass(frozen=True)
class Visit:
    """What one slot's Python answered: its versions, and why modules could not be imported."""

    host: str
    executable: str
    package: str
    versions: Mapping[str, str]
    failures: Mapping[str, str]


def probe(
    spark_context: SparkContext, slots: int, modules: Iterable[str] | None = None
) -> list[Finding]:
    """Import what an agent needs in one task per slot, and report where that fails."""
    try:
        return visit_findings(visits(spark_context, slots, modules))
    except Exception as error:
        return [worker_failure(str(error))]


def visits(
    spark_context: SparkContext, slots: int, modules: Iterable[str] | None = None
) -> list[Visit]:
    """Run one task per slot and let each import modules.

    Args:
        slots: tasks to run; with all slots free, Spark places one on each.
        modules: names that have to be importable; None takes `required_modules`.

    Raises:
        Exception: Spark's own, if the Python of an executor can't even start.
    """
    names = required_modules() if modules is None else tuple(modules)
    compared = COMPARED

    # Nested, so that it is pickled by value and runs where this package can't be imported.
    def visit(
        rows: Iterable[int],
    ) -> Iterator[tuple[str, str, str, dict[str, str], dict[str, str]]]:
        import contextlib
        import importlib
        import importlib.metadata
        import socket
        import sys

        for _ in rows:
            pass
        failures, versions = {}, {}
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
        for name in compared:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        ours = sys.modules.get("cerebro_hydra")
        package = getattr(ours, "__version__", "")
        yield socket.gethostname(), sys.executable, package, versions, failures

    job = spark_context.parallelize(range(slots), slots).mapPartitions(visit)
    return [Visit(*answer) for answer in job.collect()]


def visit_findings(visits: Sequence[Visit]) -> list[Finding]:
    """What in the answers would keep agents from starting, or their bits from being equal."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {
        Finding(
            f"executor on {visit.host}",
            f"its Python {python} can't import {name}: {message}",
            f"install {name.split('.')[0]} there, ship it with --py-files, or set PYSPARK_PYTHON "
            "to a Python that has it",
        )
        for visit in visits
        for name, message in visit.failures.items()
    }
    ours = cerebro_hydra.__version__
    here = {name: importlib.metadata.version(name) for name in COMPARED}
    for visit in visits:
        if visit.package not in ("", ours):
            found.add(
                Finding(
                    f"executor on {visit.host}",
                    f"it has cerebro_hydra {visit.package}, the driver {ours}",
                    f"install cerebro_hydra {ours} there",
                )
            )
        for name, there in visit.versions.items():
            if there.split("+")[0] != here[name].split("+")[0]:
                found.add(
                    Finding(
                        f"executor on {visit.host}",
                        f"it has {name} {there}, the driver {here[name]}; other versions can give "
                        "other bits, and a replay on the driver could differ",
                        f"install {name} {here[name]} there",
                        prevents=False,
                    )
                )
    return sorted(found, key=str)


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
