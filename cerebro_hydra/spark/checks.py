"""Checks a Spark's versions, settings and slots: facts in, findings out.

With what prevents a run, agents would not start, hang, die for good, or run twice. The rest is
advice: a run would be slower, or easier to lose.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from cerebro_hydra.errors import SetupError
from cerebro_hydra.spark.findings import Finding
from cerebro_hydra.spark.java import parse_version, pip_java, supported_versions

if TYPE_CHECKING:
    from pyspark import SparkContext


MAX_FAILURES = 8
"""How many failures a task should be allowed before its job ends: each lost agent is one."""

DAEMON_MODULE = "cerebro_hydra.spark.daemon"

# The least pyarrow that a Spark version's Arrow paths accept, and who installs it; ours is 14.
_LEAST_PYARROW = (
    ((4, 2), 18, "cerebro-hydra[modern]"),
    ((4, 1), 15, "cerebro-hydra[modern]"),
    ((3, 5), 14, "cerebro-hydra[petastorm]"),
)

_TESTED_SPARKS = ((3, 5), (4, 0), (4, 3))

# What a setting leads to that is true, and whether that prevents a run.
_FALSE_IS_RIGHT = (
    ("spark.speculation", "Spark would start second copies of agents that run long", True),
    (
        "spark.dynamicAllocation.enabled",
        "Spark would take executors away from waiting agents",
        True,
    ),
    (
        "spark.excludeOnFailure.enabled",
        "Spark would no longer use an executor where agents were lost",
        False,
    ),
)

_EXECUTORS_COME_SECONDS = 60.0  # from a session's start; a busy cluster takes its time
_FIRST_LINE_SECONDS = 2.0
_LOOK_SECONDS = 0.1


def require_pyspark(what: str) -> None:
    """Refuse to go on where this Python has no pyspark: `what` needs it.

    Raises:
        SetupError: pyspark can't be imported; says where it comes from.
    """
    try:
        import pyspark  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"{what} needs pyspark, which {sys.executable} can't import ({error}): on a cluster "
            "run the Python that its Spark brings, such as by spark-submit; on one machine pip "
            "install 'cerebro-hydra[local]' brings Spark and Java"
        ) from None


def check_java(java: str, pyspark: str) -> Iterator[Finding]:
    """Find a Java that a Spark version does not run on whole: `transform` would fail on it."""
    suited = supported_versions(pyspark)
    if parse_version(java) not in suited:
        wanted = " or ".join(map(str, sorted(suited)))
        problem = f"Spark {pyspark} does not run whole on Java {java}; it needs {wanted}"
        remedy = f"pip install {pip_java(pyspark)}, or set JAVA_HOME to such a Java"
        yield Finding("Java", problem, remedy)


def check_packages(pyspark: str, pyarrow: str) -> Iterator[Finding]:
    """Find versions that can't move data between Spark and agents, and advise of untested ones."""
    for since, least, stack in _LEAST_PYARROW:
        if _numbers(pyspark) >= since:
            if _numbers(pyarrow)[0] < least:
                problem = f"version {pyarrow} is too old for pyspark {pyspark}"
                remedy = f"install pyarrow {least} or later, as {stack} does"
                yield Finding("pyarrow", problem, remedy)
            if _numbers(pyspark)[:2] not in _TESTED_SPARKS:
                tested = ", ".join(".".join(map(str, each)) for each in _TESTED_SPARKS)
                problem = f"version {pyspark} was not tested"
                remedy = f"compare a small run with its replay, or use one of {tested}"
                yield Finding("pyspark", problem, remedy, prevents=False)
            return
    remedy = "install pyspark 3.5.9, as cerebro-hydra[petastorm] does, or 4.3, as "
    remedy += "cerebro-hydra[modern] does"
    yield Finding("pyspark", f"version {pyspark} is too old", remedy)


