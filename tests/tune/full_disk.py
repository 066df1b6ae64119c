"""Runs searches on a small disk of its own, until the disk is full or read-only.

`python -m tests.tune.full_disk FOLDER CASE...` prints a line of JSON for each case: how the search
ended and what it left.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from cerebro_hydra.errors import CerebroHydraError
from cerebro_hydra.observe import Decision, Record, RunView
from cerebro_hydra.plan.messages.events import SubEpochDone
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import GridSearch, SearchResult, hp_choice
from tests.tune import quick_retries, tune_models
from tests.tune.test_tune_search import rows

WIDTH = 8000
"""The width of a net whose state has 1.3 MB."""

TOO_LITTLE = 500_000
"""Bytes that no state fits in, but journal and documents do."""

built = SimpleQueue[str]()  # what a factory leaves in a list is taken out again


def counted(params: dict[str, Any]) -> Any:
    """Build a net, and note it."""
    built.put(repr(params))
    return tune_models.small(params)


class Counted(RunView):
    """Sees what the console sees."""

    on_record = RunView.apply


class Filler:
    """Leaves `spare` bytes of the disk free, once the first sub-epoch is done."""

    def __init__(self, folder: Path, spare: int) -> None:
        self.folder = folder
        self.spare: int | None = spare

    def on_record(self, record: Record) -> None:
        """Fill the disk once."""
        if isinstance(record, Decision) and isinstance(record.event, SubEpochDone) and self.spare:
            fill(self.folder, self.spare)
            self.spare = None


def fill(folder: Path, spare: int) -> None:
    """Write a file that leaves so many bytes of the disk free."""
    disk = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - spare)))


@contextmanager
def short_of_disk(folder: Path, case: str) -> Iterator[None]:
    """Leave too little room for a state while the body runs, in the way that the case says."""
    match case:
        case "limited":
            resource.setrlimit(resource.RLIMIT_FSIZE, (TOO_LITTLE, resource.RLIM_INFINITY))
        case "full":
            fill(folder, TOO_LITTLE)
        case "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if case == "full":
        (folder / "filler").unlink()


def ended(folder: Path, case: str) -> dict[str, Any]:
    """Run a search, and read what it left with all digests."""
    backend = LocalBackend(2, preloaded=[quick_retries.__name__])
    view = Counted()
    spare = {"journal": 1, "checkpoint": TOO_LITTLE}.get(case)
    search = GridSearch(
        backend=backend,
        store=LocalStore(str(folder)),
        estimator_gen_fn=counted,
        search_space={"width": hp_choice([WIDTH]), "lr": hp_choice([0.1, 0.2, 0.3])},
        num_epochs=2,
        verbose=0,
        observers=[view, *([] if spare is None else [Filler(folder, spare)])],
    )
    prepared = backend.prepare(search.store, rows(), search.data_spec)
    while not built.empty():
        built.get()
    with short_of_disk(folder, case):
        try:
            search.fit_on_prepared_data(prepared)
            said = "finished"
        except CerebroHydraError as error:
            said = f"{type(error).__name__}: {error}"
    for run in (folder / "runs").iterdir():
        left = RunFolder.open(str(run))
        for trial, state in ((t, v) for t in range(3) for v in left.states(t)):
            for shard in left.read_state(trial, state)["shards"]:
                left.read_object(shard["frozen"])
                left.read_object(shard["trainable"])
        list(left.read_segments())
    resumed: list[str] = []
    counted_by: list[int] = []
    if spare is not None:
        shown = SearchResult.open(left.path, tune_models.small)
        in_folder = [trial.status for trial in shown.trials].count("finished")
        counted_by = [view.finished, in_folder]
        (folder / "filler").unlink()
        result = search.fit(rows(), resume=left.path)
        resumed = [trial.status for trial in result.trials]
    files = [str(path.relative_to(folder)) for path in folder.glob("runs/**/*") if path.is_file()]
    return {
        "said": said,
        "built": len({built.get() for _ in range(built.qsize())}),
        "files": files,
        "resumed": resumed,
        "finished": counted_by,
    }


if __name__ == "__main__":
    for each in sys.argv[2:]:
        print(json.dumps({"case": each, **ended(Path(sys.argv[1]), each)}))
