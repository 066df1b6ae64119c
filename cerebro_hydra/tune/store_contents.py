"""Lists what a store holds: runs with how they stand, and data with the runs that need it."""

from __future__ import annotations

from dataclasses import dataclass

from cerebro_hydra.data.claim import is_claimed
from cerebro_hydra.data.prepared import description, read_manifest
from cerebro_hydra.errors import CerebroHydraError, StoreError
from cerebro_hydra.observe.text import number
from cerebro_hydra.observe.view import RunView
from cerebro_hydra.storage import RunFolder, Store
from cerebro_hydra.storage.run_document import RUN_FILE
from cerebro_hydra.storage.run_folder import read_document


@dataclass(frozen=True)
class StoredRun:
    """Describes a run in a store.

    `status` is "running", "finished", "interrupted", "failed", or "unreadable".
    """

    run_id: str
    path: str
    status: str
    bytes: int
    modified: float | None
    """When its latest file was written, in seconds since 1970."""
    trials: str = ""
    winner: str = ""
    fingerprint: str | None = None
    """The data that it needs; None if that can't be read."""


@dataclass(frozen=True)
class StoredData:
    """Describes a data set in a store; `being_prepared` while a program writes it."""

    fingerprint: str
    path: str
    text: str
    bytes: int
    modified: float | None
    needed_by: tuple[str, ...]
    """The ids of the runs that were trained on it."""
    being_prepared: bool


@dataclass(frozen=True)
class StoreContents:
    """Holds everything in a store, each sorted by name; the names of runs begin with their time."""

    runs: tuple[StoredRun, ...]
    data: tuple[StoredData, ...]

    @classmethod
    def of(cls, store: Store) -> StoreContents:
        """Read a store; what can't be read is listed as such."""
        runs = tuple(_run(RunFolder(store, name)) for name in store.list(f"{store.prefix}/runs"))
        data = store.list(f"{store.prefix}/data")
        return cls(runs, tuple(_data(store, fingerprint, runs) for fingerprint in data))


def _run(folder: RunFolder) -> StoredRun:
    usage = folder.store.usage(folder.path)
    named = (folder.run_id, folder.path)
    claimed = is_claimed(folder.store, folder.path)
    there = folder.store.list(folder.path)
    try:
        fingerprint = read_document(folder).fingerprint
    except CerebroHydraError:
        # Trials are admitted before the run has a document.
        began = RUN_FILE in there
        status = "running" if claimed else "unreadable" if began else "failed"
        return StoredRun(*named, status, *usage)
    try:
        view = RunView.of_run(folder)
    except CerebroHydraError:
        return StoredRun(*named, "unreadable", *usage, fingerprint=fingerprint)
    finished = sum(trial.status == "finished" for trial in view.trials.values())
    if claimed:
        status = "running"
    elif not all(trial.over for trial in view.trials.values()):
        status = "interrupted"
    else:
        status = "finished" if finished else "failed"
    best = view.winner
    winner = "" if best is None else f"{best.trial_id}, {view.metric} {number(view.score(best))}"
    return StoredRun(
        *named, status, *usage, f"{finished} of {len(view.trials)}", winner, fingerprint
    )


def _data(store: Store, fingerprint: str, runs: tuple[StoredRun, ...]) -> StoredData:
    path = store.data_path(fingerprint)
    text, being_prepared = "can't be read", False
    try:
        manifest = read_manifest(store, fingerprint)
    except StoreError:
        pass
    else:
        if manifest is None:
            being_prepared = is_claimed(store, path)
            text = "is being prepared" if being_prepared else "its preparation did not end"
        else:
            text = description(store, manifest)
    needed_by = tuple(run.run_id for run in runs if run.fingerprint == fingerprint)
    return StoredData(fingerprint, path, text, *store.usage(path), needed_by, being_prepared)
