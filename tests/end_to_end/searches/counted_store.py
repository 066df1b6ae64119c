"""A store that keeps a list of all segments that were written to it and read from it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cerebro_hydra import LocalStore


@dataclass(frozen=True)
class Transfer:
    """Is one file of a store that a process has read or written."""

    kind: str  # "read" or "write"
    path: str
    nbytes: int
    pid: int

    @property
    def of_segment(self) -> bool:
        """Return whether the file holds a part of a state."""
        return "/objects/" in self.path


class CountedStore(LocalStore):
    """Is a `LocalStore` that appends a line to `transfers` in its prefix for each file."""

    def write(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """Write a file, and note its bytes."""
        super().write(path, data)
        self._note("write", path, memoryview(data).nbytes)

    def open(self, path: str) -> BinaryIO:
        """Open a file, and note its bytes, as what opens a segment reads all of it."""
        self._note("read", path, os.stat(path).st_size)
        return super().open(path)

    def transfers(self) -> list[Transfer]:
        """Return all, in their order."""
        return [Transfer(**json.loads(line)) for line in self._list.read_text().splitlines()]

    @property
    def _list(self) -> Path:
        return Path(self.prefix, "transfers")

    def _note(self, kind: str, path: str, nbytes: int) -> None:
        noted: dict[str, Any] = vars(Transfer(kind, path, nbytes, os.getpid()))
        with self._list.open("a") as file:  # one short line at once, whoever else writes
            file.write(json.dumps(noted) + "\n")
