"""Measures the memory of a worker's processes beside the budgets that its user gave it."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cerebro_hydra import GridSearch, LocalStore, SparkEstimator, hp_choice
from cerebro_hydra.observe.records import AgentStarted, Decision
from cerebro_hydra.plan.messages.events import SubEpochDone, WorkerJoined
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend

EVERY_SECONDS = 0.05
BATCH, STEPS, FEATURES, CLASSES = 16, 2, 48, 5
MIB = 1 << 20
FACTOR, BESIDE = 1.15, 32 * MIB
"""Of all budgets, and beside these: what a worker's processes may have above their baseline."""

FIRST = 5
"""The sub-epoch from which on memory may not grow."""


def pss_of(pid: int) -> int:
    """Return the bytes of a process: its own, and its share of those that it shares.

    Pages of libraries are left out: its share of them grows when any other program of the machine
    that has them ends.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    counted = [each for each in lines if each.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    return sum(int(each.split()[1]) << 10 for each in counted)


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


def block(width: int) -> nn.Module:
    """Return a layer of the net."""
    return nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)


class Net(nn.Module):
    """A transformer over rows of eight tokens."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES // 8, width)
        self.blocks = nn.Sequential(*(block(width) for _ in range(layers)))
        self.last = nn.Linear(width, CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        tokens = self.blocks(self.first(features.unflatten(1, (8, -1))))
        logits: torch.Tensor = self.last(tokens.mean(1))
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
    peaks: list[dict[int, int]] = field(default_factory=list)  # above it, of each sub-epoch
    _agent: int = 0
    _peak: dict[int, int] = field(default_factory=dict)  # by process, when their sum was highest
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)

    def on_record(self, record: object) -> None:
        if isinstance(record, AgentStarted):
            self._agent = record.pid
        elif isinstance(record, Decision) and isinstance(record.event, WorkerJoined):
            self._wait_for_devices()  # the run goes on after this
            threading.Thread(target=self._sample, daemon=True).start()
        elif isinstance(record, Decision) and isinstance(record.event, SubEpochDone):
            with self._lock:
                self.peaks.append(self._peak)
                self._peak = {}

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
        while not self._over.wait(EVERY_SECONDS):
            if found := of_worker(self._agent):
                above = {pid: pss - self.baseline.get(pid, 0) for pid, pss in found.items()}
                with self._lock:
                    self._peak = max(self._peak, above, key=lambda each: sum(each.values()))


@dataclass(frozen=True)
class Sizes:
    """Says what is measured.

    Args:
        share: of a trial's training state, the part that the budget of a device is one of.
        host: host_memory, in such states.
    """

    trials: int = 3
    devices: int = 2
    share: int = 4
    host: float = 2.0
    sub_epochs: int = 20
    width: int = 256
    layers: int = 12
    cut: str = "modules"


@dataclass(frozen=True)
class Figures:
    """Holds what a run showed, in MiB.

    Args:
        promised: FACTOR x (devices x device_memory + host_memory) + BESIDE.
        baseline: of each process, the agent's first.
        peak: of all processes above that, in the first 20 sub-epochs.
        early: in the 5th and some after it.
        late: in as many at the end.
        course: of each process at the highest sum in every 20 sub-epochs, the agent's first.
    """

    sizes: Sizes
    state: float
    device_memory: float
    host_memory: float
    promised: float
    baseline: list[int]
    peak: float
    early: float
    late: float
    course: list[list[float]]


def measured(sizes: Sizes, parent: str | None = None, verbose: int = 0) -> Figures:
    """Train the trials on one worker; files lie in a folder of the parent meanwhile."""
    random = np.random.default_rng(3)
    rows = BATCH * (STEPS + 1)
    features = random.normal(size=(rows, FEATURES)).astype(np.float32)
    data = Arrays({"features": features, "label": random.integers(0, CLASSES, rows)})
    watch = Watch(sizes.devices)
    state = state_bytes(sizes.width, sizes.layers)
    device_memory, host_memory = state // sizes.share, int(sizes.host * state)
    net: dict[str, Any] = {"width": sizes.width, "layers": sizes.layers, "cut": sizes.cut}
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        search = GridSearch(
            backend=LocalBackend(
                1,
                devices_per_worker=sizes.devices,
                device_memory=device_memory,
                host_memory=host_memory,
            ),
            store=LocalStore(f"{folder}/store"),
            estimator_gen_fn=partial(make, **net),
            search_space={"lr": hp_choice([1e-4 * (n + 1) for n in range(sizes.trials)])},
            num_epochs=math.ceil(sizes.sub_epochs / sizes.trials),
            evaluation_metric="accuracy",
            validation=BATCH / rows,
            seed=5,
            verbose=verbose,
            observers=[watch],
        )
        search.fit(data)  # type: ignore[arg-type]  # what LocalBackend takes for a DataFrame
    around = 3 * sizes.trials  # whichever of them are under way
    promised = FACTOR * (sizes.devices * device_memory + host_memory) + BESIDE

    def highest(peaks: list[dict[int, int]]) -> dict[int, int]:
        return max(peaks, key=lambda each: sum(each.values()))

    def most(peaks: list[dict[int, int]]) -> float:
        return round(sum(highest(peaks).values()) / MIB, 1)

    twenties = [watch.peaks[at : at + 20] for at in range(0, len(watch.peaks), 20)]

    return Figures(
        sizes,
        state=round(state / MIB, 1),
        device_memory=round(device_memory / MIB, 1),
        host_memory=round(host_memory / MIB, 1),
        promised=round(promised / MIB, 1),
        baseline=[round(pss / MIB) for _, pss in sorted(watch.baseline.items())],
        peak=most(watch.peaks[:20]),
        early=most(watch.peaks[FIRST - 1 : FIRST - 1 + around]),
        late=most(watch.peaks[-around:]),
        course=[
            [round(pss / MIB, 1) for _, pss in sorted(highest(each).items())] for each in twenties
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for each in fields(Sizes):
        kind = type(each.default)
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=kind, default=each.default)
    parser.add_argument("--verbose", type=int, default=0)
    parser.add_argument("--folder", help="where store and scratch lie; default: temporary files")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: a small net")
    asked = parser.parse_args()
    sizes = Sizes(**{each.name: getattr(asked, each.name) for each in fields(Sizes)})
    if asked.quick:
        sizes = Sizes(trials=2, share=1, width=64, layers=4, sub_epochs=8)
    print(json.dumps(asdict(measured(sizes, asked.folder, asked.verbose)), indent=1))


if __name__ == "__main__":
    main()
