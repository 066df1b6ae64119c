"""Compares replicas with the steps of DistributedDataParallel on gloo; see README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, hp_choice
from cerebro_hydra.observe import Decision, Record
from cerebro_hydra.plan.messages.events import SubEpochDone
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend

FEATURES, CLASSES = 64, 8
EPOCHS = 6
CASES = {
    "small": {"width": 256, "layers": 4, "batch": 64},
    "middle": {"width": 768, "layers": 6, "batch": 128},
    "large": {"width": 1536, "layers": 6, "batch": 128},
}


def model_of(width: int, layers: int) -> nn.Module:
    """Return a net without buffers."""
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), *hidden, nn.Linear(width, CLASSES))


def net(params: dict[str, Any]) -> Recipe:
    """Return what a trial trains."""
    model = model_of(params["width"], params["layers"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss, batch, replicas = nn.CrossEntropyLoss(), params["batch"], params["replicas"]
    return Recipe(model, optimizer, loss, batch_size=batch, replicas=replicas)


class Seconds:
    """Notes how long each rank took for each sub-epoch."""

    def __init__(self) -> None:
        self.by_attempt: dict[int, list[float]] = {}

    def on_record(self, record: Record) -> None:
        """Take a record."""
        if isinstance(record, Decision) and isinstance(record.event, SubEpochDone):
            event = record.event
            self.by_attempt.setdefault(event.attempt, []).append(event.seconds)


def ours(workers: int, size: dict[str, int], steps: int, tls: bool) -> tuple[list[float], bool]:
    """Return seconds per step of each epoch but the first, and whether the replay has its bits."""
    rows = workers * steps * size["batch"]
    random = np.random.default_rng(0)
    features = random.normal(size=(rows, FEATURES)).astype(np.float32)
    data = Arrays({"features": features, "label": random.integers(0, CLASSES, rows)})
    space = {name: hp_choice([value]) for name, value in size.items()}
    seconds = Seconds()
    from benchmarks.replicas.run import net as factory  # agents import it by this name

    with tempfile.TemporaryDirectory() as folder:
        result = GridSearch(
            backend=LocalBackend(workers, tls=tls),
            store=LocalStore(folder),
            estimator_gen_fn=factory,
            search_space={**space, "replicas": hp_choice([workers])},
            num_epochs=EPOCHS,
            evaluation_metric="loss",
            verbose=0,
            observers=[seconds],
        ).fit(data)
        report = cerebro_hydra.replay(result.run_path, "trial-000")
    epochs = [max(found) / steps for _, found in sorted(seconds.by_attempt.items())]
    return epochs[1:], report.identical


def _rank(rank: int, ranks: int, meeting: str, size: dict[str, int], steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    model = nn.parallel.DistributedDataParallel(model_of(size["width"], size["layers"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    x = torch.randn(steps, size["batch"], FEATURES)
    y = torch.randint(CLASSES, (steps, size["batch"]))
    seconds = []
    for _ in range(EPOCHS):
        dist.barrier()
        begun = time.perf_counter()
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model(x[step]), y[step]).backward()
            optimizer.step()
        dist.barrier()
        seconds.append((time.perf_counter() - begun) / steps)
    if rank == 0:
        Path(f"{meeting}.json").write_text(json.dumps(seconds[1:]))
    dist.destroy_process_group()


def ddp(ranks: int, size: dict[str, int], steps: int) -> list[float]:
    """Return seconds per step of each pass but the first, each over as many steps."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        processes.spawn(_rank, (ranks, meeting, size, steps), nprocs=ranks)
        found: list[float] = json.loads(Path(f"{meeting}.json").read_text())
        return found


def compare(workers: int, size: dict[str, int], steps: int, times: int, tls: bool) -> None:
    """Print a row; both sides run by turns, so that what else the machine does is in both."""
    model = model_of(size["width"], size["layers"])
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    mine: list[float] = []
    theirs: list[float] = []
    bits = "the replays are identical"
    for _ in range(times):
        found, identical = ours(workers, size, steps, tls)
        mine += found
        theirs += ddp(workers, size, steps)
        bits = bits if identical else "A REPLAY DIFFERS"
    ratios = [f(mine) / f(theirs) for f in (statistics.median, min)]
    print(
        f"{workers} workers{', TLS' if tls else ''}, {nbytes / 1e6:.1f} MB, {size['batch']} rows: "
        f"replicas {1e3 * statistics.median(mine):.1f} ms a step, fastest {1e3 * min(mine):.1f}; "
        f"DDP {1e3 * statistics.median(theirs):.1f}, fastest {1e3 * min(theirs):.1f}; "
        f"{ratios[0]:.2f} and {ratios[1]:.2f} of it; {bits}",
        flush=True,
    )


def main() -> None:
    """Print a row for each number of workers and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small case, that it runs")
    parser.add_argument("--case", choices=CASES, action="append", help="all of them by default")
    parser.add_argument("--workers", type=int, action="append", help="2 and 3 by default")
    parser.add_argument("--times", type=int, default=3, help="how often each side runs")
    parser.add_argument("--tls", action="store_true", help="encrypt what replicas send")
    given = parser.parse_args()
    if given.quick:
        compare(2, {"width": 128, "layers": 2, "batch": 32}, 10, 1, given.tls)
        return
    for case in given.case or CASES:
        for workers in given.workers or [2, 3]:
            compare(workers, CASES[case], 20, given.times, given.tls)


if __name__ == "__main__":
    main()
