"""Verifies runs with their data, or all that lies in a store, and reports what is damaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

from cerebro_hydra.data.manifest import MANIFEST_NAME
from cerebro_hydra.data.partition import check_partitions
from cerebro_hydra.data.preparation.prepared import data_in, read_manifest
from cerebro_hydra.errors import CerebroHydraError, JournalError, StoreError
from cerebro_hydra.hopper.run_config import hop_config, trial_config
from cerebro_hydra.observe.records import Decision
from cerebro_hydra.plan.hop.journal import fold
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.messages.codec import from_json
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.shards.export.archive import archived
from cerebro_hydra.storage import RunFolder, Store
from cerebro_hydra.storage.local_paths import path_or_url
from cerebro_hydra.storage.names import trial_name
from cerebro_hydra.storage.run_document import (
    NUMERIC_FILE,
    PLAN_FILE,
    RUN_FILE,
    SEARCH_FILE,
    TRIAL_FILE,
    WORKERS_FILE,
    RunDocument,
)
from cerebro_hydra.storage.run_folder import read_document, read_search, runs_in
from cerebro_hydra.temporary_folders import temporary_folder


def verify(
    path: str | os.PathLike[str], on_part: Callable[[VerifiedPart], object] | None = None
) -> VerificationReport:
    """Read every file of a run and its data, or of a whole store, and compare it with its digest.

    Nothing is trained, imported or written. Only `report.html`, which people read, has no digest.

    Args:
        path: `<store>/runs/<run id>`, or the folder of a store.
        on_part: is called with each part as soon as it was read.

    Raises:
        StoreError: there is neither a run nor a store at `path`.
        ConfigurationError: `path` can be none, such as the URL of a file system without a store.
    """
    found = []
    for part in _parts(path_or_url("path", path)):
        found.append(part)
        if on_part is not None:
            on_part(part)
    return VerificationReport(tuple(found))


def _parts(path: str) -> Iterator[VerifiedPart]:
    if os.path.basename(os.path.dirname(path)) == "runs":
        folder = RunFolder.open(path)
        yield from verify_run(folder)
        if (document := document_of(folder)) is not None:
            yield from verify_data(folder.store, document.fingerprint, needed=True)
        return
    store = Store.at(path)
    runs, data = runs_in(store), data_in(store)
    if not runs and not data:
        raise StoreError(
            f"{path!r} holds neither runs nor data: give a store's folder, or <store>/runs/<run id>"
        )
    folders = []
    for run_id in runs:
        try:
            folders.append(RunFolder(store, run_id))
        except StoreError as error:  # somebody renamed it
            yield VerifiedPart(f"run {run_id}", problems=(str(error),))
    documents = filter(None, map(document_of, folders))
    needed = {document.fingerprint: None for document in documents}
    for fingerprint in dict.fromkeys([*data, *needed]):
        yield from verify_data(store, fingerprint, fingerprint in needed)
    for folder in folders:
        yield from verify_run(folder)


def verify_data(store: Store, fingerprint: str, needed: bool) -> Iterator[VerifiedPart]:
    """Verify a data set: its manifest, then the rows of every partition.

    Args:
        store: has the data.
        fingerprint: of the data.
        needed: whether a run was trained on it, so that its preparation had ended.
    """
    name, folder = f"data {fingerprint}", store.data_path(fingerprint)
    try:
        manifest = read_manifest(store, fingerprint)
    except StoreError as error:
        yield VerifiedPart(f"{name}: manifest", problems=(str(error),))
        return
    if manifest is None and not needed and store.exists(folder):
        yield VerifiedPart(name, notes=("a preparation that did not end, for it has no manifest",))
    elif manifest is None:
        gone = f"{folder}/{MANIFEST_NAME}" if store.exists(folder) else folder
        said = f"{gone!r} is gone, and a run was trained on this data: restore it from a copy"
        yield VerifiedPart(name, problems=(said,))
    else:
        yield VerifiedPart(f"{name}: manifest", f"{len(manifest.partitions)} partitions")
        with temporary_folder("verify") as scratch:
            for part in check_partitions(manifest, store, scratch):
                where = f"{name}: {part.split}/{part.index}"
                problems = () if part.problem is None else (part.problem,)
                yield VerifiedPart(where, f"{part.rows} rows", problems)


Digests = tuple[tuple[str, str], ...]
"""The digests of the frozen and the trainable segment of each shard of a state."""


def document_of(folder: RunFolder) -> RunDocument | None:
    """Return what describes a run; None if it can't be read, which its part of documents says."""
    with suppress(CerebroHydraError):
        return read_document(folder)
    return None


