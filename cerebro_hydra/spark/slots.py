"""Counts task slots: how many a Spark has, how many are free; waits for them."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from cerebro_hydra.errors import SetupError

if TYPE_CHECKING:
    from pyspark import SparkContext

_EXECUTORS_COME_SECONDS = 60.0  # from a session's start; a busy cluster takes its time
_FIRST_LINE_SECONDS = 2.0
_LOOK_SECONDS = 0.1


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
