"""Plays rounds: a driver, mostly on real Spark, is killed at a moment, and its run is resumed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cerebro_hydra.plan.messages.events import RunResumed
from cerebro_hydra.plan.messages.instructions import Commit, StartSubEpoch
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.run_document import WORKERS_FILE
from cerebro_hydra.storage.run_folder import read_document
from tests.chaos.driver import PARTITIONS
from tests.chaos.moments import NAMES, decisions, moment_of, run_of
from tests.end_to_end.runs import bits

CHECKOUT = Path(__file__).resolve().parents[2]
KINDS = ("grid", "best", "rungs")
COMMAND = "import sys; from cerebro_hydra.cli import main; sys.exit(main())"
CalmBits = Callable[[str, int], dict[str, Any]]
"""Returns the bits of the calm run of a kind over so many partitions."""

LONGEST = 400.0
"""Seconds after which a driver hangs."""


@dataclass(frozen=True)
class Round:
    """Says what is done to one run.

    Args:
        number: decides everything else, and seeds what is drawn.
        place: "spark", or "local" for a driver without it, which resumes by `fit` alone.
    """

    number: int
    place: str = "spark"

    @property
    def moment(self) -> str:
        return NAMES[self.number % len(NAMES)]

    @property
    def kind(self) -> str:
        return KINDS[self.number // len(NAMES) % len(KINDS)]

    @property
    def workers(self) -> int:
        """Of the driver that resumes: in half of the rounds as many as before."""
        return (PARTITIONS, 1, PARTITIONS, 2)[self.number // 2 % 4]

    @property
    def twice(self) -> bool:
        """Whether the first driver that resumes is killed too."""
        return self.number % 4 == 3

    @property
    def agents(self) -> str | None:
        """What is done to an agent beside it."""
        return (None, "SIGKILL", None, "SIGSTOP")[(self.number + self.number // 6) % 4]


@dataclass(frozen=True)
class Outcome:
    """Holds what became of a round."""

    number: int
    moment: str
    kind: str
    workers: int
    twice: bool
    agents: str | None
    killed: int
    resumed_by: str
    seconds: float | None
    made_again: int
    equal: bool
    said: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Driver:
    """A program that trains; whatever it started is gone when it is left."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.begun = time.time()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=output,
                stderr=output,
                cwd=CHECKOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"},
            )

    def over(self) -> bool:
        hangs = time.time() - self.begun > LONGEST
        return hangs or self._process.poll() is not None

    def wait(self) -> int:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(LONGEST)
        return -1

    def kill(self) -> bool:
        """Kill the driver alone; return whether it was still there."""
        alive = self._process.poll() is None
        self._process.kill()
        self._process.wait()
        return alive

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def driver(arguments: list[str], log: Path) -> Iterator[Driver]:
    started = Driver(arguments, log)
    try:
        yield started
    finally:
        started.close()


def trains(store: Path, kind: str, workers: int, place: str, run: Path | None = None) -> list[str]:
    """Return the arguments of a Python that trains, or goes on with a run."""
    resumed = [str(run)] if run else []
    return ["-m", "tests.chaos.driver", str(store), kind, str(workers), place, *resumed]


def resumes(store: Path, planned: Round, run: Path, command: bool) -> list[str]:
    """Return the arguments of a Python that resumes a run."""
    if not command:
        return trains(store, planned.kind, planned.workers, planned.place, run)
    factory = ["--factory", "tests.chaos.models:feed_forward"]
    return ["-c", COMMAND, "resume", str(run), *factory, "--workers", str(planned.workers)]