def verify_run(folder: RunFolder) -> Iterator[VerifiedPart]:
    """Verify a run without the data that it was trained on."""
    name = f"run {folder.run_id}"
    try:
        there = set(folder.store.list(folder.path))
    except StoreError as error:
        yield VerifiedPart(name, problems=(str(error),))
        return
    if not there & {RUN_FILE, "journal"}:
        yield VerifiedPart(name, notes=("it never began, because no trial was admitted",))
        return
    readers: dict[str, Callable[[RunFolder], object]] = {
        RUN_FILE: read_document,
    }
    for optional in sorted(there & {NUMERIC_FILE, PLAN_FILE, SEARCH_FILE, WORKERS_FILE}):
        readers[optional] = methodcaller("read_json", optional)
    document = document_of(folder)
    if document is not None and document.search is not None:
        readers[SEARCH_FILE] = partial(read_search, document=document)
    problems = []
    for read in readers.values():
        try:
            read(folder)
        except StoreError as error:
            problems.append(str(error))
    yield VerifiedPart(f"{name}: documents", ", ".join(readers), tuple(problems))
    if document is not None:
        yield from _Verification(folder, document).parts()


class _Verification:
    """Reads a run whose document can be read, and every object of it once."""

    def __init__(self, folder: RunFolder, document: RunDocument) -> None:
        self._folder = folder
        self._name = f"run {folder.run_id}"
        self._document = document
        self._added: dict[int, TrialConfig] = {}
        """What a sound journal says of each trial that it adds."""
        self._made: dict[tuple[int, int], Digests] = {}
        """The digests of a state of a trial, as its agent reported them."""
        self._results: dict[int, int] = {}
        """The state that is a trial's result, of each trial that has one."""
        self._forks: set[int] = set()
        """The trials that begin with a state of another one."""
        self._objects: dict[str, str | None] = {}
        """What is wrong with each object that was read."""

    def parts(self) -> Iterator[VerifiedPart]:
        """Verify the journal, the trials, and what belongs to none."""
        yield self._journal()
        for number in sorted({*self._added, *self._folder.trials()}):
            yield self._trial(number)
        yield from self._models()
        files = self._folder.objects()
        left = [digest for digest in files if digest not in self._objects]
        problems = tuple(filter(None, map(self._object, left)))
        notes = (f"{len(left)} objects belong to no state",) if left else ()
        yield VerifiedPart(f"{self._name}: objects", f"{len(files)} files", problems, notes)

    def _models(self) -> Iterator[VerifiedPart]:
        """Load the archives of models that need no source."""
        there = self._folder.models()
        problems = [
            f"{f'{self._folder.path}/models/{trial_id}'!r} is gone, and the run has kept a model "
            "there: restore it from a copy"
            for trial_id in self._document.archives
            if trial_id not in there
        ]
        for trial_id in there:
            try:
                if archived(self._folder, trial_id) is None:
                    path = f"{self._folder.path}/models/{trial_id}"
                    problems.append(f"{path!r} has no metadata; save the model again")
            except CerebroHydraError as error:
                problems.append(str(error))
        if there or problems:
            yield VerifiedPart(f"{self._name}: models", ", ".join(there), tuple(problems))

    def _journal(self) -> VerifiedPart:
        """Decide everything again that the journal says was decided."""
        lines: list[dict[str, Any]] = []
        problems: list[str] = []
        notes: list[str] = []
        try:
            for segment in self._folder.read_segments():
                lines += segment
            state = self._fold(lines)
        except CerebroHydraError as error:
            problems.append(str(error))
        else:
            self._follow(lines[1:])
            problems += self._gone(lines[1:])
            over = sum(trial.over for trial in state.trials.values())
            if not state.finished:
                notes.append(f"the run did not end: {over} of {len(state.trials)} trials did")
        name = f"{self._name}: journal"
        return VerifiedPart(name, f"{len(lines)} lines", tuple(problems), tuple(notes))

    def _gone(self, records: Sequence[dict[str, Any]]) -> list[str]:
        """Say which documents are gone that are written when an agent joins."""
        if not any(record["event"]["type"] == "WorkerJoined" for record in records):
            return []
        there = self._folder.store.list(self._folder.path)
        gone = [name for name in (NUMERIC_FILE, WORKERS_FILE) if name not in there]
        said = "is gone, and agents joined, for each of which it is written: restore it from a copy"
        return [f"{f'{self._folder.path}/{name}'!r} {said}" for name in gone]

    def _fold(self, lines: Sequence[dict[str, Any]]) -> HopState:
        path, document = self._folder.path, self._document
        self._folder.check_journal(document)
        config = from_json(lines[0]["config"]) if lines and "config" in lines[0] else None
        if not isinstance(config, HopConfig):
            raise JournalError(
                f"the journal of {path!r} does not begin with its configuration; restore its first "
                "segment from a copy"
            )
        for line in lines[1:]:
            Decision.from_json(line)  # as every reader does
        state = fold(config, lines[1:])
        self._added = {number: trial.config for number, trial in state.trials.items()}
        budget = max((trial.budget for trial in state.trials.values()), default=0)
        if config != hop_config(document) or budget > document.num_epochs:
            raise JournalError(
                f"the journal of {path!r} is that of another run than {RUN_FILE} describes; "
                "restore both from one copy"
            )
        return state

    def _follow(self, records: Sequence[dict[str, Any]]) -> None:
        """Note what a sound journal says of states."""
        reported: dict[int, Digests] = {}
        for record in records:
            event = record["event"]
            if event["type"] == "SubEpochDone":
                reported[event["attempt"]] = tuple((f, t) for f, t in event["digests"])
            elif event["type"] == "TrialForked":
                self._forks.add(event["config"]["trial"])
            for told in record["instructions"]:
                if told["type"] == "Commit":
                    self._made[told["trial"], told["state"]] = reported[told["attempt"]]
                elif told["type"] == "ForkState" and (state := told["state"]):
                    self._made[told["trial"], state] = self._made[told["parent"], state]
                elif told["type"] == "ChangeCut":
                    for made in event["states"]:
                        digests = tuple((f, t) for f, t in made["digests"])
                        self._made[told["trial"], made["state"]] = digests
                elif told["type"] == "FinishTrial" and told["state"]:
                    self._results[told["trial"]] = told["state"]
                elif told["type"] == "ReopenTrial":
                    self._results.pop(told["trial"], None)

    def _trial(self, number: int) -> VerifiedPart:
        """Compare a trial and its states with the journal, and read the objects that they name."""
        problems: list[str] = []
        made = dict(self._made)
        try:
            config = trial_config(self._folder.read_trial(number, self._document.run_id))
        except CerebroHydraError as error:
            problems.append(str(error))
        else:
            made[number, 0] = config.initial_digests
            if self._added.get(number, config) != config:
                problems.append(
                    f"{TRIAL_FILE} describes another trial than the journal of "
                    f"{self._folder.path!r} adds; restore both from one copy"
                )
        states = self._folder.states(number)
        needed = set() if number in self._forks else {0}
        needed |= {self._results[number]} if number in self._results else set()
        problems += [
            f"state {state} is not in {self._folder.path!r}; restore it from a copy"
            for state in sorted(needed - set(states))
        ]
        named: set[str] = set()
        for state in states:
            try:
                document = self._folder.read_state(number, state, self._document.run_id)
            except CerebroHydraError as error:
                problems.append(str(error))
                continue
            digests = tuple((shard["frozen"], shard["trainable"]) for shard in document["shards"])
            named.update(digest for pair in digests for digest in pair)
            if digests != (expected := made.get((number, state), digests)):
                problems.append(
                    f"state {state} names the objects {digests}, but {expected} "
                    "were made; restore it from a copy"
                )
        problems += filter(None, map(self._object, sorted(named)))
        seen = f"{len(states)} states, {len(named)} objects"
        return VerifiedPart(f"{self._name}: {trial_name(number)}", seen, tuple(problems))

    def _object(self, digest: str) -> str | None:
        """Say what is wrong with an object, or None."""
        if digest not in self._objects:
            self._objects[digest] = None
            try:
                self._folder.read_object(digest)
            except StoreError as error:
                self._objects[digest] = str(error)
        return self._objects[digest]


