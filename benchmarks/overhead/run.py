"""Measures what shard queues cost where nothing is spilled: one device that holds the trial."""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from benchmarks.cut_overhead.run import Bert
from benchmarks.demo_net import demo_net
from benchmarks.spill.trial import MemoryTrial
from cerebro_hydra.agent.device.process import OwnDevice
from cerebro_hydra.agent.device.task_watch import TaskWatch
from cerebro_hydra.agent.memory.fetch import FetchManager
from cerebro_hydra.agent.memory.pool import BufferPool, Slabs
from cerebro_hydra.agent.memory.segment_store import SegmentStore
from cerebro_hydra.agent.memory.shard_store import Shard, ShardStore
from cerebro_hydra.agent.trainer import Trainer
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.pick import sharp
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.testing.queue_worker import ME, QueueWorker, train

CLAIM = 1.02
MEMORY = 4 << 30


def recipe_of(model: nn.Module, batch_size: int, shards: int) -> Recipe:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss = nn.CrossEntropyLoss()
    return Recipe(model, optimizer, loss, batch_size=batch_size, shards=shards, cut="modules")


def bert(shards: int) -> MemoryTrial:
    random = np.random.default_rng(0)
    return MemoryTrial(
        lambda params: recipe_of(Bert(), 8, shards),
        {
            "input_ids": random.integers(0, 4096, (8 * 4, 64)),
            "attention_mask": np.ones((8 * 4, 64), np.int64),
        },
        {"label": random.integers(0, 2, 8 * 4)},
    )


def net(shards: int, steps: int = 100) -> MemoryTrial:
    random = np.random.default_rng(0)
    rows = 64 * steps
    return MemoryTrial(
        lambda params: recipe_of(demo_net(), 64, shards),
        {"x": random.normal(size=(rows, 64)).astype(np.float32)},
        {"label": random.integers(0, 10, rows)},
    )


CASES: dict[str, tuple[Callable[[int], MemoryTrial], Sequence[int], int]] = {
    "net 64-1060-1060-10, 100 steps of 64 rows": (net, (1, 3), 20),
    "BERT, 8 layers of 256, 4 steps of 8 x 64": (bert, (1, 4), 15),
}
"""What makes a trial, into how many shards, and how many rounds."""
QUICK = {"net 64-1060-1060-10, 10 steps of 64 rows": (partial(net, steps=10), (1, 3), 2)}


class Agent:
    """Trains as an agent does by default: on this thread, every shard in memory."""

    def __init__(self, trial: MemoryTrial) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            store = ShardStore(SegmentStore(MEMORY, scratch, BufferPool()))
        self._reported: queue.SimpleQueue[Any] = queue.SimpleQueue()
        nobody: Any = None
        self._trainer = Trainer(
            ME,
            trial.builder(),
            store,
            FetchManager(ME, store, nobody, nobody, lambda number, visit: None),
            self._reported.put,
            lambda record: None,
            lambda attempt: None,
            TaskWatch(None, None, print, print),
        )
        self._trainer.start()
        self._trainer.learn(trial.spec(None))
        state = store.expect(0, 0, len(trial.initial))
        for number, segments in enumerate(trial.initial):
            named = {name: (digest(content), content) for name, content in segments.items()}
            store.put(state, number, Shard(named, {}))

    def train(self, visit: int) -> Any:
        self._trainer.accept(visit)
        self._trainer.perform(train(visit, 0, visit), None)
        self._trainer.drop(0, visit - 1)
        while isinstance(report := self._reported.get(), events.SubEpochEnding):
            pass
        return report

    def close(self) -> None:
        self._trainer.close()


class Queues:
    """Trains in shard queues, on one device of this process."""

    def __init__(self, trial: MemoryTrial) -> None:
        def start(slabs: Slabs, on_answer: Any, on_gone: Any) -> OwnDevice:
            return OwnDevice(
                trial.opener(), True, sys.exit, lambda attempt: None, on_answer, on_gone
            )

        self._worker = QueueWorker(
            start,
            WorkerState([None], None, sharp),
            None,
            trial.rows,
            lambda number: trial.spec(None),
        )
        self._worker.put(0, 0, trial.initial)

    def train(self, visit: int) -> Any:
        self._worker.perform(train(visit, 0, visit))
        result = self._worker.result()
        self._worker.trainer.drop(0, visit - 1)
        return result

    def close(self) -> None:
        self._worker.close()


@dataclass(frozen=True)
class Figure:
    """Holds the ratios of queues over the agent's own training, over rounds."""

    case: str
    shards: int
    agent_ms: float  # CPU time of a sub-epoch
    cpu: tuple[float, float, float]  # quartiles
    wall: tuple[float, float, float]
    faults: tuple[float, float]  # page faults of a sub-epoch: agent, queues
    load: float


def measure(name: str, make: Callable[[int], MemoryTrial], shards: int, rounds: int) -> Figure:
    trial = make(shards)
    variants: list[Agent | Queues] = [Agent(trial), Queues(trial)]
    cpu: list[list[float]] = [[], []]
    wall: list[list[float]] = [[], []]
    faults: list[list[int]] = [[], []]
    digests = []
    for visit in range(1, rounds + 3):  # the first two warm up
        for at in (visit % 2, 1 - visit % 2):
            before, begun, clock = page_faults(), time.process_time(), time.perf_counter()
            result = variants[at].train(visit)
            wall[at].append(time.perf_counter() - clock)
            cpu[at].append(time.process_time() - begun)
            faults[at].append(page_faults() - before)
            digests.append(result.digests)
        if digests[-1] != digests[-2]:
            raise RuntimeError("queues and agent have trained different bits")
    for variant in variants:
        variant.close()
    return Figure(
        name, len(trial.initial), 1000 * statistics.median(cpu[0][2:]), ratios(cpu), ratios(wall),
        (statistics.mean(faults[0][2:]), statistics.mean(faults[1][2:])), os.getloadavg()[0],
    )  # fmt: skip


def ratios(taken: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the quartiles of the second over the first, round by round."""
    agent, queues = (each[2:] for each in taken)
    lower, median, upper = statistics.quantiles(
        [ours / theirs for theirs, ours in zip(agent, queues, strict=True)], n=4
    )
    return lower, median, upper


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def row(f: Figure) -> str:
    verdict = "held" if f.cpu[1] <= CLAIM else "NOT held"
    cpu, wall = (f"{a:.3f} | **{b:.3f}** | {c:.3f}" for a, b, c in (f.cpu, f.wall))
    return (
        f"| {f.case} | {f.shards} | {f.agent_ms:.0f} | {cpu} | {wall} "
        f"| {f.faults[0]:.0f} / {f.faults[1]:.0f} | {CLAIM:.2f} {verdict} | {f.load:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--case", help="only cases whose name has this in it")
    parser.add_argument("--rounds", type=int, help="how many rounds, for every case")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: the net")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}\n"
        "| model | shards | agent, ms CPU | quartile | CPU time | quartile | quartile | wall time "
        "| quartile | page faults, agent / queues | claim | load |"
    )
    print("| --- " * 12 + "|", flush=True)
    figures = []
    for name, (make, numbers, rounds) in (QUICK if arguments.quick else CASES).items():
        if arguments.case is None or arguments.case in name:
            for shards in numbers:
                figures.append(measure(name, make, shards, arguments.rounds or rounds))
                print(row(figures[-1]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(f) for f in figures], indent=2) + "\n")


if __name__ == "__main__":
    main()