def disturb(
    store: Path,
    kind: str,
    what: str,
    draw: random.Random,
    over: Callable[[], bool],
    done: list[str],
) -> None:
    """Kill an agent, or let it sleep for some seconds, at a moment of its own; note that in `done`.

    One that sleeps may outlive its driver, and wakes up while the run is resumed.
    """
    moment_of("a hop", kind).wait(store, draw, over)
    run = run_of(store)
    if over() or run is None:
        return
    workers = RunFolder.open(str(run)).read_json(WORKERS_FILE)
    pid = draw.choice(sorted(worker["pid"] for worker in workers.values()))
    with suppress(ProcessLookupError):
        os.kill(pid, signal.Signals[what])
        done.append(what)
        if what == "SIGSTOP":
            time.sleep(draw.uniform(0.5, 15.0))
            os.kill(pid, signal.SIGCONT)


def calm(folder: Path, kind: str, partitions: int, place: str = "spark") -> dict[str, Any]:
    """Return the bits of a run that nothing disturbs, on as many workers as partitions."""
    store, log = folder / f"calm-{kind}-{partitions}", folder / f"calm-{kind}-{partitions}.log"
    with driver(trains(store, kind, partitions, place), log) as undisturbed:
        assert undisturbed.wait() == 0, log.read_text()
    run = run_of(store)
    assert run is not None
    return bits(run)


def play(folder: Path, planned: Round, calm_bits: CalmBits) -> Outcome:
    """Play one round in a folder of its own.

    A run whose driver was killed before its document was written begins anew, on the workers that
    there are then, and is compared with a calm run on as many.
    """
    draw, store = random.Random(planned.number), folder / f"round-{planned.number:03d}"
    log = folder / f"round-{planned.number:03d}.log"
    moment = moment_of(planned.moment, planned.kind)
    kind, killed, agents = planned.kind, 0, list[str]()
    with driver(trains(store, kind, PARTITIONS, planned.place), log) as first:
        if planned.agents is not None:
            own = random.Random(draw.random())
            given = (store, kind, planned.agents, own, first.over, agents)
            threading.Thread(target=disturb, args=given, daemon=True).start()
        moment.wait(store, draw, first.over)
        killed += first.kill()
    run = run_of(store)
    assert run is not None, log.read_text()
    command = planned.number % 2 == 1 and planned.place == "spark"
    if planned.twice:
        with driver(resumes(store, planned, run, command), log) as second:
            time.sleep(draw.uniform(0.0, 20.0))
            killed += second.kill()
    how = "cerebro-hydra resume" if command else "fit(df, resume=)"
    with driver(resumes(store, planned, run, command), log) as last:
        begun, status = last.begun, last.wait()
    said = log.read_text()
    if status != 0 and command and "search.fit(df, resume=...)" in said:
        how = "fit(df, resume=)"
        with driver(resumes(store, planned, run, False), log) as last:
            begun, status = last.begun, last.wait()
    try:
        found = bits(run)
        partitions = read_document(RunFolder.open(str(run))).num_partitions
        expected = calm_bits(kind, partitions)
        equal = status == 0 and found == expected
        other = {name: (found.get(name), expected[name]) for name in expected}
        other = {name: pair for name, pair in other.items() if pair[0] != pair[1]}
        lost = f"it ended with {status}; found and expected of trials that differ: {other}"
    except Exception as error:
        equal, lost = False, repr(error)
    seconds, made_again = what_was_redone(run, begun)
    report = "" if equal else f"{lost}\n{log.read_text()[-3000:]}"
    return Outcome(
        planned.number,
        moment.name,
        kind,
        planned.workers,
        planned.twice,
        agents[0] if agents else None,
        killed,
        how,
        seconds,
        made_again,
        equal,
        report,
    )


def what_was_redone(run: Path, begun: float) -> tuple[float | None, int]:
    """Return how many seconds it took to train again, and how many sub-epochs were made again."""
    made, visits, again, trained = decisions(run), set[tuple[int, int]](), 0, None
    resumed = False
    for each in made:
        resumed = resumed or (isinstance(each.event, RunResumed) and each.time >= begun)
        for one in each.instructions:
            if isinstance(one, StartSubEpoch) and resumed and trained is None:
                trained = round(each.time - begun, 1)
            if isinstance(one, Commit):
                again += (one.trial, one.state) in visits
                visits.add((one.trial, one.state))
    return trained, again
