"""Runs a search on a small disk of its own that is full when its later trials are admitted.

`python -m tests.tune.trials.full_at_admission FOLDER CASE` prints a line of JSON: how the search
ended, what was told, and how it ends once it is resumed.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from cerebro_hydra.errors import CerebroHydraError
from cerebro_hydra.observe import Decision, NotSaved, Record
from cerebro_hydra.plan.messages.events import SubEpochDone
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import SearchResult, TPESearch, hp_log
from tests.tune import tune_models
from tests.tune.full_disk import fill
from tests.tune.test_tune_search import rows

TRIALS = 6


class Full:
    """Fills the disk at the first sub-epoch's end, until a trial's file is refused or for good."""

    def __init__(self, folder: Path, for_good: bool) -> None:
        self.folder, self.for_good = folder, for_good
        self.filled = False
        self.told: list[str] = []

    def on_record(self, record: Record) -> None:
        """Fill the disk, or free it."""
        if isinstance(record, Decision) and isinstance(record.event, SubEpochDone):
            if not self.filled:
                fill(self.folder, 1)
            self.filled = True
        if isinstance(record, NotSaved):
            self.told.append(record.what)
            if record.what.startswith("trial-") and not self.for_good:
                (self.folder / "filler").unlink(missing_ok=True)


def ended(folder: Path, for_good: bool) -> dict[str, object]:
    """Run the search, and resume it where that is needed."""
    full = Full(folder, for_good)
    preloaded = ["tests.tune.quick_retries"] if for_good else []
    for name in preloaded:
        importlib.import_module(name)
    search = TPESearch(
        backend=LocalBackend(2, preloaded),
        store=LocalStore(str(folder)),
        estimator_gen_fn=tune_models.small,
        search_space={"lr": hp_log(0.01, 0.1)},
        num_models=TRIALS,
        num_epochs=2,
        evaluation_metric="loss",
        verbose=0,
        observers=[full],
    )
    try:
        result, said = search.fit(rows()), "finished"
    except CerebroHydraError as error:
        said = f"{type(error).__name__}: {error}"
        (folder / "filler").unlink(missing_ok=True)
        (run,) = (folder / "runs").iterdir()
        result = search.fit(rows(), resume=str(run))
    return {"said": said, "told": full.told, "statuses": statuses(result)}


def statuses(result: SearchResult) -> list[str]:
    """Return what has become of each trial."""
    return [trial.status for trial in result.trials]


if __name__ == "__main__":
    print(json.dumps(ended(Path(sys.argv[1]), sys.argv[2] == "for good")))
