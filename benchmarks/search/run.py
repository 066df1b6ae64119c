"""Measures searches here, in Ray Tune and in Optuna over the same points, one after the other."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import inf
from pathlib import Path

import numpy as np

from benchmarks.search.space import points
from benchmarks.search.work import EPOCHS, TRIALS, Epoch, Figures, Job, digits

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# The program and the search of each part.
PARTS = {
    "hyperband": ("ours.py", "hyperband"),
    "ray-hyperband": ("with_ray.py", "hyperband"),
    "optuna-hyperband": ("with_optuna.py", "asha"),  # as many trials as ASHA, since it resumes none
    "asha": ("ours.py", "asha"),
    "ray-asha": ("with_ray.py", "asha"),
    "trivial": ("ours.py", "trivial"),
    "ray-trivial": ("with_ray.py", "trivial"),
    "grid": ("ours.py", "grid"),
}
# The parts of a round that are compared.
GROUPS = [
    ("hyperband", "ray-hyperband", "optuna-hyperband"),
    ("asha", "ray-asha"),
    ("trivial", "ray-trivial"),
    ("grid",),
]
OURS, PEERS = ("hyperband", "asha"), ("ray-hyperband", "ray-asha", "optuna-hyperband")
CLAIMED_WORK, CLAIMED_TIME = 0.25, 0.8
COPIES = 2, 6  # of each image that is trained on, and of each that is held out
# Java that is made ready at once and never made fast: a third less CPU time for so short a run.
QUICK_JAVA = "-XX:TieredStopAtLevel=1"


def main() -> None:
    """Measure what is asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--python-ray", default=str(ROOT / ".venv-ray/bin/python"))
    parser.add_argument(
        "--together", action="store_true", help="parts that are compared run at the same time"
    )
    parser.add_argument("--table", action="store_true", help="only print what was measured")
    parser.add_argument("--quick", action="store_true", help="only see that parts run, without Ray")
    arguments = parser.parse_args()
    if arguments.quick:
        quick()
        return
    results = arguments.results
    results.mkdir(parents=True, exist_ok=True)
    programs = Programs(arguments.python_ray)

    def measured(asked: tuple[str, int]) -> None:
        part, seed = asked
        path, load = results / f"{part}-{seed}.json", os.getloadavg()[0]
        if not path.exists():
            figures = programs.measure(part, job_of(part, seed, results), path)
            told = f"{figures.seconds:.1f} s, {figures.epochs:.0f} epochs, {figures.best:.4f}"
            print(f"{path.stem} (load {load:.1f}): {told}", flush=True)

    for trivial in (False, True):
        write_rows(results, trivial)
    with ThreadPoolExecutor(None if arguments.together else 1) as parts:
        for seed, group in product(() if arguments.table else range(arguments.seeds), GROUPS):
            list(parts.map(measured, [(each, seed) for each in group if each in arguments.parts]))
    programs.close()
    print(table(results))


def write_rows(folder: Path, trivial: bool) -> Path:
    """Return the file of the rows, which is written if there is none."""
    path = folder / ("trivial.npz" if trivial else "rows.npz")
    if not path.exists():
        made = digits(*(1, 1) if trivial else COPIES)
        np.savez(path, **{name: each[:64] for name, each in made.items()} if trivial else made)
    return path


def job_of(part: str, seed: int, folder: Path) -> Job:
    """Return what a part does in one round."""
    _, search = PARTS[part]
    trivial = search == "trivial"
    rows = write_rows(folder, trivial)
    tried = points(search, seed, TRIALS[search])
    return Job(search, seed, tried, 1 if trivial else EPOCHS, rows)


