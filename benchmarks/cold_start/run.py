"""Times a cold session and its first preparation, with and without the archive of Java's classes.

Each pair runs one after the other, each in a process and a Java of its own.
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
from pathlib import Path

ROWS = 2_000
WITHOUT = {"spark.driver.extraJavaOptions": "-Xshare:auto"}  # an option of one's own turns it off


def measure(with_archive: bool) -> dict[str, float]:
    """Return the seconds of each part in this process, which must be a new one."""
    import cerebro_hydra

    marks = {"import": time.perf_counter()}
    spark = cerebro_hydra.local_spark(workers=2, verbose=0, **({} if with_archive else WITHOUT))
    marks["session"] = time.perf_counter()
    rows = [([float(i % 7), 1.0], float(i % 5)) for i in range(ROWS)]
    df = spark.createDataFrame(rows, "features array<float>, label float")
    backend = cerebro_hydra.SparkBackend(spark, verbose=0)
    marks["checks"] = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        backend.prepare_data(cerebro_hydra.LocalStore(folder), df, validation=0.2)
        marks["preparation"] = time.perf_counter()
    names = list(marks)
    return {b: marks[b] - marks[a] for a, b in itertools.pairwise(names)}


def child(cache: str, with_archive: bool) -> dict[str, float]:
    """Measure in a new process."""
    command = [sys.executable, __file__, "--child", str(int(with_archive))]
    environ = os.environ | {"XDG_CACHE_HOME": cache}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return {name: float(value) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


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
            print(child(cache, False))
            return
        child(cache, True)
        _await_archive(Path(cache))
        pairs = [(child(cache, False), child(cache, True)) for _ in range(arguments.pairs)]
    for name in pairs[0][0]:
        before, after = zip(*((b[name], a[name]) for b, a in pairs), strict=True)
        shown = ", ".join(f"{b:.1f} / {a:.1f}" for b, a in zip(before, after, strict=True))
        medians = f"{statistics.median(before):.1f} / {statistics.median(after):.1f}"
        print(f"{name}: {shown}; median {medians} s")


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
