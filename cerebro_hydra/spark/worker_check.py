"""Asks each worker's task, in one small job, what an agent would find there."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import re
import shutil
import socket
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cerebro_hydra
from cerebro_hydra.data.petastorm_reader import obstacle
from cerebro_hydra.recipe import fingerprint_differences
from cerebro_hydra.spark.findings import Finding
from cerebro_hydra.spark.places import with_kernels

if TYPE_CHECKING:
    from pyspark import SparkContext

COMPARED = ("torch", "numpy", "pyarrow")
"""Packages that decide the bits of a result, beside our own."""

_OF_VERSIONS = ("torch", "threads")
"""What `check_imports` compares, and what is set when an agent starts."""

LEAST_SCRATCH = 1 << 30
"""Bytes of scratch space, where a worker decodes its rows, below which it is warned of."""


@dataclass(frozen=True)
class WorkerFacts:
    """Holds what one worker's task found; `executor` tells the executors of one host apart.

    `free_scratch` is in bytes, None where this package can't be imported; `numeric` is what the
    bits of an agent depend on, empty there.
    """

    worker: int
    host: str
    executor: int
    python: str
    gpus: Sequence[str]
    free_scratch: int | None
    package: str
    versions: Mapping[str, str]
    numeric: Mapping[str, Any]
    failures: Mapping[str, str]

    def __str__(self) -> str:
        scratch = f"{(self.free_scratch or 0) / 2**30:.0f} GiB of scratch"
        gpus = f", GPU {', '.join(self.gpus)}" if self.gpus else ""
        return f"worker {self.worker} on {self.host}, {scratch}{gpus}"


def required_modules() -> tuple[str, ...]:
    """Return what an agent imports, with petastorm where the driver has it: all read alike."""
    petastorm = () if obstacle() else ("petastorm.reader",)
    return ("cerebro_hydra", "torch", "numpy", "pyarrow", *petastorm)


def ask_workers(
    spark_context: SparkContext, num_workers: int, modules: Sequence[str], numerics: str = "fast"
) -> list[WorkerFacts]:
    """Run one task per worker that imports modules and looks around.

    Where enough slots are free, Spark places these tasks as it will place agents.

    Raises:
        Exception: Spark's own, if the Python of an executor can't even start.
    """

    # Nested, so that it is pickled by value and runs where this package can't be imported.
    def ask(worker: int, rows: Iterable[int]) -> Iterator[dict[str, Any]]:
        from pyspark import TaskContext

        for _ in rows:
            pass
        failures, versions, numeric, free_scratch = {}, {}, {}, None
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
        for name in COMPARED:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        with contextlib.suppress(ImportError, OSError):
            from cerebro_hydra.spark.places import spark_folder

            free_scratch = shutil.disk_usage(spark_folder()).free
        with contextlib.suppress(ImportError):
            from cerebro_hydra.recipe import numeric_fingerprint
            from cerebro_hydra.recipe.determinism import compute_as

            compute_as(numerics)
            numeric = numeric_fingerprint()
        gpus = TaskContext.get().resources().get("gpu")  # type: ignore[union-attr]
        yield {
            "worker": worker,
            "host": socket.gethostname(),
            "executor": os.getppid(),
            "python": sys.executable,
            "gpus": list(gpus.addresses) if gpus else [],
            "free_scratch": free_scratch,
            "package": getattr(sys.modules.get("cerebro_hydra"), "__version__", ""),
            "versions": versions,
            "numeric": numeric,
            "failures": failures,
        }

    job = spark_context.parallelize(range(num_workers), num_workers).mapPartitionsWithIndex(ask)
    return [WorkerFacts(**answer) for answer in with_kernels(job, numerics).collect()]


def check_imports(workers: Sequence[WorkerFacts]) -> list[Finding]:
    """Find, once per host, what keeps agents from starting or their bits from being equal."""
    return sorted({found for facts in workers for found in _import_findings(facts)}, key=str)


def _import_findings(facts: WorkerFacts) -> Iterator[Finding]:
    host = f"executor on {facts.host}"
    python = f"its Python {sys.version_info.major}.{sys.version_info.minor}"
    for name, message in facts.failures.items():
        remedy = f"install {name.split('.')[0]} there, ship it with --py-files, or set "
        remedy += "PYSPARK_PYTHON to a Python that has it"
        yield Finding(host, f"{python} can't import {name}: {message}", remedy)
    ours = cerebro_hydra.__version__
    if facts.package not in ("", ours):
        problem = f"it has cerebro_hydra {facts.package}, the driver {ours}"
        yield Finding(host, problem, f"install cerebro_hydra {ours} there")
    for name, there in facts.versions.items():
        here = importlib.metadata.version(name)
        if there.split("+")[0] != here.split("+")[0]:
            problem = f"it has {name} {there}, the driver {here}; other versions can give other "
            problem += "bits, and a replay on the driver could differ"
            yield Finding(host, problem, f"install {name} {here} there", prevents=False)


def check_numerics(workers: Sequence[WorkerFacts], numerics: str = "fast") -> Iterator[Finding]:
    """Find workers that would compute other bits than the first, and those where addresses matter.

    No single machine can replay what unlike workers train together. `numerics` is as
    `SparkBackend` has it.
    """
    told = [facts for facts in workers if facts.numeric]
    for facts in told:
        differing = [
            f"{name} is {its}, not {mine}"
            for name, mine, its in fingerprint_differences(told[0].numeric, facts.numeric)
            if name not in _OF_VERSIONS
        ]
        if differing:
            problem = f"worker {facts.worker} on {facts.host} computes other bits than worker "
            problem += f"{told[0].worker}: {', '.join(differing)}"
            remedy = "give the workers CPUs and libraries of one kind"
            remedy += ", or SparkBackend numerics='portable'" if numerics == "fast" else ""
            yield Finding("numerics", problem, remedy, prevents=False)
        if numerics == "fast" and facts.numeric.get("addresses") == "aligned":
            problem = f"on worker {facts.worker} on {facts.host} bits depend on where in memory "
            problem += f"operands lie; MKL's mode is {facts.numeric.get('mkl_mode')}"
            remedy = "set spark.executorEnv.MKL_CBWR to AUTO,STRICT"
            yield Finding("numerics", problem, remedy, prevents=False)


def check_placement(workers: Sequence[WorkerFacts], local: bool) -> Iterator[Finding]:
    """Find workers that share what each should have alone, or have little disk.

    Args:
        workers: what each worker's task found.
        local: the master is `local[...]`, where all share the one executor.
    """
    executor = "one executor; losing it loses them all"
    cores = "set spark.executor.cores to spark.task.cpus: one agent per executor"
    amount = "set spark.task.resource.gpu.amount to 1"
    sharing: dict[tuple[str, str, str, int | str], list[str]] = defaultdict(list)
    for facts in workers:
        host = f"executor on {facts.host}"
        if not local:
            sharing[host, executor, cores, facts.executor].append(str(facts.worker))
        for gpu in facts.gpus:
            sharing[host, f"GPU {gpu}", amount, gpu].append(str(facts.worker))
        if facts.free_scratch is not None and facts.free_scratch < LEAST_SCRATCH:
            free = f"{facts.free_scratch / 2**20:.0f} MiB for decoded rows"
            remedy = "free space there, or set spark.local.dir to a larger disk"
            yield Finding(host, f"worker {facts.worker} has {free}", remedy, prevents=False)
    for (host, shared, remedy, _), sharers in sharing.items():
        if len(sharers) > 1:
            problem = f"workers {' and '.join(sharers)} share {shared}"
            yield Finding(host, problem, remedy, prevents=False)


def worker_failure(text: str) -> Finding:
    """Explain, from Spark's message, why a job failed whose Python could not start."""
    where = re.search(r"\(TID \d+\) \(([^ )]+)", text)
    host = f"executor on {where[1]}" if where else "executors"
    versions = re.search(r"Python in worker has different version.*?(\d+\.\d+).*?(\d+\.\d+)", text)
    if versions or "PYTHON_VERSION_MISMATCH" in text:
        ran = f" ({versions[1]}, the driver has {versions[2]})" if versions else ""
        problem = f"its Python has another minor version than the driver{ran}"
        remedy = "set PYSPARK_PYTHON to the same Python on the driver and on every executor"
    elif missing := re.search(r"No module named '?([\w.]+)'?", text):
        problem = f"its Python can't import {missing[1]} (No module named {missing[1]!r})"
        remedy = f"install {missing[1].split('.')[0]} there, or ship it with sc.addPyFile"
    else:
        problem = f"its Python can't start: {text[:2000]}"
        remedy = "see the message of Spark's Python worker"
    return Finding(host, problem, remedy)