class Programs:
    """Has each program run in a process of its own, which stays until all is measured."""

    def __init__(self, python_ray: str) -> None:
        self._python_ray = python_ray
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def measure(self, part: str, job: Job, path: Path) -> Figures:
        """Have a part do a job, and return its figures, which it writes to `path`."""
        program, _ = PARTS[part]
        process = self._processes.get(program)
        if process is None:
            process = self._processes[program] = self._started(program, path.with_suffix(".log"))
        asked = path.with_suffix(".job")
        job.write(asked)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([str(asked), str(path)]) + "\n")
        process.stdin.flush()
        if f"measured {path}\n" not in process.stdout:
            raise SystemExit(f"{program} failed; see the logs in {path.parent}")
        asked.unlink()
        return Figures.read(path)

    def _started(self, program: str, log: Path) -> subprocess.Popen[str]:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
        python = self._python_ray if program == "with_ray.py" else sys.executable
        with log.open("w") as errors:
            return subprocess.Popen(
                [python, str(HERE / program)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def close(self) -> None:
        """End the programs, whose input is over."""
        for process in self._processes.values():
            process.communicate()


def quick() -> None:
    """Run Hyperband here and in Optuna with few trials and rows."""
    os.environ["JAVA_TOOL_OPTIONS"] = QUICK_JAVA
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as beside:
        folder, programs = Path(name), Programs(python_ray="")
        rows = folder / "rows.npz"
        np.savez(rows, **{name: each[:256] for name, each in digits(1, 1).items()})

        def measured(part: str) -> Figures:
            job = Job(PARTS[part][1], 0, points("asha", 0, 6), 3, rows)
            return programs.measure(part, job, folder / f"{part}-0.json")

        list(beside.map(measured, ["hyperband", "optuna-hyperband"]))
        programs.close()
        print(table(folder))


def table(results: Path) -> str:
    """Return what was measured, and the claims."""
    return "\n".join(lines({part: figures_of(results, part) for part in PARTS}))


def lines(found: dict[str, dict[int, Figures]]) -> Iterator[str]:
    """Yield a line for each part, and for each claim that what was measured says something of."""
    for part, seeds in found.items():
        if seeds:
            accuracy = described([each.best for each in seeds.values()], 4)
            seconds = described([each.seconds for each in seeds.values()], 1)
            epochs = described([each.epochs for each in seeds.values()], 0)
            yield f"{part}: accuracy {accuracy}; {epochs} epochs; {seconds} s"
    both = found["trivial"].keys() & found["ray-trivial"].keys()
    overheads = [found["trivial"][s].seconds / found["ray-trivial"][s].seconds for s in both]
    yield from compared("trivial: seconds / ray-trivial's", 1.0, overheads)
    grids = [each.best for each in found["grid"].values()]
    again = [value for each in found["grid"].values() for value in each.again]
    if not again:
        return
    target = statistics.median(again)
    work = EPOCHS * TRIALS["grid"]
    yield f"target: {described(again, 4)}"
    reached = {
        part: {seed: each.reaching(target) for seed, each in seeds.items()}
        for part, seeds in found.items()
    }
    for part in (*OURS, *PEERS):
        works = [each.epochs / work if each else inf for each in reached[part].values()]
        yield from compared(f"{part}: work until the target / grid's", CLAIMED_WORK, works)
        times = [each.time if each else inf for each in reached[part].values()]
        yield f"{part}: seconds until the target {described(times, 1)}"
    for ours, theirs in product(OURS, PEERS):
        both = reached[ours].keys() & reached[theirs].keys()
        times = [shorter(reached[ours][seed], reached[theirs][seed]) for seed in sorted(both)]
        yield from compared(f"{ours}: seconds until the target / {theirs}'s", CLAIMED_TIME, times)
    for part in OURS:
        bests = [each.best for each in found[part].values()]
        if not bests:
            continue
        lost = statistics.median(grids) - statistics.median(bests)
        yield from compared(f"{part}: accuracy lost", max(again) - min(again), [lost])


def shorter(ours: Epoch | None, theirs: Epoch | None) -> float:
    """Return the ratio of the times; one that has not reached the target takes for ever."""
    if ours is None:
        return inf
    return 0.0 if theirs is None else ours.time / theirs.time


def compared(what: str, claimed: float, ratios: Sequence[float]) -> Iterator[str]:
    """Yield a line that says whether a claim holds in the median, if anything was measured."""
    if ratios:
        held = "held" if statistics.median(ratios) <= claimed else "NOT held"
        yield f"{what}: {described(ratios, 3)} (claimed: at most {claimed:.3g}, {held})"


def described(values: Sequence[float], digits: int) -> str:
    """Return the median of values, and all of them in order."""
    if not values:
        return "none"
    form: Callable[[float], str] = lambda value: f"{value:.{digits}f}"  # noqa: E731
    return f"{form(statistics.median(values))} of {', '.join(map(form, sorted(values)))}"


def figures_of(results: Path, part: str) -> dict[int, Figures]:
    """Return the figures of a part, by seed."""
    paths = {int(path.stem.rpartition("-")[2]): path for path in results.glob(f"{part}-[0-9].json")}
    return {seed: Figures.read(path) for seed, path in sorted(paths.items())}


if __name__ == "__main__":
    main()
