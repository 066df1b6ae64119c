"""Keeps the files of one run: JSON documents, journal, states of trials, and shards by digest."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, BinaryIO

from cerebro_hydra.errors import JournalError, StoreError
from cerebro_hydra.storage.store import Store, checked_name

_SEGMENT = re.compile(r"(\d{8,})\.jsonl")
_STATE = re.compile(r"state-(\d{6,})\.json")


class RunFolder:
    """Reads and writes the folder of one run in a store.

    ```
    <run>/<name>                                   JSON documents, rewritten whole
    <run>/journal/00000000.jsonl                   segments, each written once
    <run>/trials/trial-000/state-000000.json       the shards of a trial's state after visit 0
    <run>/objects/<digest>.safetensors             segments of shards, by content
    ```

    Numbers that are not finite are kept as Python's JSON writes them (`NaN`, `Infinity`).
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
        path = path.rstrip("/") if "://" in path else os.path.abspath(path)
        runs, run_id = os.path.split(path)
        prefix, name = os.path.split(runs)
        there = ""
        if name == "runs":
            store = Store.at(prefix)
            if store.exists(path):
                return cls(store, run_id)
            there = f"; runs there: {store.list(runs)}"
        raise StoreError(f"{path!r} is not a run: a run is <store>/runs/<run id>{there}")

    def write_json(self, name: str, document: Any) -> None:
        """Write one JSON document, such as `run.json`, over an older one."""
        self.store.write(self._document(name), _encode(document))

    def read_json(self, name: str) -> Any:
        """Read one JSON document; StoreError if it is absent or torn."""
        return self._decode(self._document(name))

    def write_file(self, name: str, content: bytes) -> str:
        """Write a file that a person opens, such as `report.html`, and return its path."""
        path = self._document(name)
        self.store.write(path, content)
        return path

    def has_object(self, digest: str) -> bool:
        """Say whether the run holds the segment of a digest."""
        return self.store.exists(self._object(digest))

    def write_object(self, digest: str, buffer: bytes | bytearray | memoryview) -> None:
        """Keep a shard's segment under its digest; writing it again changes nothing."""
        if not self.has_object(digest):
            self.store.write(self._object(digest), buffer)

    def read_object(self, digest: str) -> bytes:
        """Return the bytes of a shard's segment; StoreError if it is absent."""
        return self.store.read(self._object(digest))

    def open_object(self, digest: str) -> BinaryIO:
        """Open a shard's segment to read it into memory of one's own; StoreError if absent."""
        return self.store.open(self._object(digest))

    def write_segment(self, number: int, lines: list[dict[str, Any]]) -> None:
        """Write journal segment `number`, one JSON object a line.

        Raises:
            StoreError: that segment exists; what is journalled never changes.
        """
        content = b"".join(_encode(line) + b"\n" for line in lines)
        self.store.create(f"{self.path}/journal/{number:08d}.jsonl", content)

    def read_segments(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the lines of each journal segment in order.

        Raises:
            JournalError: a segment before the last is missing, or a line is not JSON.
        """
        matches = map(_SEGMENT.fullmatch, self.store.list(f"{self.path}/journal"))
        numbers = sorted(int(match[1]) for match in matches if match)
        for expected, number in enumerate(numbers):
            if number != expected:
                raise JournalError(
                    f"the journal of run {self.run_id!r} has a gap: segment {expected:08d}.jsonl "
                    f"is missing before {number:08d}.jsonl; restore it from a copy of the run"
                )
            yield self._read_segment(number)

    def write_state(self, trial: int, visit: int, document: Any) -> None:
        """Write the shards and cursors of a trial's state after a visit; 0 is the initial state."""
        self.store.write(self._state(trial, visit), _encode(document))

    def read_state(self, trial: int, visit: int) -> Any:
        """Read a trial's state; StoreError if it was not written."""
        return self._decode(self._state(trial, visit))

    def states(self, trial: int) -> list[int]:
        """Return the sorted visits after which the trial's state is in this run."""
        matches = map(_STATE.fullmatch, self.store.list(f"{self.path}/trials/trial-{trial:03d}"))
        return sorted(int(match[1]) for match in matches if match)

    def sweep(self, kept: Mapping[int, Set[int]]) -> None:
        """Delete all states of trials but those to keep, then every object that no state names.

        Nobody may be writing to the run.

        Args:
            kept: visits to keep by trial; trials that are not in it keep all their states.
        """
        for trial, visits in kept.items():
            for visit in self.states(trial):
                if visit not in visits:
                    self.store.delete(self._state(trial, visit))
        named: set[str] = set()
        for name in self.store.list(f"{self.path}/trials"):
            trial = int(name.removeprefix("trial-"))
            for visit in self.states(trial):
                for shard in self.read_state(trial, visit)["shards"]:
                    named |= {shard["frozen"], shard["trainable"]}
        for name in self.store.list(f"{self.path}/objects"):
            if name.removesuffix(".safetensors") not in named:
                self.store.delete(f"{self.path}/objects/{name}")

    def _document(self, name: str) -> str:
        return f"{self.path}/{checked_name(name, 'document')}"

    def _object(self, digest: str) -> str:
        return f"{self.path}/objects/{checked_name(digest, 'digest')}.safetensors"

    def _state(self, trial: int, visit: int) -> str:
        return f"{self.path}/trials/trial-{trial:03d}/state-{visit:06d}.json"

    def _decode(self, path: str) -> Any:
        try:
            return json.loads(self.store.read(path))
        except ValueError as error:
            raise StoreError(f"{path!r} is not JSON ({error}); restore it from a copy") from error

    def _read_segment(self, number: int) -> list[dict[str, Any]]:
        path = f"{self.path}/journal/{number:08d}.jsonl"
        lines: list[dict[str, Any]] = []
        for position, line in enumerate(self.store.read(path).splitlines(), start=1):
            try:
                lines.append(json.loads(line))
            except ValueError as error:
                raise JournalError(
                    f"line {position} of {path!r} is not JSON ({error}); restore the segment "
                    "from a copy of the run"
                ) from error
        return lines


def _encode(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
