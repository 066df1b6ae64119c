"""Settings under which agents would hang, die for good, or run twice; found before a run starts."""

from __future__ import annotations

import importlib.metadata
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cerebro_hydra.errors import SetupError
from cerebro_hydra.spark.java import parse_version, pip_java, supported_versions

if TYPE_CHECKING:
    from pyspark import SparkContext

# The least pyarrow that a Spark version's Arrow paths accept; ours is 14.
_LEAST_PYARROW = (((4, 2), 18), ((4, 1), 15), ((3, 5), 14))

# Seconds after its start that a session may take to get its executors on a busy cluster.
_EXECUTORS_COME_SECONDS = 60.0


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: which setting, what it leads to, what to set instead.

    `prevents` says whether a run would fail or hang; without it the finding is advice.
    """

    setting: str
    problem: str
    remedy: str
    prevents: bool = True

    def __str__(self) -> str:
        return f"{self.setting}: {self.problem}. Remedy: {self.remedy}"


class LocalMaster(NamedTuple):
    """What a `local[...]` master allows: task slots, and failures of a task before its job ends."""

    slots: int
    max_failures: int


def parse_local_master(master: str) -> LocalMaster | None:
    """Read `local`, `local[N]` and `local[N,F]`, where N may be `*`; None for any other master."""
    if master == "local":
        return LocalMaster(1, 1)
    match = re.fullmatch(r"local\[\s*(\d+|\*)\s*(?:,\s*(\d+)\s*)?\]", master)
    if match is None:
        return None
    slots = (os.cpu_count() or 1) if match[1] == "*" else int(match[1])
    return LocalMaster(slots, int(match[2] or 1))


def settings_findings(settings: Mapping[str, str], slots: int, num_workers: int) -> list[Finding]:
    """What in Spark's settings agents can't live with.

    Args:
        settings: Spark's configuration, `spark.master` included.
        slots: tasks that this Spark runs at the same time.
        num_workers: agents that shall run; each holds one slot for as long as the run lasts.
    """
    master = settings.get("spark.master", "")
    local = parse_local_master(master)
    found = []
    if slots < num_workers:
        missing = ", ".join(f"worker {k}" for k in range(slots, num_workers))
        enough = f"local_spark(workers={num_workers}) or local[{num_workers + 1},8]"
        found.append(
            Finding(
                "task slots",
                f"{num_workers} workers need {num_workers} slots and Spark has {slots}; "
                f"{missing} would wait for ever",
                f"give Spark {num_workers} slots ("
                + (enough if local else "more executors, or spark.executor.cores")
                + (f"), or set num_workers={slots}" if slots else ")"),
            )
        )
    if local is not None and local.max_failures < 2:
        found.append(
            Finding(
                "spark.master",
                f"{master!r} ends the whole job when the first agent is lost",
                f"use 'local[{max(slots, num_workers)},8]': 8 is the failures a task may have",
            )
        )
    if local is None and int(settings.get("spark.task.maxFailures", "4")) < 2:
        found.append(
            Finding(
                "spark.task.maxFailures",
                "1 ends the whole job when the first agent is lost",
                "set it to 8",
            )
        )
    for setting, problem in (
        ("spark.speculation", "Spark would start second copies of agents that run long"),
        ("spark.dynamicAllocation.enabled", "Spark would take executors away from waiting agents"),
    ):
        if settings.get(setting, "false").lower() == "true":
            found.append(Finding(setting, problem, "set it to false"))
    return found


def version_findings(pyspark: str, pyarrow: str) -> list[Finding]:
    """Whether this pair of versions can move data between Spark and agents."""
    for since, least in _LEAST_PYARROW:
        if _numbers(pyspark) >= since:
            if _numbers(pyarrow)[0] >= least:
                return []
            stack = "cerebro-hydra[modern]" if since > (4, 0) else "cerebro-hydra[petastorm]"
            return [
                Finding(
                    "pyarrow",
                    f"version {pyarrow} is too old for pyspark {pyspark}",
                    f"install pyarrow {least} or later, as {stack} does",
                )
            ]
    return [
        Finding(
            "pyspark",
            f"version {pyspark} is too old",
            "install pyspark 3.5.9, as cerebro-hydra[petastorm] does, or 4.3, as "
            "cerebro-hydra[modern] does",
        )
    ]


def _numbers(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def slots_of(spark_context: SparkContext) -> int:
    """How many tasks (CPUs and GPUs considered) this Spark can run at the same time, now."""
    scala_context = spark_context._jsc.sc()
    profile = scala_context.resourceProfileManager().defaultResourceProfile()
    return int(scala_context.maxNumConcurrentTasks(profile))


def wait_for_slots(spark_context: SparkContext, num_workers: int) -> int:
    """How many task slots there are, once executors that are still starting have come.

    A cluster starts executors after the session, which may be young.
    """
    local = parse_local_master(str(spark_context.master)) is not None
    ends = spark_context.startTime / 1000 + _EXECUTORS_COME_SECONDS
    while (slots := slots_of(spark_context)) < num_workers and not local and time.time() < ends:
        time.sleep(0.1)
    return slots


def java_of(spark_context: SparkContext) -> str:
    """The version of the Java that the driver runs on."""
    return str(spark_context._jvm.System.getProperty("java.version"))  # type: ignore[union-attr]


def java_findings(java: str, pyspark: str) -> list[Finding]:
    """Whether a Spark version runs whole on a Java: on a newer one `transform` fails."""
    suited = supported_versions(pyspark)
    if parse_version(java) in suited:
        return []
    wanted = " or ".join(map(str, sorted(suited)))
    problem = f"Spark {pyspark} does not run whole on Java {java}; it needs {wanted}"
    return [
        Finding(
            "Java", problem, f"pip install {pip_java(pyspark)}, or set JAVA_HOME to such a Java"
        )
    ]


def check(spark_context: SparkContext, num_workers: int) -> None:
    """Refuse a Spark whose settings, versions or executors agents can't live with.

    Raises:
        SetupError: lists everything that was found, each with its remedy.
    """
    pyspark = importlib.metadata.version("pyspark")
    found = java_findings(java_of(spark_context), pyspark)
    found += version_findings(pyspark, importlib.metadata.version("pyarrow"))
    settings = dict(spark_context.getConf().getAll())
    found += settings_findings(settings, wait_for_slots(spark_context, num_workers), num_workers)
    raise_findings(found)
    from cerebro_hydra.spark.meeting import meet, meeting_findings
    from cerebro_hydra.spark.probe import probe

    raise_findings(probe(spark_context, num_workers))
    raise_findings(meeting_findings(meet(spark_context, num_workers), num_workers))


def raise_findings(found: Sequence[Finding]) -> None:
    """Raise all that prevent a run as one SetupError, if there are any."""
    listed = [f"- {finding}" for finding in found if finding.prevents]
    if listed:
        raise SetupError("\n".join(["this Spark can't run agents:", *listed]))