def check_slots(slots: Slots, num_workers: int, local: bool) -> Iterator[Finding]:
    """Find workers that would get no task slot; each holds one for as long as its run lasts."""
    if slots.free >= num_workers:
        return
    busy = slots.total >= num_workers
    first = slots.free if busy else slots.total
    missing = ", ".join(f"worker {k}" for k in range(first, min(first + 8, num_workers)))
    if num_workers > first + 8:
        missing += f" to worker {num_workers - 1}"
    problem = f"{num_workers} workers need {num_workers} slots and Spark has {slots.total}"
    if busy:
        held = slots.total - slots.free
        problem += f", but other jobs hold {held} of them; {missing} would wait for their end"
        remedy = "end other jobs that hold slots, or give Spark more of them"
    else:
        problem += f"; {missing} would wait for ever"
        enough = "more executors, or spark.executor.cores"
        if local:
            enough = f"local[{num_workers + 1},{MAX_FAILURES}]"
            enough = f"local_spark(workers={num_workers}) or {enough}"
        remedy = f"give Spark {num_workers} slots ({enough})"
        remedy += f", or set num_workers={slots.total}" if slots.total else ""
    yield Finding("task slots", problem, remedy)


def check_settings(settings: Mapping[str, str], num_workers: int) -> Iterator[Finding]:
    """Find settings of Spark that prevent a run of so many workers, or make it worse."""
    master = settings.get("spark.master", "")
    local = parse_local_master(master)
    failures = int(settings.get("spark.task.maxFailures", "4"))
    if local is not None and local.max_failures < 2:
        remedy = f"use 'local[{max(local.slots, num_workers)},{MAX_FAILURES}]'"
        remedy += f": {MAX_FAILURES} is the failures a task may have"
        problem = f"{master!r} retries no task, so an agent that can't start ends the run"
        yield Finding("spark.master", problem, remedy, prevents=False)
    if local is None and failures < MAX_FAILURES:
        survived = f"after {failures} failures of one worker, as when its executor is lost, all "
        survived += "agents begin anew"
        problem = survived if failures > 1 else "the first failure of a worker ends the run"
        remedy = f"set it to {MAX_FAILURES}"
        yield Finding("spark.task.maxFailures", problem, remedy, prevents=failures < 2)
    for setting, problem, prevents in _FALSE_IS_RIGHT:
        if settings.get(setting, "false").lower() == "true":
            yield Finding(setting, problem, "set it to false", prevents)
    if settings.get("spark.python.daemon.module") != DAEMON_MODULE:
        problem = "each agent loads torch anew, about a second when it starts and when it is "
        remedy = f"set it to {DAEMON_MODULE}, where executors have cerebro_hydra on their "
        yield Finding(
            "spark.python.daemon.module", problem + "replaced", remedy + "PYTHONPATH", False
        )
    if "spark.executor.pyspark.memory" in settings:
        problem = "it limits the address space of agents, which map files and libraries into it"
        remedy = "leave it unset, and let spark.executor.memoryOverhead be what agents need"
        yield Finding("spark.executor.pyspark.memory", problem, remedy, prevents=False)
    if (cpus := int(settings.get("spark.task.cpus", "1"))) > 1:
        problem = f"of {cpus} cores each, agents compute with threads_per_worker, which is 1"
        problem += " unless you give the backend another number"
        yield Finding("spark.task.cpus", problem, "let both be the same", prevents=False)


def check_gpus(settings: Mapping[str, str], devices: int | None) -> Iterator[Finding]:
    """Find settings that give agents no GPUs of their own although executors have some, or too few.

    Args:
        devices: how many devices an agent shall have; None if nobody has asked for any.
    """
    setting = "spark.task.resource.gpu.amount"
    per_executor = settings.get("spark.executor.resource.gpu.amount")
    per_task = gpus_per_task(settings)
    given = math.ceil(per_task)
    if devices is not None and 0 < given < devices:
        problem = f"tasks are given {given} GPU(s), and devices_per_worker is {devices}"
        yield Finding(setting, problem, f"set it to {devices}, or devices_per_worker to {given}")
    elif per_executor is not None and not given:
        problem = f"executors have {per_executor} GPU(s), and tasks are given none"
        yield Finding(setting, problem, "set it to 1", prevents=False)
    elif 0 < per_task < 1:
        problem = f"{per_task} lets several agents share a GPU"
        yield Finding(setting, problem, "set it to 1", prevents=False)


