"""Compares what a user's default training costs with what it cost in another checkout."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CLAIM = 1.02
HERE = Path(__file__).resolve()
OURS = HERE.parents[2]


@dataclass(frozen=True)
class Case:
    """Names a model, its shards, and how much of it is trained in a process."""

    model: str
    shards: int
    steps: int  # per sub-epoch
    epochs: int  # of one sub-epoch each; the first warms up

    @property
    def text(self) -> str:
        named = {
            "net": "net 64-1060-1060-10, steps of 64 rows",
            "bert": "BERT, 8 layers of 256, steps of 8 x 64",
        }
        return f"{named[self.model]}, {self.steps} per sub-epoch"


CASES = [
    Case("net", 1, 100, 11),
    Case("net", 3, 100, 11),
    Case("bert", 1, 4, 9),
    Case("bert", 4, 4, 9),
]
QUICK = [Case("net", 3, 10, 3)]


@dataclass(frozen=True)
class Figure:
    """Holds the ratios of this checkout over the other one, over pairs of processes."""

    case: str
    shards: int
    other_ms: float  # CPU time of a sub-epoch in the other checkout
    cpu: tuple[float, float, float]  # quartiles
    wall: tuple[float, float, float]
    faults: tuple[float, float]  # page faults of a sub-epoch: the other one, this one
    load: float


def measure(case: Case, against: Path, rounds: int) -> Figure:
    """Let processes of both checkouts take turns."""
    taken: tuple[list[Any], list[Any]] = ([], [])  # of the other checkout, of this one
    for turn in range(rounds):
        for at in (turn % 2, 1 - turn % 2):
            taken[at].append(train(case, (against, OURS)[at]))
        if taken[0][-1]["digests"] != taken[1][-1]["digests"]:
            raise RuntimeError(f"the checkouts have trained different bits: {case}")
    return Figure(
        case.text,
        case.shards,
        1000 * statistics.median(each["cpu"] for each in taken[0]),
        ratios("cpu", *taken),
        ratios("wall", *taken),
        (mean("faults", taken[0]), mean("faults", taken[1])),
        os.getloadavg()[0],
    )


def train(case: Case, checkout: Path) -> Mapping[str, Any]:
    """Train in a process of a checkout; return what a sub-epoch of its agent took, and digests."""
    arguments = [case.model, case.shards, case.steps, case.epochs]
    done = subprocess.run(
        [sys.executable, HERE.with_name("search.py"), *map(str, arguments)],
        cwd=checkout,  # which agents of older checkouts import from first
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    taken: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return taken


def ratios(
    name: str, other: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]
) -> tuple[float, float, float]:
    """Return the quartiles of this checkout over the other one, pair by pair."""
    pairs = [b[name] / a[name] for a, b in zip(other, ours, strict=True)]
    if len(pairs) == 1:
        pairs *= 2
    lower, median, upper = statistics.quantiles(pairs, n=4, method="inclusive")
    return lower, median, upper


def mean(name: str, taken: Sequence[Mapping[str, Any]]) -> float:
    return statistics.mean(each[name] for each in taken)


def row(f: Figure) -> str:
    verdict = "held" if f.cpu[1] <= CLAIM else "NOT held"
    cpu, wall = (f"{a:.3f} | **{b:.3f}** | {c:.3f}" for a, b, c in (f.cpu, f.wall))
    return (
        f"| {f.case} | {f.shards} | {f.other_ms:.0f} | {cpu} | {wall} "
        f"| {f.faults[0]:.0f} / {f.faults[1]:.0f} | {CLAIM:.2f} {verdict} | {f.load:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--against", type=Path, default=OURS, metavar="CHECKOUT", help="default: this one"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--model", choices=["net", "bert"], help="only this one")
    parser.add_argument("--rounds", type=int, default=8, help="how many pairs of processes")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: the net")
    asked = parser.parse_args()
    print(
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}\n"
        "| model | shards | other, ms CPU | quartile | CPU time | quartile | quartile | wall time "
        "| quartile | page faults, other / this | claim | load |"
    )
    print("| --- " * 12 + "|", flush=True)
    figures = []
    for case in QUICK if asked.quick else CASES:
        if asked.model in (None, case.model):
            figures.append(measure(case, asked.against, 1 if asked.quick else asked.rounds))
            print(row(figures[-1]), flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(f) for f in figures], indent=2) + "\n")


if __name__ == "__main__":
    main()