@dataclass(frozen=True)
class VerifiedPart:
    """Says of one part of a store whether it is as it was written."""

    name: str
    """The part, such as "run 20260101-120000-abc123: journal"."""
    seen: str = ""
    """How much of it was read."""
    problems: tuple[str, ...] = ()
    """What is damaged, with the file's path, and what to do."""
    notes: tuple[str, ...] = ()
    """What is unusual and does no harm."""

    def __str__(self) -> str:
        verdict = "DAMAGED" if self.problems else "ok"
        lines = [f"{verdict:9}{self.name}{'  ' if self.seen else ''}{self.seen}"]
        lines += [f"         {problem}" for problem in self.problems]
        lines += [f"         note: {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class VerificationReport:
    """Holds every part that was read; printing it shows a line for each, and what is damaged."""

    parts: tuple[VerifiedPart, ...]

    @property
    def ok(self) -> bool:
        """Say whether everything is as it was written."""
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """List what is damaged in any part."""
        return [problem for part in self.parts for problem in part.problems]

    @property
    def summary(self) -> str:
        """Say the verdict in one line."""
        damaged = sum(bool(part.problems) for part in self.parts)
        if damaged:
            return f"{damaged} of {len(self.parts)} parts are damaged."
        return f"All {len(self.parts)} parts are as they were written."

    def __str__(self) -> str:
        return "\n".join([*map(str, self.parts), self.summary])
