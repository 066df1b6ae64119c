"""Measures the memory of a worker's processes beside the budgets that its user gave it."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cerebro_hydra import GridSearch, LocalStore, SparkEstimator, hp_choice
from cerebro_hydra.observe.records import AgentStarted, Decision, TrialAdmitted
from cerebro_hydra.plan.messages.events import SubEpochDone, WorkerJoined
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend

EVERY_SECONDS = 0.05
BATCH, STEPS, FEATURES, CLASSES = 16, 2, 48, 5
MIB = 1 << 20
FACTOR, BESIDE = 1.15, 32 * MIB
"""Of all budgets, and beside these: what the processes of a worker may have above their baseline."""

FROM, TO = 5, 200
"""The sub-epochs between which memory may not grow."""


def pss_of(pid: int) -> int:
    """Return the bytes of a process: its own, and its share of those that it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    line = next(each for each in lines if each.startswith("Pss:"))
    return int(line.split()[1]) << 10


def children_of(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and those that these have."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            yield child
            yield from children_of(child)


def of_worker(agent: int) -> dict[int, int]:
    """Return the bytes of each process of a worker; none while one of them comes or goes."""
    try:
        return {pid: pss_of(pid) for pid in (agent, *children_of(agent))}
    except (OSError, StopIteration):
        return {}


class Block(nn.TransformerEncoderLayer):
    def __init__(self, width: int) -> None:
        super().__init__(width, 4, 4 * width, 0.1, batch_first=True)


class Net(nn.Module):
    """A transformer over rows of eight tokens."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES // 8, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.last = nn.Linear(width, CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(self.blocks(self.first(features.unflatten(1, (8, -1)))).mean(1))
        return logits


def make(params: Mapping[str, Any], width: int, layers: int, cut: str) -> Any:
    """Return a transformer with AdamW, a shard for each layer."""
    model = Net(width, layers)
    return SparkEstimator(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=params["lr"]),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=BATCH,
        shards=[f"blocks.{number}" for number in range(layers)],
        cut=cut,
        recompute=True,
    )


def state_bytes(width: int, layers: int) -> int:
    """Return the bytes of parameters, gradients and both moments."""
    return 4 * sum(parameter.nbytes for parameter in Net(width, layers).parameters())


@dataclass
class Watch:
    """Samples the worker's memory from the moment at which its devices are there.

    Args:
        devices: how many it has.
    """

    devices: int
    baseline: dict[int, int] = field(default_factory=dict)  # by process
    peaks: list[int] = field(default_factory=list)  # of all processes, above it, by sub-epoch
    idle: int = 0  # above it, at the end
    state: int = 0
    _agent: int = 0
    _peak: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)

    def on_record(self, record: object) -> None:
        if isinstance(record, AgentStarted):
            self._agent = record.pid
        elif isinstance(record, TrialAdmitted):
            self.state = record.spec.nbytes
        elif isinstance(record, Decision) and isinstance(record.event, WorkerJoined):
            self._wait_for_devices()  # the run goes on after this
            threading.Thread(target=self._sample, daemon=True).start()
        elif isinstance(record, Decision) and isinstance(record.event, SubEpochDone):
            with self._lock:
                self.peaks.append(self._peak)
                self._peak = 0

    def close(self) -> None:
        self._over.set()

    def _wait_for_devices(self) -> None:
        """Wait until the devices have started, and have all that they have before a trial."""
        before: dict[int, int] = {}
        while True:
            time.sleep(1.0)
            found = of_worker(self._agent)
            same = found.keys() == before.keys()
            grown = sum(abs(found[pid] - before[pid]) for pid in found) if same else math.inf
            if len(found) > self.devices + 1 and grown < MIB:  # beside agent and server of forks
                self.baseline = found
                return
            before = found

    def _sample(self) -> None:
        baseline = sum(self.baseline.values())
        while not self._over.wait(EVERY_SECONDS):
            if found := of_worker(self._agent):
                with self._lock:
                    self._peak = max(self._peak, sum(found.values()) - baseline)


@dataclass(frozen=True)
class Figures:
    """Holds what a run showed, in MiB."""

    cut: str
    trials: int
    devices: int
    state: float
    device_memory: float
    host_memory: float
    promised: float  # FACTOR x (devices x device_memory + host_memory) + BESIDE
    baseline: list[float]  # of each process, the agent's first
    peak_of_20: float  # of all processes above it, over the first 20 sub-epochs
    peak_of_5: float  # in the 5th and those around it
    peak_of_last: float  # in as many at the end
    sub_epochs: int


def measured(asked: argparse.Namespace) -> Figures:
    random = np.random.default_rng(3)
    rows = BATCH * STEPS
    features = random.normal(size=(rows + BATCH, FEATURES)).astype(np.float32)
    data = Arrays({"features": features, "label": random.integers(0, CLASSES, len(features))})
    watch = Watch(asked.devices)
    state = state_bytes(asked.width, asked.layers)
    device_memory, host_memory = state // asked.share, int(asked.host * state)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        search = GridSearch(
            backend=LocalBackend(
                1, devices_per_worker=asked.devices,
                device_memory=device_memory, host_memory=host_memory,
            ),
            store=LocalStore(f"{folder}/store"),
            estimator_gen_fn=partial(make, width=asked.width, layers=asked.layers, cut=asked.cut),
            search_space={"lr": hp_choice([1e-4 * (n + 1) for n in range(asked.trials)])},
            num_epochs=math.ceil(asked.sub_epochs / asked.trials),
            evaluation_metric="accuracy",
            validation=BATCH / len(features),
            seed=5,
            verbose=asked.verbose,
            observers=[watch],
        )  # fmt: skip
        search.fit(data)  # type: ignore[arg-type]  # what LocalBackend takes for a DataFrame
    if asked.verbose: print([round(p/MIB) for p in watch.peaks])
    around = 2 * asked.trials  # whichever of them is under way
    promised = FACTOR * (asked.devices * device_memory + host_memory) + BESIDE
    agent = [pss for _, pss in sorted(watch.baseline.items())]
    return Figures(
        asked.cut, asked.trials, asked.devices,
        *(round(n / MIB, 1) for n in (state, device_memory, host_memory, promised)),
        [round(n / MIB, 1) for n in agent],
        *(round(max(peaks) / MIB, 1) for peaks in (
            watch.peaks[:20], watch.peaks[FROM - 1 : FROM - 1 + around], watch.peaks[-around:])),
        len(watch.peaks),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("trials", 3), ("devices", 2), ("share", 4), ("sub-epochs", 20), ("width", 256),
        ("layers", 12), ("verbose", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--host", type=float, default=2.0, help="host_memory, in states")
    parser.add_argument("--cut", default="modules")
    parser.add_argument("--folder", help="where store and scratch lie; default: temporary files")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: a small net")
    asked = parser.parse_args()
    if asked.quick:
        asked.trials, asked.width, asked.layers, asked.sub_epochs = 2, 64, 4, 4
    print(json.dumps(asdict(measured(asked)), indent=1))


if __name__ == "__main__":
    main()
