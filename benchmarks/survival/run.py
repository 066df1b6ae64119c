"""Plays rounds of `tests/chaos`, and writes what became of each; see README.md."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.chaos.driver import PARTITIONS
from tests.chaos.moments import NAMES
from tests.chaos.rounds import KINDS, Outcome, Round, calm, play

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
QUICK_ROUND = Round(2, place="local")  # a grid, killed at a hop, resumed on one worker
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "rounds.jsonl")
    parser.add_argument("--quick", action="store_true", help="only play a round without Spark")
    arguments = parser.parse_args()
    if arguments.quick:
        return quick()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text("")
    rounds: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="survival-") as folder:
            for outcome in outcomes(Path(folder), arguments.first, arguments.rounds):
                print(outcome.to_json(), flush=True)
                with arguments.json.open("a") as file:
                    file.write(outcome.to_json() + "\n")
                rounds.append(json.loads(outcome.to_json()))
    finally:  # an interrupt leaves the figures of the rounds that were played
        if rounds:
            write_figures(rounds)
    return 0 if all(each["equal"] for each in rounds) else 1


def quick() -> int:
    """Play one round without Spark; print its outcome, and write nothing."""
    with tempfile.TemporaryDirectory(prefix="survival-") as folder, ThreadPoolExecutor() as beside:
        bits = beside.submit(calm, Path(folder), QUICK_ROUND.kind, PARTITIONS, "local")
        outcome = play(Path(folder), QUICK_ROUND, lambda kind, partitions: bits.result())
    print(outcome.to_json())
    return 0 if outcome.killed and outcome.equal else 1


def outcomes(place: Path, first: int, rounds: int) -> Iterator[Outcome]:
    """Play rounds one after the other."""
    calm_bits = cache(partial(calm, place))
    for number in range(first, first + rounds):
        yield play(place, Round(number), calm_bits)


def write_figures(rounds: Sequence[dict[str, Any]]) -> None:
    """Write the table of the figures into README.md."""
    before, rest = README.read_text().split(BEGIN)
    README.write_text(before + BEGIN + "\n" + table(rounds) + "\n" + END + rest.split(END)[1])


def table(rounds: Sequence[dict[str, Any]]) -> str:
    """Return the figures by moment, and in all."""
    lines = [
        "| killed at | rounds | drivers killed | equal bits | seconds to train again, median "
        "(largest) | sub-epochs made again, median (largest) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    groups = {name: [r for r in rounds if r["moment"] == name] for name in NAMES}
    for name, group in {**groups, "all": list(rounds)}.items():
        seconds = [each["seconds"] for each in group if each["seconds"] is not None]
        again = [each["made_again"] for each in group]
        cells = [
            name,
            len(group),
            sum(each["killed"] for each in group),
            sum(each["equal"] for each in group),
            _spread(seconds),
            _spread(again),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    beside = [sum(each["agents"] == what for each in rounds) for what in ("SIGKILL", "SIGSTOP")]
    changed = sum(each["workers"] != 3 for each in rounds)
    kinds = ", ".join(f"{sum(r['kind'] == kind for r in rounds)} {kind}" for kind in KINDS)
    twice = sum(each["twice"] for each in rounds)
    lines += [
        "",
        f"- Rounds by kind: {kinds}.",
        f"- Resumed on another number of workers: {changed}.",
        f"- The driver that resumed was killed too: {twice}.",
        f"- An agent was killed before the driver: {beside[0]}; put to sleep: {beside[1]}.",
    ]
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):g} ({max(values):g})" if values else "-"


if __name__ == "__main__":
    raise SystemExit(main())
