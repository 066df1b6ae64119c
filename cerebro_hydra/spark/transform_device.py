"""Chooses the device that a task of a transform computes on."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from cerebro_hydra.spark.agent_gpus import VISIBLE


def task_device() -> torch.device:
    """Return the GPU that Spark gave to this task, else one that is there, else the CPU."""
    from pyspark import TaskContext

    if not torch.cuda.is_available():
        return torch.device("cpu")
    context = TaskContext.get()
    given = context.resources().get("gpu") if context is not None else None
    task = context.partitionId() if context is not None else 0
    addresses = list(given.addresses) if given is not None else []
    allowed = os.environ.get(VISIBLE)
    return torch.device("cuda", gpu_index(addresses, torch.cuda.device_count(), task, allowed))


def gpu_index(addresses: Sequence[str], visible: int, task: int, allowed: str | None = None) -> int:
    """Return the index of the GPU that a task takes, of those that its process sees.

    Args:
        addresses: indices or uuids of the GPUs that Spark gave to the task; empty if it gave none.
        visible: how many GPUs the process sees, at least 1.
        task: the task's number; tasks without a GPU of their own take turns.
        allowed: the value of `CUDA_VISIBLE_DEVICES`, in whose order CUDA counts.
    """
    names = [name.strip() for name in (allowed or "").split(",")]
    if addresses and addresses[0] in names:
        return names.index(addresses[0]) % visible
    if addresses and addresses[0].isdecimal():
        # Where only the executor's own GPUs are visible, they are numbered from 0 again.
        return int(addresses[0]) % visible
    return task % visible
