"""Measures the memory of agents: the peak of each over the state of one trial."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import threading
from collections.abc import Mapping
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
from cerebro_hydra.plan.messages.instructions import FinishRun
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend

EVERY_SECONDS = 0.05
FEATURES, CLASSES = 64, 10
KINDS = ("Rss", "Pss", "Pss_Anon")


def memory_of(pid: int | str) -> dict[str, int]:
    """Return the bytes of a process by kind, its share of pages that it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = dict(line.split(":") for line in lines)
    return {kind: int(found[kind].split()[0]) * 1024 for kind in KINDS}


def make(params: Mapping[str, Any], width: int, layers: int, shards: int) -> Any:
    """Return a net with AdamW."""
    net: list[nn.Module] = [nn.Linear(FEATURES, width), nn.ReLU()]
    for _ in range(layers):
        net += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*net, nn.Linear(width, CLASSES))
    return SparkEstimator(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=params["lr"]),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=64,
        shards=shards,
    )


@dataclass
class Watch:
    """Samples each agent's memory, from its decoded rows to the end of the run."""

    before: dict[int, dict[str, int]] = field(default_factory=dict)  # by process id
    peaks: dict[int, dict[str, int]] = field(default_factory=dict)  # by process id
    pids: dict[int, int] = field(default_factory=dict)  # by worker
    state_bytes: int = 0
    sub_epochs: list[float] = field(default_factory=list)
    hops: list[tuple[int, float]] = field(default_factory=list)  # bytes, seconds
    began: float = 0.0
    ended: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)

    def on_record(self, record: object) -> None:
        if isinstance(record, TrialAdmitted):
            self.state_bytes = max(self.state_bytes, record.spec.nbytes)
        elif isinstance(record, AgentStarted):
            self.pids[record.worker] = record.pid
        elif isinstance(record, Decision):
            self.began = self.began or record.time
            if isinstance(record.event, WorkerJoined):
                pid = self.pids[record.event.worker]
                self.before[pid] = memory_of(pid)
                threading.Thread(target=self._sample, args=(pid,), daemon=True).start()
            if isinstance(record.event, SubEpochDone):
                self.sub_epochs.append(record.event.seconds)
                if record.event.hop.bytes_moved:
                    self.hops.append((record.event.hop.bytes_moved, record.event.hop.seconds))
            if any(isinstance(each, FinishRun) for each in record.instructions):
                self.ended = record.time
                self._over.set()

    def multiples(self, pid: int) -> dict[str, float]:
        """Return the peaks of a process above its start, in states of one trial."""
        before, peak = self.before[pid], self.peaks[pid]
        return {kind: round((peak[kind] - before[kind]) / self.state_bytes, 2) for kind in KINDS}

    def close(self) -> None:
        self._over.set()

    def _sample(self, pid: int) -> None:
        peak = self.peaks.setdefault(pid, dict.fromkeys(KINDS, 0))
        while not self._over.wait(EVERY_SECONDS):
            try:
                found = memory_of(pid)
            except (OSError, ValueError):
                return
            for kind, nbytes in found.items():
                peak[kind] = max(peak[kind], nbytes)


@dataclass(frozen=True)
class Figures:
    """Holds what a run showed; `multiples` are by worker, in states of one trial."""

    trials: int
    workers: int
    shards: int
    state_mb: float
    multiples: dict[int, dict[str, float]]
    before_mb: dict[int, float]
    run_seconds: float
    sub_epoch_seconds: float  # the median
    hop_gb_per_second: float  # all bytes over all seconds


def measured(asked: argparse.Namespace) -> Figures:
    random = np.random.default_rng(3)
    features = random.normal(size=(asked.rows, FEATURES)).astype(np.float32)
    data = Arrays({"features": features, "label": random.integers(0, CLASSES, asked.rows)})
    watch = Watch()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        sizes = {"width": asked.width, "layers": asked.layers, "shards": asked.shards}
        search = GridSearch(
            backend=LocalBackend(asked.workers),
            store=LocalStore(f"{folder}/store"),
            estimator_gen_fn=partial(make, **sizes),
            search_space={"lr": hp_choice([1e-4 * (n + 1) for n in range(asked.trials)])},
            num_epochs=asked.epochs,
            evaluation_metric="accuracy",
            validation=0.2,
            seed=5,
            verbose=0,
            observers=[watch],
        )
        search.fit(data)  # type: ignore[arg-type]  # what LocalBackend takes for a DataFrame
    seconds = sum(each for _, each in watch.hops)
    return Figures(
        trials=asked.trials,
        workers=asked.workers,
        shards=asked.shards,
        state_mb=round(watch.state_bytes / 1e6, 1),
        multiples={worker: watch.multiples(pid) for worker, pid in sorted(watch.pids.items())},
        before_mb={w: round(watch.before[pid]["Rss"] / 1e6) for w, pid in watch.pids.items()},
        run_seconds=round(watch.ended - watch.began, 1),
        sub_epoch_seconds=round(statistics.median(watch.sub_epochs), 3),
        hop_gb_per_second=round(sum(n for n, _ in watch.hops) / seconds / 1e9, 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("trials", 4), ("workers", 2), ("shards", 1), ("epochs", 2),
        ("width", 2048), ("layers", 6), ("rows", 1280),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", help="where store and scratch lie; default: temporary files")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: a small net")
    asked = parser.parse_args()
    if asked.quick:
        asked.trials, asked.epochs, asked.width, asked.layers, asked.rows = 2, 1, 256, 2, 256
    tempfile.tempdir = asked.folder
    figures = measured(asked)
    print(json.dumps({"machine": platform.processor(), **asdict(figures)}, indent=1))


if __name__ == "__main__":
    main()
