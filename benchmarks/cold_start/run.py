"""Times a cold start by its phases, with and without the archive of Java's classes.

The runs of a pair come one after the other, each in a process and a Java of its own. A phase has
wall and CPU seconds; these are of this process and all below it: Java, and Spark's Python.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROWS = 2_000
WITHOUT = {"spark.driver.extraJavaOptions": "-Xshare:auto"}  # an option of one's own turns it off


def estimator(params: dict[str, Any]) -> Any:
    """Make a small model, so that little but the start is measured."""
    import torch

    from cerebro_hydra import SparkEstimator

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
    loss = torch.nn.functional.mse_loss
    return SparkEstimator(
        model, optimizer, lambda outputs, label: loss(outputs.squeeze(1), label), batch_size=100
    )


class Marks:
    """Notes when each phase ended, in wall and CPU seconds; an observer of a search, too."""

    def __init__(self) -> None:
        self.phases: dict[str, tuple[float, float]] = {}
        self._search = ""
        self._latest = (time.perf_counter(), cpu_seconds())

    def end(self, phase: str) -> None:
        """End a phase, which began where the one before ended."""
        before, self._latest = self._latest, (time.perf_counter(), cpu_seconds())
        wall, cpu = (b - a for a, b in zip(before, self._latest, strict=True))
        self.phases[phase] = wall, cpu

    def search(self, name: str) -> None:
        """Name the search that begins."""
        self._search = name

    def on_record(self, record: Any) -> None:
        """End the phases of a search."""
        from cerebro_hydra.observe import Decision, RunEnded, RunStarted
        from cerebro_hydra.plan.messages.instructions import StartSubEpoch

        agents = f"{self._search}: agents"
        if isinstance(record, RunStarted):
            self.end(f"{self._search}: admission")
        elif isinstance(record, RunEnded):
            self.end(f"{self._search}: training")
        elif isinstance(record, Decision) and agents not in self.phases:
            for _ in (each for each in record.instructions if isinstance(each, StartSubEpoch)):
                self.end(agents)
                break


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all below it, also of those that have ended."""
    stats = dict(_stats())
    ours, new = set[int](), {os.getpid()}
    while new:
        ours |= new
        new = {pid for pid, (parent, _) in stats.items() if parent in new} - ours
    ticks = sum(stats[pid][1] for pid in ours if pid in stats)
    return ticks / os.sysconf("SC_CLK_TCK")


def _stats() -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each process with its parent and its ticks, those of its ended children included."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        yield int(path.parent.name), (int(fields[1]), sum(map(int, fields[11:15])))


def measure(with_archive: bool) -> dict[str, tuple[float, float]]:
    """Return the wall and CPU seconds of each phase in this process, which must be a new one."""
    marks = Marks()
    from cerebro_hydra import GridSearch, LocalStore, SparkBackend, hp_choice, local_spark

    marks.end("import")
    spark = local_spark(workers=2, verbose=0, **({} if with_archive else WITHOUT))
    marks.end("session")
    rows = [([float(i % 7), 1.0], float(i % 5)) for i in range(ROWS)]
    df = spark.createDataFrame(rows, "features array<float>, label float")
    backend = SparkBackend(spark, verbose=0)
    marks.end("checks")
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(folder)
        prepared = backend.prepare_data(store, df, validation=0.2)
        marks.end("preparation")
        for name in ("first search", "second search"):
            marks.search(name)
            GridSearch(
                backend=backend,
                store=store,
                estimator_gen_fn=estimator,
                search_space={"lr": hp_choice([0.01, 0.02])},
                num_epochs=1,
                validation=0.2,
                observers=[marks],
                verbose=0,
            ).fit_on_prepared_data(prepared)
            marks.end(f"{name}: results")
    return marks.phases


def child(cache: str, with_archive: bool) -> dict[str, tuple[float, float]]:
    """Measure in a new process."""
    command = [sys.executable, __file__, "--child", str(int(with_archive))]
    environ = os.environ | {"XDG_CACHE_HOME": cache}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: (float(wall), float(cpu)) for name, (wall, cpu) in found.items()}


def main() -> None:
    """Make the archive, then measure pairs and print them with their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="only see that it runs: one session, no archive"
    )
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(measure(bool(arguments.child))))
        return
    with tempfile.TemporaryDirectory() as cache:
        if arguments.quick:
            for name, (wall, cpu) in child(cache, False).items():
                print(f"{name}: {wall:.1f} s, {cpu:.1f} CPU s")
            return
        child(cache, True)
        _await_archive(Path(cache))
        pairs = [(child(cache, False), child(cache, True)) for _ in range(arguments.pairs)]
    for name, kind in itertools.product(pairs[0][0], (0, 1)):
        before, after = zip(*((b[name][kind], a[name][kind]) for b, a in pairs), strict=True)
        shown = ", ".join(f"{b:.1f} / {a:.1f}" for b, a in zip(before, after, strict=True))
        medians = f"{statistics.median(before):.1f} / {statistics.median(after):.1f}"
        print(f"{name}, {('wall', 'CPU')[kind]}: {shown}; median {medians} s")


def _await_archive(cache: Path) -> None:
    """Wait until Java, which outlives its session's process a little, has written it."""
    deadline = time.monotonic() + 300
    while not any(path.stat().st_size for path in cache.rglob("*.part")):
        if time.monotonic() > deadline:
            raise SystemExit("Java wrote no archive within 300 s")
        time.sleep(1)
    time.sleep(5)


if __name__ == "__main__":
    main()
