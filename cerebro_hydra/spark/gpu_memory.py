"""Asks torch in each worker's task what the GPUs there have, in a process that ends after that."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cerebro_hydra.errors import SetupError
from cerebro_hydra.spark.agent_gpus import BY_BUS, ORDER, VISIBLE, visible
from cerebro_hydra.spark.findings import Finding

RESERVED_SHARE = 0.1
"""The share of a GPU that is left for what kernels take and for gaps between tensors."""

LEAST_RESERVED = 1 << 30
"""Bytes that are left for that on any GPU."""

_REMEDY = "see nvidia-smi there, and install a torch that is built for its CUDA"

_SECONDS = 120.0  # in which torch is loaded and CUDA started, on a machine with much to do

_ASK = """
import json, torch
memory = [torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, memory]))
"""


class GpuFacts(NamedTuple):
    """Holds what one worker's task found: bytes of each of its GPUs, or what is wrong there."""

    host: str
    memory: tuple[int, ...]
    problem: str = ""
    remedy: str = _REMEDY


def gpu_facts(_: object = None) -> GpuFacts:
    """Return the bytes that shards and tasks may have on each GPU of this task."""
    from pyspark import TaskContext

    gpus = TaskContext.get().resources().get("gpu")  # type: ignore[union-attr]
    addresses = list(gpus.addresses) if gpus else []
    return ask(addresses, os.environ.get(VISIBLE))


def ask(addresses: Sequence[str], allowed: str | None) -> GpuFacts:
    """Return what torch says of these GPUs.

    Args:
        addresses: those that Spark gave to the task.
        allowed: the value of `CUDA_VISIBLE_DEVICES` that the cluster set; None if it set none.
    """
    host = socket.gethostname()
    if not addresses:
        return GpuFacts(host, (), "Spark gave its task no GPU")
    try:
        shown = visible(addresses, allowed)
    except SetupError as error:
        problem, _, remedy = str(error).partition("; ")
        return GpuFacts(host, (), problem, remedy)
    environment = {**os.environ, VISIBLE: shown, ORDER: BY_BUS}
    command = [sys.executable, "-c", _ASK]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return GpuFacts(host, (), f"CUDA did not start in {_SECONDS:.0f} s")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return GpuFacts(host, (), f"CUDA does not start: {said[-1]}")
    version, memory = json.loads(done.stdout.splitlines()[-1])  # others may have printed before
    if len(memory) < len(addresses):
        named, found = ", ".join(addresses), len(memory)
        why = f"it was given GPU {named}, and torch {version} finds {found} of them"
        return GpuFacts(host, (), why)
    return GpuFacts(host, tuple(usable(*each) for each in memory))


def usable(free: int, total: int) -> int:
    """Return the bytes of a GPU that shards and tasks may have, where CUDA has been started."""
    return max(0, free - max(LEAST_RESERVED, int(total * RESERVED_SHARE)))


def check_gpu_facts(workers: Sequence[GpuFacts]) -> Iterator[Finding]:
    """Find, once per host, workers whose GPUs can't be used."""
    wrong = {(each.host, each.problem, each.remedy) for each in workers if each.problem}
    for host, problem, remedy in sorted(wrong):
        yield Finding(f"executor on {host}", problem, remedy)
    for host in sorted({each.host for each in workers if 0 in each.memory}):
        problem = f"a GPU has no memory left beside {LEAST_RESERVED >> 30} GiB that kernels need"
        yield Finding(f"executor on {host}", problem, "end what else uses it")
