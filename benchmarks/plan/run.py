"""Compares what a plan predicts with what the same search takes, on layers that wait."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import work

from cerebro_hydra import GridSearch, LocalStore, hp_choice
from cerebro_hydra.observe.records import Record, records_of
from cerebro_hydra.observe.timeline import fold
from cerebro_hydra.planning.plan import Plan
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend

LAYERS = 4
EPOCHS = 2
WIDTH = {False: 16, True: 256}  # of layers, by whether they are spilled
SPILLING_MEMORY = 1_200_000  # bytes, for about two of the four shards
BATCHES = 8  # of a partition
GOAL = 0.10


@dataclass(frozen=True)
class Case:
    """Is a search, and the workers that run it."""

    trials: int
    workers: int
    devices: int
    spilled: bool = False
    schedule: str = "sequential"
    milliseconds: int = 40
    epochs: int = EPOCHS

    @property
    def title(self) -> str:
        """Return its row's first cells."""
        spilled = "yes" if self.spilled else "no"
        return f"{self.trials} | {self.workers} | {self.devices} | {spilled} | {self.schedule}"

    @property
    def calibration(self) -> Case:
        """Return the search whose run says what its tasks cost: two trials on one worker."""
        return replace(self, trials=2, workers=1, devices=min(2, self.devices))

    @property
    def arrays(self) -> Arrays:
        """Return its rows; a tenth of them and more is held out."""
        return Arrays(work.rows(self.workers * 8 * BATCHES * 5 // 4))

    def search(self, store: str) -> GridSearch:
        """Return it, in a store of its own."""
        backend = LocalBackend(
            self.workers,
            preloaded=[work.__name__],
            devices_per_worker=self.devices,
            device_memory=SPILLING_MEMORY if self.spilled else None,
        )
        space = {
            "lr": hp_choice([0.001 * (number + 1) for number in range(self.trials)]),
            "layers": hp_choice([LAYERS]),
            "width": hp_choice([WIDTH[self.spilled]]),
            "milliseconds": hp_choice([self.milliseconds]),
            "schedule": hp_choice([self.schedule]),
            "accumulate": hp_choice([1 if self.schedule == "sequential" else 4]),
        }
        return GridSearch(
            backend=backend,
            store=LocalStore(store),
            estimator_gen_fn=work.make,
            search_space=space,
            num_epochs=self.epochs,
            audit_share=0,
            verbose=0,
        )


CASES = (
    Case(2, 1, 1),
    Case(4, 1, 2),
    Case(2, 1, 2, schedule="1f1b"),
    Case(4, 2, 1, spilled=True),
    Case(8, 2, 2),
    Case(4, 2, 2, schedule="gpipe"),
    Case(6, 1, 2, spilled=True),
    Case(9, 3, 1),
    Case(16, 1, 4),
    Case(4, 2, 1),
    Case(8, 2, 2, spilled=True),
    Case(4, 1, 4, schedule="1f1b"),
    Case(8, 3, 2),
)


@dataclass(frozen=True)
class Figure:
    """Holds a case's seconds from its first forward to its end: measured, predicted, and bound."""

    measured: float
    predicted: float
    by_admission: float
    load: float

    @property
    def deviation(self) -> float:
        """Return by which share more the plan says than was measured."""
        return self.predicted / self.measured - 1


def training_seconds(records: Iterable[Record]) -> float:
    """Return the seconds from the first forward of any task to the end of the run."""
    _, timeline = fold(records)
    return timeline.end - min(bar.start for bar in timeline.tasks)


def planned(plan: Plan) -> float:
    """Return the seconds of a plan's only row, as those of a run."""
    return training_seconds(plan.rows[0].records())


def measure(case: Case, calibrations: dict[Case, str], folder: str) -> Figure:
    """Plan a case by the run of its calibration, and by admission alone; then run it."""
    if case.calibration not in calibrations:
        store = tempfile.mkdtemp(dir=folder)
        result = case.calibration.search(store).fit(case.calibration.arrays)
        calibrations[case.calibration] = result.run_path
    store = tempfile.mkdtemp(dir=folder)
    search = case.search(store)
    by_admission = planned(search.plan(case.arrays))
    by_run = planned(search.plan(case.arrays, from_run=calibrations[case.calibration]))
    result = search.fit(case.arrays)
    measured = training_seconds(records_of(RunFolder.open(result.run_path)))
    return Figure(measured, by_run, by_admission, os.getloadavg()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--case", type=int, help="only this one, from 0")
    given = parser.parse_args()
    cases: tuple[Any, ...] = CASES if given.case is None else (CASES[given.case],)
    if given.quick:
        cases = (replace(CASES[0], milliseconds=5, epochs=1),)
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}\n")
    print(
        "| trials | workers | devices | spilled | schedule | measured, s | predicted / measured "
        "| by admission alone | load |"
    )
    print("| --- " * 9 + "|", flush=True)
    deviations = []
    calibrations: dict[Case, str] = {}
    with tempfile.TemporaryDirectory(prefix="cerebro-hydra-plan-") as folder:
        for case in cases:
            found = measure(case, calibrations, folder)
            deviations.append(abs(found.deviation))
            print(
                f"| {case.title} | {found.measured:.1f} "
                f"| {found.predicted / found.measured:.3f} "
                f"| {found.by_admission / found.measured:.3f} | {found.load:.1f} |",
                flush=True,
            )
    within = sum(each <= GOAL for each in deviations)
    print(
        f"\n{within} of {len(deviations)} within {GOAL:.0%}; the median is off by "
        f"{statistics.median(deviations):.1%}, the worst by {max(deviations):.1%}"
    )


if __name__ == "__main__":
    main()
