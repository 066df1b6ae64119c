"""Measures the same search in cerebro-dl and here, and its floor, one part after the other."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from work import NETS, QUICK_ROWS, ROWS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = {"floor": "floor.py", "ours": "ours.py", "cerebro": "theirs.py"}
CLAIMED_SPEEDUP = {"small": 5.0, "large": 4.0}
CLAIMED_OVERHEAD = 1.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=chosen_of(PARTS), default=list(PARTS))
    parser.add_argument("--nets", type=chosen_of(NETS), default=list(NETS))
    parser.add_argument("--rounds", type=int, default=3, help="of all parts, in turns")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--python-cerebro", default=str(ROOT / ".venv-cerebro/bin/python"))
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--quick", action="store_true", help="only see that our parts run")
    arguments = parser.parse_args()
    if arguments.quick:
        with tempfile.TemporaryDirectory() as folder:
            for part in ("floor", "ours"):
                run(sys.executable, part, "small", QUICK_ROWS, Path(folder, f"small-{part}-0.json"))
            print(table(Path(folder)))
        return
    arguments.results.mkdir(parents=True, exist_ok=True)
    for part, net, number in plan(arguments.parts, arguments.nets, arguments.rounds):
        path = arguments.results / f"{net}-{part}-{number}.json"
        if path.exists() and not arguments.again:
            print(f"{path.name} is there")
            continue
        python = arguments.python_cerebro if part == "cerebro" else sys.executable
        run(python, part, net, ROWS, path)
    (arguments.results / "machine.json").write_text(json.dumps(machine(), indent=2) + "\n")
    print(table(arguments.results))


def chosen_of(names: Any) -> Any:
    def chosen(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in names]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {list(names)}")
        return given

    return chosen


def plan(parts: Sequence[str], nets: Sequence[str], rounds: int) -> Iterator[tuple[str, str, int]]:
    """Run the parts in turns, so that a change of the machine's speed affects every part."""
    for net in nets:
        for number in range(rounds):
            for part in PARTS:
                if part in parts:
                    yield part, net, number


def run(python: str, part: str, net: str, rows: int, path: Path) -> None:
    """Run one part for one net in a process of its own; it writes its figures to `path`."""
    load = os.getloadavg()[0]
    print(f"{path.name} (load {load:.1f}) ...", end=" ", flush=True)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        "PYTHONWARNINGS": "ignore",
    }
    log = path.with_suffix(".log")
    command = [python, str(HERE / PARTS[part]), "--net", net, "--rows", str(rows)]
    with log.open("w") as output:
        ended = subprocess.run(
            [*command, "--json", str(path)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if ended.returncode:
        raise SystemExit(f"failed with {ended.returncode}:\n{log.read_text()}")
    log.unlink()
    figures = json.loads(path.read_text())
    figures |= {"load_before": load, "load_after": os.getloadavg()[0]}
    path.write_text(json.dumps(figures, indent=2) + "\n")
    print(", ".join(f"{name} {v:.1f}" for name, v in figures.items() if isinstance(v, float)))


def table(results: Path) -> str:
    """Print the medians over rounds, and compare the ratios of each round with the claims."""
    lines = []
    for net in NETS:
        found = {part: figures_of(results, net, part) for part in PARTS}
        for part, rounds in found.items():
            if rounds:
                split = ", ".join(f"{name} {v:.1f}" for name, v in medians(rounds).items())
                lines.append(f"{net} {part}: {split}")
        floor, ours, cerebro = found["floor"], found["ours"], found["cerebro"]
        overheads = [ours[n]["training"] / floor[n]["training"] for n in ours.keys() & floor.keys()]
        if overheads:
            what = f"{net}: our training / floor"
            lines.append(verdict(what, overheads, CLAIMED_OVERHEAD, at_most=True))
        speedups = [cerebro[n]["fit"] / ours[n]["fit"] for n in ours.keys() & cerebro.keys()]
        if speedups:
            what = f"{net}: Cerebro's fit / ours"
            lines.append(verdict(what, speedups, CLAIMED_SPEEDUP[net], at_most=False))
    return "\n".join(lines)


def verdict(what: str, ratios: Sequence[float], claimed: float, at_most: bool) -> str:
    ratio = statistics.median(ratios)
    held = ratio <= claimed if at_most else ratio >= claimed
    bound = "at most" if at_most else "at least"
    each = ", ".join(f"{value:.2f}" for value in sorted(ratios))
    claim = f"claimed: {bound} {claimed:.2f}, {'held' if held else 'NOT held'}"
    return f"{what}: {ratio:.2f} of {each} ({claim})"


def figures_of(results: Path, net: str, part: str) -> dict[str, dict[str, Any]]:
    """Return the figures of a part, by round."""
    paths = results.glob(f"{net}-{part}-*.json")
    return {path.stem.rpartition("-")[2]: json.loads(path.read_text()) for path in paths}


def medians(rounds: dict[str, dict[str, Any]]) -> dict[str, float]:
    first, *_ = rounds.values()
    names = [name for name, value in first.items() if isinstance(value, float)]
    return {name: statistics.median(each[name] for each in rounds.values()) for name in names}


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