def gpus_per_task(settings: Mapping[str, str]) -> float:
    """Return how many GPUs Spark gives to each task, maybe a part of one."""
    return float(settings.get("spark.task.resource.gpu.amount", "0"))


def _numbers(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


class LocalMaster(NamedTuple):
    """Says what `local[...]` allows: task slots, and failures of a task before its job ends."""

    slots: int
    max_failures: int


class Slots(NamedTuple):
    """Says how many tasks a Spark can run at the same time, and how many more than it runs now."""

    total: int
    free: int


def parse_local_master(master: str) -> LocalMaster | None:
    """Read `local`, `local[N]` and `local[N,F]`, where N may be `*`; None for any other master."""
    if master == "local":
        return LocalMaster(1, 1)
    match = re.fullmatch(r"local\[\s*(\d+|\*)\s*(?:,\s*(\d+)\s*)?\]", master)
    if match is None:
        return None
    slots = (os.cpu_count() or 1) if match[1] == "*" else int(match[1])
    return LocalMaster(slots, int(match[2] or 1))


def count_slots(spark_context: SparkContext) -> Slots:
    """Count task slots (CPUs and GPUs considered), and those that no task of any job holds.

    Raises:
        SetupError: the SparkContext has been stopped.
    """
    if spark_context._jsc is None:
        raise SetupError(
            "this SparkContext was stopped while its slots were counted; give a new one"
        )
    scala_context = spark_context._jsc.sc()
    profile = scala_context.resourceProfileManager().defaultResourceProfile()
    total = int(scala_context.maxNumConcurrentTasks(profile))
    # The scheduler knows; what Spark's status tracker tells comes late and can be lost.
    running = scala_context.taskScheduler().runningTasksByExecutors().valuesIterator()
    held = 0
    while running.hasNext():
        held += int(running.next())
    return Slots(total, max(0, total - held))


def wait_for_slots(
    spark_context: SparkContext,
    needed: int,
    report: Callable[[str], None],
    patience: float = math.inf,
) -> Slots:
    """Wait until enough slots are free or none can be expected any more; return the last count.

    Args:
        needed: slots that shall be free.
        report: is given lines on what is waited for.
        patience: seconds to wait for other jobs to end.
    """
    local = parse_local_master(str(spark_context.master)) is not None
    age = time.time() - spark_context.startTime / 1000
    coming = 0.0 if local else _EXECUTORS_COME_SECONDS - age
    begun, said = time.monotonic(), 0
    while True:
        slots, waited = count_slots(spark_context), time.monotonic() - begun
        if not must_wait(slots, needed, waited, coming, patience):
            return slots
        if (line := waiting_line(slots, needed, waited, said)) is not None:
            said += 1
            report(line)
        time.sleep(_LOOK_SECONDS)


def must_wait(slots: Slots, needed: int, waited: float, coming: float, patience: float) -> bool:
    """Decide whether to go on waiting until `needed` slots are free.

    Args:
        waited: seconds since the wait began.
        coming: seconds from its beginning in which executors may still bring more slots.
        patience: seconds from its beginning in which other jobs may end.
    """
    return slots.free < needed and waited < (coming if slots.total < needed else patience)


def waiting_line(slots: Slots, needed: int, waited: float, said: int) -> str | None:
    """Return what to say after `said` lines; None until that is due, after 2, 4, 8, ... seconds."""
    if waited < _FIRST_LINE_SECONDS * 2**said:
        return None
    why = "other jobs hold the rest"
    if slots.total < needed:
        why = "executors that are still starting may bring more"
    elif slots.free:
        why += f"; end those, or set num_workers={slots.free}"
    counts = f"{needed} needed, {slots.total} there, {slots.free} free"
    return f"waiting for task slots for {waited:.0f} s: {counts}; {why}"
