"""Pins an agent to the GPUs that Spark gave its task, and asks what memory they have."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from cerebro_hydra.agent.device.visible_gpus import BY_BUS, LEAST_RESERVED, ORDER, VISIBLE, reserved
from cerebro_hydra.errors import SetupError
from cerebro_hydra.spark.findings import Finding
from cerebro_hydra.spark.places import environment

# What this process's CUDA was started with by an earlier agent; it can't be started again.
_started_with: str | None = None

_REMEDY = "see nvidia-smi there, and install a torch that is built for its CUDA"
_SECONDS = 120.0  # in which torch is loaded and CUDA started, on a machine with much to do
_ASK = """
import json, torch
memory = [torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, memory]))
"""


def visible(addresses: Sequence[str], allowed: str | None) -> str:
    """Return the value of `CUDA_VISIBLE_DEVICES` that shows a task its GPUs.

    Args:
        addresses: the names that Spark's discovery script gave them: indices by bus, or uuids.
        allowed: the value of `CUDA_VISIBLE_DEVICES` that the cluster set; None if it set none.

    Raises:
        SetupError: the cluster allows other GPUs than Spark gives.
    """
    if allowed is not None:
        names = [name.strip() for name in allowed.split(",")]
        for address in addresses:
            if address not in names:
                raise SetupError(
                    f"Spark gave this task GPU {address!r}, but {VISIBLE} is {allowed!r}, which "
                    "lacks it; let the discovery script print what that variable lists, as "
                    "cerebro-hydra-gpus does"
                )
    return ",".join(addresses)


@contextmanager
def pinned(addresses: Sequence[str]) -> Iterator[None]:
    """Show CUDA only these GPUs, if there are any, and restore the environment afterwards.

    CUDA reads its variables once in a process, and Spark reuses Python workers. A worker whose
    CUDA was started for other GPUs is given up: the error ends it, and Spark starts the agent
    again in another one.

    Raises:
        SetupError: the cluster allows other GPUs, or CUDA was started for others here.
    """
    global _started_with
    if not addresses:
        yield
        return
    wanted = visible(addresses, os.environ.get(VISIBLE))
    if _cuda_has_started() and _started_with != wanted:
        raise SetupError(
            f"CUDA was started in this Python worker with {VISIBLE}={_started_with!r}, and this "
            f"agent has GPU {wanted!r}; Spark will start it again in another worker"
        )
    try:
        with environment(**{VISIBLE: wanted, ORDER: BY_BUS}):
            yield
    finally:
        if _cuda_has_started():
            _started_with = wanted


def _cuda_has_started() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


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
    command = [sys.executable, "-P", "-c", _ASK]
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
    return max(0, free - reserved(total))


def check_gpu_facts(workers: Sequence[GpuFacts]) -> Iterator[Finding]:
    """Find, once per host, workers whose GPUs can't be used."""
    wrong = {(each.host, each.problem, each.remedy) for each in workers if each.problem}
    for host, problem, remedy in sorted(wrong):
        yield Finding(f"executor on {host}", problem, remedy)
    for host in sorted({each.host for each in workers if 0 in each.memory}):
        problem = f"a GPU has no memory left beside {LEAST_RESERVED >> 30} GiB that kernels need"
        yield Finding(f"executor on {host}", problem, "end what else uses it")
