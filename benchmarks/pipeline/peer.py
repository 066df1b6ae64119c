"""Seconds of a step with plain PyTorch in one process, or torch.distributed.pipelining in two.

A process per stage, each with one thread and one CPU, that talk by gloo; the same rows as ours.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.pipeline.nets import CLASSES, TOKENS, VOCABULARY, Net

STAGES = 2
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LR = 1e-3


@dataclass(frozen=True)
class Case:
    """Says what a step is: a model, and its microbatches of so many rows each."""

    model: str
    layers: int
    batch: int
    microbatches: int

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features, shape (rows, TOKENS), and labels of a step."""
        rows = self.batch * self.microbatches
        return torch.randint(VOCABULARY, (rows, TOKENS)), torch.randint(CLASSES, (rows,))


def plain_seconds(case: Case, steps: int) -> float:
    """Return the seconds of a step that accumulates gradients in one process."""
    return _in_processes(1, _plain, case, steps)


def pipelined_seconds(schedule: str, case: Case, steps: int) -> float:
    """Return the seconds of a step in a pipeline of two processes."""
    return _in_processes(STAGES, _stage, _free_port(), schedule, case, steps)


def _in_processes(number: int, work: Callable[..., None], *given: Any) -> float:
    context = mp.get_context("spawn")
    told = context.SimpleQueue()
    mp.spawn(work, (told, *given), nprocs=number)
    return statistics.median(told.get())


def _timed(steps: int, step: Callable[[], object]) -> list[float]:
    """Return the seconds of each step after the first."""
    taken = []
    for _ in range(steps + 1):
        begun = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begun)
    return taken[1:]


def _plain(rank: int, told: Any, case: Case, steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, loss = Net(case.model, case.layers), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    batches = [*zip(*(rows.split(case.batch) for rows in case.rows()), strict=True)]

    def step() -> None:
        for inputs, targets in batches:
            (loss(net(inputs), targets) / case.microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()

    told.put(_timed(steps, step))


def _stage(rank: int, told: Any, port: int, schedule: str, case: Case, steps: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=STAGES, timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    parts = Net(case.model, case.layers).parts
    mine = parts[: len(parts) // STAGES] if rank == 0 else parts[len(parts) // STAGES :]
    optimizer = torch.optim.AdamW(mine.parameters(), lr=LR)
    stage = PipelineStage(mine, rank, STAGES, torch.device("cpu"))
    pipeline = SCHEDULES[schedule](stage, case.microbatches, loss_fn=nn.CrossEntropyLoss())
    features, labels = case.rows()

    def step() -> None:
        if rank == 0:
            pipeline.step(features)
        else:
            pipeline.step(target=labels)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()

    taken = _timed(steps, step)
    if rank == 0:
        told.put(taken)
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
