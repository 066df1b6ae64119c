"""Compares replicas with the steps of DistributedDataParallel on gloo; see README.md."""

from __future__ import annotations

import argparse
import json
import os
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


def ours(workers: int, size: dict[str, int], steps: int, epochs: int) -> tuple[float, bool]:
    """Return seconds per step of the last epoch, and whether the replay has the same bits."""
    rows = workers * steps * size["batch"]
    random = np.random.default_rng(0)
    features = random.normal(size=(rows, FEATURES)).astype(np.float32)
    data = Arrays({"features": features, "label": random.integers(0, CLASSES, rows)})
    space = {name: hp_choice([value]) for name, value in size.items()}
    seconds = Seconds()
    from benchmarks.replicas.run import net as factory  # agents import it by this name

    with tempfile.TemporaryDirectory() as folder:
        result = GridSearch(
            backend=LocalBackend(workers),
            store=LocalStore(folder),
            estimator_gen_fn=factory,
            search_space={**space, "replicas": hp_choice([workers])},
            num_epochs=epochs,
            evaluation_metric="loss",
            verbose=0,
            observers=[seconds],
        ).fit(data)
        report = cerebro_hydra.replay(result.run_path, "trial-000")
    last = max(seconds.by_attempt)
    return max(seconds.by_attempt[last]) / steps, report.identical


def _rank(
    rank: int, ranks: int, meeting: str, size: dict[str, int], steps: int, epochs: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    model = nn.parallel.DistributedDataParallel(model_of(size["width"], size["layers"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    x = torch.randn(steps, size["batch"], FEATURES)
    y = torch.randint(CLASSES, (steps, size["batch"]))
    for _ in range(epochs):
        dist.barrier()
        begun = time.perf_counter()
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model(x[step]), y[step]).backward()
            optimizer.step()
        dist.barrier()
        seconds = time.perf_counter() - begun
    if rank == 0:
        Path(f"{meeting}.json").write_text(json.dumps(seconds / steps))
    dist.destroy_process_group()


def ddp(ranks: int, size: dict[str, int], steps: int, epochs: int) -> float:
    """Return seconds per step of the last of some passes, each over as many steps."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        processes.spawn(_rank, (ranks, meeting, size, steps, epochs), nprocs=ranks)
        found: float = json.loads(Path(f"{meeting}.json").read_text())
        return found


def main() -> None:
    """Print a row for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small case, that it runs")
    given = parser.parse_args()
    size = {"width": 768, "layers": 6, "batch": 128}
    steps, counts = 40, [2, 3]
    if given.quick:
        size, steps, counts = {"width": 128, "layers": 2, "batch": 32}, 10, [2]
    model = model_of(size["width"], size["layers"])
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    print(f"{nbytes / 1e6:.1f} MB of gradients, batches of {size['batch']}, {steps} steps")
    for workers in counts:
        mine, identical = ours(workers, size, steps, 2)
        theirs = ddp(workers, size, steps, 2)
        bits = "the replay is identical" if identical else "THE REPLAY DIFFERS"
        print(
            f"{workers} workers: replicas {1e3 * mine:.1f} ms a step, DDP {1e3 * theirs:.1f} ms, "
            f"{mine / theirs:.2f} of it; {bits}",
            flush=True,
        )


if __name__ == "__main__":
    main()
