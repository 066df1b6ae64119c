"""Measures training from a mapped cache beside the same rows in memory, where that is short too."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import nn

from benchmarks.demo_net import demo_net
from cerebro_hydra.data.batches import batches, row_order
from cerebro_hydra.data.partition import CachedPartition

CHECKOUT = Path(__file__).resolve().parents[2]
WIDTH = 64
ROW_BYTES = 4 * WIDTH + 8
BASELINE = 700 << 20
"""Bytes of memory for torch and Python beside the pages of a partition."""
_MEMORY = Path("/sys/fs/cgroup/memory")


def write(folder: Path, rows: int) -> None:
    """Write a partition of 64 floats and a label a row, as an agent's cache has it."""
    random = np.random.default_rng(0)
    features = np.lib.format.open_memmap(
        folder / "x.npy", "w+", dtype=np.float32, shape=(rows, WIDTH)
    )
    for start in range(0, rows, 1 << 18):
        part = features[start : start + (1 << 18)]
        part[:] = random.random(part.shape, dtype=np.float32)
    features.flush()
    np.save(folder / "y.npy", random.integers(0, 10, rows))


def train(folder: Path, where: str, batch_size: int, steps: int) -> float:
    """Return rows per second of some steps of an epoch in a seeded order.

    Args:
        where: "memory", "disk" (the cache, as agents have it) or "ahead" (it asks for pages).
    """
    torch.set_num_threads(1)
    columns = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("x", "y")}
    if where == "memory":
        columns = {name: np.array(column) for name, column in columns.items()}
    rows = len(columns["y"])
    part = CachedPartition(rows, columns, reads_ahead=where == "ahead")
    torch.manual_seed(0)
    model, loss = demo_net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters())
    order = row_order(rows, 0, int(time.time()), 0)
    begun, trained = 0.0, 0
    for number, batch in enumerate(batches(part, ["x"], ["y"], batch_size, order)):
        if number == 10:
            begun, trained = time.perf_counter(), 0
        if number == steps + 10:
            break
        optimizer.zero_grad()
        loss(model(batch.features[0]), batch.labels[0]).backward()
        optimizer.step()
        trained += batch.rows
    return trained / (time.perf_counter() - begun)


@contextmanager
def limited(nbytes: int | None) -> Iterator[list[str]]:
    """Give the start of a command that runs in a memory cgroup of so many bytes, pages included.

    Raises:
        SystemExit: there is no cgroup (version 1) that this process may make one below.
    """
    if nbytes is None:
        yield []
        return
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":", 2)[2] for line in lines if ":memory:" in line), None)
    if own is None or not os.access(_MEMORY, os.W_OK):
        raise SystemExit("--half needs a memory cgroup of version 1, and the right to make one")
    group = _MEMORY / PurePosixPath(own).relative_to("/") / f"train-from-disk-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


def measured(folder: Path, where: str, limit: int | None, given: argparse.Namespace) -> float:
    """Return the rows per second of a process that begins with the cache on disk alone."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if limit is None:  # the cache of an agent was just written, or read for its digest
        for file in folder.iterdir():
            file.read_bytes()
    with limited(limit if where != "memory" else None) as start:
        command = [*start, sys.executable, __file__, "--child", where, "--folder", str(folder)]
        command += ["--batch-size", str(given.batch_size), "--steps", str(given.steps)]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return float(done.stdout)


def main() -> None:
    """Print a line of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512, help="of the partition")
    parser.add_argument("--half", action="store_true", help="let memory hold half of them")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; a disk, not memory")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: 16 MiB")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.megabytes, given.rounds, given.steps = 16, 1, 20
    if given.child:
        print(train(given.folder, given.child, given.batch_size, given.steps))
        return
    folder = Path(tempfile.mkdtemp(dir=given.folder or "/var/tmp"))
    try:
        nbytes = given.megabytes << 20
        write(folder, nbytes // ROW_BYTES)
        limit = BASELINE + nbytes // 2 if given.half else None
        speeds: dict[str, list[float]] = {"memory": [], "disk": [], "ahead": []}
        for _ in range(given.rounds):
            for where, found in speeds.items():
                found.append(measured(folder, where, limit, given))
        ratios = {
            where: [a / b for a, b in zip(speeds[where], speeds["memory"], strict=True)]
            for where in ("disk", "ahead")
        }
        cells = [
            f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
            for found in ratios.values()
        ]
        memory = "half of it" if given.half else "all of it"
        per_second = statistics.median(speeds["memory"])
        print(f"| {given.megabytes} MiB | {memory} | {per_second:,.0f} | {cells[0]} | {cells[1]} |")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
