"""What a session could do better, or can't do: facts in, findings out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cerebro_hydra.spark.checks import Finding, parse_local_master
from cerebro_hydra.spark.meeting import Attendance
from cerebro_hydra.spark.session import DAEMON_MODULE, MAX_FAILURES

LEAST_SCRATCH = 1 << 30
"""Bytes of scratch below which a worker is warned of: it decodes its partitions there."""


def advice_findings(settings: Mapping[str, str]) -> list[Finding]:
    """Settings that a run survives, but that make it slower or easier to lose."""
    found = []

    def advise(setting: str, problem: str, remedy: str) -> None:
        found.append(Finding(setting, problem, remedy, prevents=False))

    failures = int(settings.get("spark.task.maxFailures", "4"))
    local = parse_local_master(settings.get("spark.master", ""))
    if local is None and 2 <= failures < MAX_FAILURES:
        advise(
            "spark.task.maxFailures",
            f"a worker may be lost {failures - 1} times in a run, then the run ends",
            f"set it to {MAX_FAILURES}",
        )
    if settings.get("spark.python.daemon.module") != DAEMON_MODULE:
        advise(
            "spark.python.daemon.module",
            "each agent loads torch anew, about a second when it starts and when it is replaced",
            f"set it to {DAEMON_MODULE}, where executors have cerebro_hydra on their PYTHONPATH",
        )
    if settings.get("spark.excludeOnFailure.enabled", "false").lower() == "true":
        advise(
            "spark.excludeOnFailure.enabled",
            "Spark would no longer use an executor where agents were lost",
            "set it to false",
        )
    if "spark.executor.pyspark.memory" in settings:
        advise(
            "spark.executor.pyspark.memory",
            "it limits the address space of agents, which map files and libraries into it",
            "leave it unset, and let spark.executor.memoryOverhead be what agents need",
        )
    cpus = int(settings.get("spark.task.cpus", "1"))
    if cpus > 1:
        advise("spark.task.cpus", f"agents compute with one of {cpus} cores each", "set it to 1")
    return found


def gpu_findings(settings: Mapping[str, str]) -> list[Finding]:
    """Whether Spark's settings give each agent GPUs of its own."""
    per_executor = settings.get("spark.executor.resource.gpu.amount")
    per_task = settings.get("spark.task.resource.gpu.amount")
    name = "spark.task.resource.gpu.amount"
    if per_executor is not None and float(per_task or 0) == 0:
        problem = f"executors have {per_executor} GPU(s), and tasks are given none"
        return [Finding(name, problem, "set it to 1", prevents=False)]
    if per_task is not None and 0 < float(per_task) < 1:
        problem = f"{per_task} lets several agents share a GPU"
        return [Finding(name, problem, "set it to 1", prevents=False)]
    return []


def placement_findings(attendances: Sequence[Attendance], local: bool) -> list[Finding]:
    """Which workers would share what they should have alone, or have little disk.

    Args:
        attendances: what each worker's task found.
        local: the master is `local[...]`, where all share the one executor.
    """
    found = []
    executors: dict[tuple[str, int], list[int]] = {}
    gpus: dict[tuple[str, str], list[int]] = {}
    for a in attendances:
        executors.setdefault((a.host, a.executor), []).append(a.worker)
        for gpu in a.gpus:
            gpus.setdefault((a.host, gpu), []).append(a.worker)
    for (host, _), workers in executors.items():
        if len(workers) > 1 and not local:
            problem = f"workers {_listed(workers)} share one executor; losing it loses them all"
            remedy = "set spark.executor.cores to spark.task.cpus: one agent per executor"
            found.append(Finding(f"executor on {host}", problem, remedy, prevents=False))
    for (host, gpu), workers in gpus.items():
        if len(workers) > 1:
            problem = f"workers {_listed(workers)} share GPU {gpu}"
            remedy = "set spark.task.resource.gpu.amount to 1"
            found.append(Finding(f"executor on {host}", problem, remedy, prevents=False))
    for a in attendances:
        if a.free_scratch < LEAST_SCRATCH:
            problem = f"worker {a.worker} has {a.free_scratch / 2**20:.0f} MiB for decoded rows"
            remedy = "free space there, or set spark.local.dir to a larger disk"
            found.append(Finding(f"executor on {a.host}", problem, remedy, prevents=False))
    return found


def _listed(workers: Sequence[int]) -> str:
    return " and ".join(map(str, sorted(workers)))
