"""Compares what searches take by `plan="auto"` with the plain choice, on layers that wait."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import work

from benchmarks.plan.run import BATCHES, LAYERS, SPILLING_MEMORY, WIDTH, training_seconds
from cerebro_hydra import GridSearch, LocalStore, hp_choice
from cerebro_hydra.observe.planned import PlannedRun
from cerebro_hydra.observe.records import records_of
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend

STEP = 4  # microbatches of an optimizer step


@dataclass(frozen=True)
class Case:
    """Is a search on one worker, whose trials leave everything to the plan."""

    trials: int
    devices: int
    epochs: int = 2
    spilled: bool = False
    milliseconds: int = 40

    def train(self, plan: str | None, folder: str) -> tuple[float, RunFolder]:
        """Return the seconds from its first forward to its end, and what it wrote."""
        backend = LocalBackend(
            1,
            preloaded=[work.__name__],
            devices_per_worker=self.devices,
            device_memory=SPILLING_MEMORY if self.spilled else None,
            plan=plan,
        )
        space: dict[str, list[Any]] = {
            "lr": [0.001 * (number + 1) for number in range(self.trials)],
            "layers": [LAYERS],
            "width": [WIDTH[self.spilled]],
            "milliseconds": [self.milliseconds],
            "schedule": ["sequential"],
            "accumulate": [STEP],
            "shards": ["auto"],
            "recompute": ["auto"],
        }
        search = GridSearch(
            backend=backend,
            store=LocalStore(tempfile.mkdtemp(dir=folder)),
            estimator_gen_fn=work.make,
            search_space={name: hp_choice(values) for name, values in space.items()},
            num_epochs=self.epochs,
            audit_share=0,
            verbose=0,
        )
        result = search.fit(Arrays(work.rows(8 * BATCHES * 5 // 4)))
        run = RunFolder.open(result.run_path)
        return training_seconds(records_of(run)), run


CASES = (
    Case(1, 2),
    Case(1, 2, epochs=20),
    Case(1, 4, epochs=20),
    Case(2, 4, epochs=20),
    Case(4, 4, epochs=5),
    Case(1, 2, epochs=10, spilled=True),
    Case(3, 2, epochs=10, spilled=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--case", type=int, help="only this one, from 0")
    given = parser.parse_args()
    cases = CASES if given.case is None else (CASES[given.case],)
    if given.quick:
        cases = (Case(1, 2, milliseconds=10, epochs=1),)
    print(
        "| trials | devices | epochs | spilled | plain, s | plan, s | **plain / plan** | expected "
        "| chosen | load |"
    )
    print("| --- " * 10 + "|", flush=True)
    with tempfile.TemporaryDirectory(prefix="cerebro-hydra-auto-") as folder:
        for case in cases:
            plain, _ = case.train(None, folder)
            planned, run = case.train("auto", folder)
            plan, expected = run.read_trial(0, run.run_id).plan, PlannedRun.read(run)
            assert expected is not None, "a search with a plan keeps what it expects"
            chosen = "as without a plan"
            if plan is not None:
                chosen = f"{plan.schedule} over {plan.devices} device(s)"
            print(
                f"| {case.trials} | {case.devices} | {case.epochs} "
                f"| {'yes' if case.spilled else 'no'} | {plain:.1f} | {planned:.1f} "
                f"| **{plain / planned:.2f}** "
                f"| {expected.plain_seconds / expected.seconds:.2f} | {chosen} "
                f"| {os.getloadavg()[0]:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
