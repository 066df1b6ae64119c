"""Keeps the files of one run: JSON documents, journal, states of trials, and shards by digest."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, islice
from typing import Any, NamedTuple

from cerebro_hydra.documents import decode
from cerebro_hydra.errors import JournalError, StoreError
from cerebro_hydra.storage.digest import (
    decode_document,
    decode_lines,
    encode_document,
    encode_lines,
)
from cerebro_hydra.storage.digest import digest as digest_of
from cerebro_hydra.storage.local_paths import path_or_url
from cerebro_hydra.storage.names import (
    checked_digest,
    checked_name,
    is_run_id,
    state_name,
    trial_name,
)
from cerebro_hydra.storage.run_document import (
    RUN_FILE,
    SEARCH_FILE,
    TRIAL_FILE,
    Cursor,
    RunDocument,
    StateDocument,
    TrialDocument,
    TrialSpec,
)
from cerebro_hydra.storage.store import Store, explained, require_memory

READ_BYTES = 4 << 20
"""How much of an object is read at once."""

_OBJECT = re.compile(r"([0-9a-f]{32})\.safetensors")
_TRIAL = re.compile(r"trial-(\d{3,})", re.ASCII)
_STATE = re.compile(r"state-(\d{6,})\.json", re.ASCII)

_SEGMENT = re.compile(r"(\d{8,})(?:-(\d{8,}))?\.jsonl", re.ASCII)


class DamagedObject(StoreError):
    """The bytes of an object have another digest than its name says."""


class RunFolder:
    """Reads and writes the folder of one run in a store.

    ```
    <run>/<name>                                   JSON documents, rewritten whole
    <run>/journal/00000000.jsonl                   segments, each written once
    <run>/journal/00000000-00000255.jsonl          segments that were merged
    <run>/trials/trial-000/trial.json              what the trial is
    <run>/trials/trial-000/state-000000.json       the shards of a trial's initial state
    <run>/objects/<digest>.safetensors             segments of shards, by content
    ```

    Documents and segments end with a digest of their bytes, and an object's name is the digest of
    its bytes. Whatever is read is compared with its digest first, so that damage raises.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        """Name a run; its folder appears with the first write."""
        self.store = store
        self.run_id = run_id
        self.path = store.run_path(run_id)

    @classmethod
    def open(cls, path: str) -> RunFolder:
        """Open the folder of a run that exists, only to read it.

        Raises:
            StoreError: there is no run at `path`.
        """
        path = path_or_url("run_path", path)
        runs, run_id = os.path.split(path)
        prefix, name = os.path.split(runs)
        there = ""
        if name == "runs":
            store = Store.at(prefix)
            if store.exists(path):
                return cls(store, run_id)
            there = f"; runs there: {runs_in(store)}"
        raise StoreError(f"{path!r} is not a run: a run is <store>/runs/<run id>{there}")

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Write one JSON document, such as `run.json`, over an older one."""
        self.store.write(self._document(name), encode_document(document))

    def read_json(self, name: str) -> dict[str, Any]:
        """Read one JSON document; StoreError if it is absent or damaged."""
        return self._read(self._document(name))

    def write_file(self, name: str, content: bytes) -> str:
        """Write a file that a person opens, such as `report.html`, and return its path."""
        path = self._document(name)
        self.store.write(path, content)
        return path

    def has_object(self, digest: str) -> bool:
        """Say whether the run holds the segment of a digest."""
        return self.store.exists(self._object(digest))

    def missing_objects(self, digests: Iterable[str]) -> list[str]:
        """Return those digests whose objects are no plain files of the run; nothing is read."""
        there = set(self.store.list(f"{self.path}/objects"))
        local = self.store.scheme == "file"  # elsewhere there are plain files alone

        def is_missing(digest: str) -> bool:
            path = self._object(digest)
            absent = path.rpartition("/")[2] not in there
            return absent or (local and self.store.usage(path).modified is None)

        return [each for each in dict.fromkeys(digests) if is_missing(each)]

    def write_object(self, digest: str, buffer: bytes | bytearray | memoryview) -> None:
        """Keep a shard's segment under its digest; writing it again changes nothing."""
        if not self.has_object(digest):
            self.store.write(self._object(digest), buffer)

    def read_object(self, digest: str, allocate: Callable[[int], Any] = bytearray) -> Any:
        """Return a shard's segment, read into the memory that `allocate` gives for so many bytes.

        Raises:
            DamagedObject: its bytes have another digest.
            StoreError: it is absent, or can't be read.
        """
        path = self._object(digest)
        with self.store.open(path) as file, explained("read", path):
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(0)
            require_memory(size, path)
            buffer = allocate(size)
            rest = memoryview(buffer)
            # Not readinto, which the files of HDFS lack.
            while rest and (chunk := file.read(min(len(rest), READ_BYTES))):
                rest[: len(chunk)] = chunk
                rest = rest[len(chunk) :]
        if (found := digest_of(buffer)) != digest:
            raise DamagedObject(
                f"object {digest} is damaged: the {size} bytes of {path!r} have the digest "
                f"{found}; restore the file from a copy, or train its trial again in a new run"
            )
        return buffer

    def write_segment(self, number: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write journal segment `number`, one JSON object a line.

        Raises:
            StoreError: that segment exists; what is journalled never changes.
            JournalError: another program has written it, and merged it with others meanwhile.
        """
        single = SegmentRange(number, number)
        self._create_segment(single, lines)
        # Its name is free again after a merge, and no reader would look at it.
        if any(each.first <= number <= each.last and each != single for each in self._segments()):
            self.store.delete_one(self._segment(single))
            raise _of_another(self._segment(single))

    def holds_segment(self, number: int, lines: Sequence[Mapping[str, Any]]) -> bool:
        """Say whether a segment is there with just these lines.

        Raises:
            JournalError: it is there with others.
        """
        path = self._segment(SegmentRange(number, number))
        if not self.store.exists(path):
            return False
        if self.store.read(path) != encode_lines(lines):
            raise _of_another(path)
        return True

    def journal_end(self) -> tuple[int, int]:
        """Return the first of the last segments that are not merged, and the next free number."""
        merged = end = 0
        for segment in self._segments():
            end = max(end, segment.last + 1)
            if segment.first != segment.last:
                merged = max(merged, segment.last + 1)
        return merged, end

    def merge_segments(self, first: int, last: int) -> None:
        """Put the segments from `first` to `last` into one file and delete those that held one.

        After a crash at any point every line is still there: the new file is whole before the first
        old one is deleted, and readers skip what it contains.

        Raises:
            JournalError: one of the segments is missing or damaged; nothing is deleted.
        """
        singles = [SegmentRange(number, number) for number in range(first, last + 1)]
        lines: list[dict[str, Any]] = []
        for single in singles:
            if (found := self._read_segment(single)) is None:
                raise JournalError(f"{self._segment(single)!r} is missing; nothing was merged")
            lines += found
        self._create_segment(SegmentRange(first, last), lines)
        for single in singles:
            self.store.delete_one(self._segment(single))

    def read_segments(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the lines of each journal segment in order, or of several that were merged.

        The run may go on meanwhile: a segment that is merged while it is read counts once.

        Raises:
            JournalError: a segment before the last is missing, or one is damaged.
        """
        read: list[tuple[int, int]] = []  # the first segment and the number of lines of each file
        expected, listed_anew = 0, False
        left = deque(self._segments())
        while left:
            segment = left.popleft()
            if segment.last < expected:  # a crash kept the merge from deleting it
                continue
            lines = self._read_segment(segment) if segment.first <= expected else None
            if lines is not None:
                known = sum(count for first, count in read if first >= segment.first)
                read.append((segment.first, len(lines)))
                yield lines[known:]
                expected, listed_anew = segment.last + 1, False
            elif not listed_anew:  # it may have been merged with others since they were listed
                left, listed_anew = deque(self._segments()), True
            else:
                raise JournalError(
                    f"the journal of run {self.run_id!r} has a gap: segment {expected:08d}.jsonl "
                    f"is missing before {segment.name}; restore it from a copy of the run"
                )

    def read_records(self) -> Iterator[dict[str, Any]]:
        """Yield the journal's lines after the configuration, each the record of one event.

        Raises:
            JournalError: the journal is damaged, or a record does not stand at its place.
        """
        lines = chain.from_iterable(self.read_segments())
        for seq, line in enumerate(islice(lines, 1, None)):
            if line.get("seq") != seq:
                raise JournalError(
                    f"the journal of run {self.run_id!r} has record {line.get('seq')!r} where "
                    f"{seq} belongs; restore its files from a copy under their own names"
                )
            yield line

    def write_trial(self, spec: TrialSpec) -> None:
        """Write what a trial is, which makes it a trial of the run."""
        document = TrialDocument(run_id=self.run_id, spec=spec.to_json())
        self.store.write(self._trial(spec.trial), encode_document(document))

    def read_trial(self, trial: int, run_id: str) -> TrialSpec:
        """Read what a trial is.

        Args:
            run_id: the run of `run.json`.

        Raises:
            StoreError: the document is absent, damaged or that of another trial.
            JournalError: it is that of another run.
        """
        path = self._trial(trial)
        document: TrialDocument = decode(TrialDocument, self._read(path), repr(path))
        _check_run(document, path, run_id)
        spec = TrialSpec.from_json(document["spec"], f"{path!r}['spec']")
        if spec.trial != trial:
            raise StoreError(f"{path!r} is of {spec.trial_id}; restore it from a copy")
        return spec

    def trials(self) -> list[int]:
        """Return the sorted numbers of the run's trials, each of which can be read."""
        return [each for each in self._trial_folders() if self.store.exists(self._trial(each))]

    def write_state(self, trial: int, state: int, document: Mapping[str, Any]) -> None:
        """Write the shards and cursors of a state of a trial; 0 is the initial state."""
        named = {"run_id": self.run_id, **document}
        self.store.write(self._state(trial, state), encode_document(named))

    def read_state(self, trial: int, state: int, run_id: str | None = None) -> StateDocument:
        """Read a trial's state.

        Args:
            run_id: the run of `run.json`, if the state is to be compared with it.

        Raises:
            StoreError: the state is absent, damaged or another one.
            JournalError: it is that of another run.
        """
        path = self._state(trial, state)
        document: StateDocument = decode(StateDocument, self._read(path), repr(path))
        if (document["trial"], document["state"]) != (trial, state):
            raise StoreError(
                f"{path!r} holds state {document['state']} of trial "
                f"{document['trial']}; restore it from a copy"
            )
        if run_id is not None:
            _check_run(document, path, run_id)
        return document

    def check_journal(self, document: RunDocument) -> None:
        """Compare the run that the journal names with that of `run.json`.

        Raises:
            JournalError: the journal is damaged, or that of another run.
        """
        for line in islice(chain.from_iterable(self.read_segments()), 1):
            _check_run(line, f"{self.path}/journal", document.run_id)

    def fork_state(self, trial: int, parent: int, state: int, partitions: int) -> None:
        """Name another trial's state as this trial's own; no segment is copied.

        Of its cursors only the place in training is taken over, with the scale of losses: the
        options of the optimizer and the LR schedule are those of the fork's own parameters.
        """
        shards = self.read_state(parent, state, self.run_id)["shards"]
        for shard in shards:
            if shard["cursor"]:
                epochs = (state - 1) // partitions
                cursor: Cursor = {"step": shard["cursor"]["step"], "epochs": epochs}
                if "scaler" in shard["cursor"]:
                    cursor["scaler"] = shard["cursor"]["scaler"]
                shard["cursor"] = cursor
        self.write_state(trial, state, {"state": state, "shards": shards, "trial": trial})

    def delete_state(self, trial: int, state: int) -> None:
        """Delete the document of a trial's state, whose segments stay."""
        self.store.delete_one(self._state(trial, state))

    def delete_object(self, digest: str) -> None:
        """Delete a segment that no state names."""
        self.store.delete_one(self._object(digest))

    def states(self, trial: int) -> list[int]:
        """Return the trial's states that are in this run, sorted."""
        matches = map(_STATE.fullmatch, self.store.list(f"{self.path}/trials/{trial_name(trial)}"))
        return sorted(int(match[1]) for match in matches if match)

    def objects(self) -> list[str]:
        """Return the sorted digests of all segments in the run, without others' files."""
        found = map(_OBJECT.fullmatch, self.store.list(f"{self.path}/objects"))
        return [match[1] for match in found if match]

    def models(self) -> list[str]:
        """Return the sorted ids of the trials that have a folder among the kept models."""
        return [name for name in self.store.list(f"{self.path}/models") if _TRIAL.fullmatch(name)]

    def sweep(self, kept: Mapping[int, Set[int]]) -> None:
        """Delete unfinished files, all states but those to keep, and objects that no state names.

        Nobody may be writing to the run. What others put there stays.

        Args:
            kept: states to keep by trial; trials that are not in it keep all their states.
        """
        self.store.delete_unfinished(self.path)
        for trial, states in kept.items():
            for state in self.states(trial):
                if state not in states:
                    self.delete_state(trial, state)
        named: set[str] = set()
        for trial in self._trial_folders():
            for state in self.states(trial):
                for shard in self.read_state(trial, state)["shards"]:
                    named |= {shard["frozen"], shard["trainable"]}
        for digest in self.objects():
            if digest not in named:
                self.delete_object(digest)

    def forget_begun(self) -> None:
        """Delete what was written of a run before it began; what others put there stays.

        Nobody may be writing to the run, which has no journal.
        """
        self.store.delete_unfinished(self.path)
        for name in (RUN_FILE, SEARCH_FILE):
            self.store.delete_one(self._document(name))
        for trial in self._trial_folders():
            for state in self.states(trial):
                self.delete_state(trial, state)
            self.store.delete_one(self._trial(trial))
            self.store.delete_one(f"{self.path}/trials/{trial_name(trial)}")
        for digest in self.objects():
            self.delete_object(digest)
        for name in ("trials", "objects"):
            self.store.delete_one(f"{self.path}/{name}")
        self.store.delete_one(self.path)

    def _document(self, name: str) -> str:
        return f"{self.path}/{checked_name(name, 'document')}"

    def _object(self, digest: str) -> str:
        return f"{self.path}/objects/{checked_digest(digest)}.safetensors"

    def _trial_folders(self) -> list[int]:
        matches = map(_TRIAL.fullmatch, self.store.list(f"{self.path}/trials"))
        return sorted(int(match[1]) for match in matches if match)

    def _trial(self, trial: int) -> str:
        return f"{self.path}/trials/{trial_name(trial)}/{TRIAL_FILE}"

    def _state(self, trial: int, state: int) -> str:
        return f"{self.path}/trials/{trial_name(trial)}/{state_name(state)}"

    def _read(self, path: str) -> dict[str, Any]:
        return decode_document(path, self.store.read(path))

    def _segments(self) -> list[SegmentRange]:
        return in_order(self.store.list(f"{self.path}/journal"))

    def _segment(self, segment: SegmentRange) -> str:
        return f"{self.path}/journal/{segment.name}"

    def _create_segment(self, segment: SegmentRange, lines: Sequence[Mapping[str, Any]]) -> None:
        self.store.create(self._segment(segment), encode_lines(lines))

    def _read_segment(self, segment: SegmentRange) -> list[dict[str, Any]] | None:
        """Return the lines of a file of the journal, or None if there is none."""
        path = self._segment(segment)
        try:
            content = self.store.read(path)
        except StoreError:
            if self.store.exists(path):
                raise
            return None
        try:
            return decode_lines(path, content)
        except StoreError as error:
            raise JournalError(str(error)) from error


def _check_run(part: Mapping[str, Any], path: str, run_id: str) -> None:
    """Raise JournalError if files of several runs were mixed."""
    if part.get("run_id") != run_id:
        raise JournalError(
            f"{path!r} is of run {part.get('run_id')!r}, and {RUN_FILE} beside it of run "
            f"{run_id!r}; restore both from one copy"
        )


def write_search(folder: RunFolder, given: Mapping[str, Any]) -> str | None:
    """Write what the search of a run begins with, if anything, and return the digest of it."""
    if not given:
        return None
    folder.write_json(SEARCH_FILE, given)
    return digest_of(encode_document(given))


def read_search(folder: RunFolder, document: RunDocument) -> dict[str, Any]:
    """Read what the search of a run began with; it is empty if the run has nothing of the kind.

    Raises:
        StoreError: it is gone or damaged, or that of another run.
    """
    path = f"{folder.path}/{SEARCH_FILE}"
    if not folder.store.exists(path):
        if document.search is None:
            return {}
        raise StoreError(
            f"{path!r} is gone, and the run began with it: without it nobody sees whether a search "
            "has the run's arguments; restore it from a copy, or begin a new run"
        )
    found = folder.read_json(SEARCH_FILE)
    if document.search not in (None, digest_of(encode_document(found))):
        raise StoreError(f"{path!r} is not what the run began with; restore it from a copy")
    return found


def runs_in(store: Store) -> list[str]:
    """Return the sorted names of the runs of a store, without what others put beside them.

    A run that somebody renamed is known by its document, and its name may be one of no run.
    """
    return [name for name in store.list(f"{store.prefix}/runs") if _is_run(store, name)]


def require_run(folder: RunFolder) -> None:
    """Refuse to write to what others put beside the runs of a store.

    Raises:
        StoreError: the folder is no run.
    """
    if not _is_run(folder.store, folder.run_id):
        raise StoreError(
            f"{folder.path!r} is not a run: a run is <store>/runs/<run id>, and nothing is written "
            "to what others put there"
        )


def _is_run(store: Store, name: str) -> bool:
    return is_run_id(name) or store.exists(f"{store.prefix}/runs/{name}/{RUN_FILE}")


def read_document(folder: RunFolder) -> RunDocument:
    """Read what a run is; StoreError if the document is absent or damaged."""
    return RunDocument.from_json(folder.read_json(RUN_FILE), repr(f"{folder.path}/{RUN_FILE}"))


class SegmentRange(NamedTuple):
    """Names the file of the segments from `first` to `last`: `00000007.jsonl`, `0...0-0...7.jsonl`.

    The ranges of a journal are disjoint or one contains the other, because a file is merged once.
    """

    first: int
    last: int

    @property
    def name(self) -> str:
        """Return the file's name."""
        end = "" if self.first == self.last else f"-{self.last:08d}"
        return f"{self.first:08d}{end}.jsonl"


def in_order(names: Iterable[str]) -> list[SegmentRange]:
    """Return the ranges of a folder's files by their first segment, the widest of these first."""
    found = (match for match in map(_SEGMENT.fullmatch, names) if match)
    ranges = (SegmentRange(int(each[1]), int(each[2] or each[1])) for each in found)
    return sorted(ranges, key=lambda each: (each.first, -each.last))


def _of_another(path: str) -> JournalError:
    return JournalError(
        f"{path!r} was written by another program, which runs or resumes the same run; let only "
        "one of them go on"
    )
