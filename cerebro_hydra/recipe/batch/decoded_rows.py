"""Keeps decoded rows in a file of scratch, as far as there is space, for the epochs to come."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SHARE = 0.5
"""The part of the free space of scratch that is left free by all who keep rows there together."""

_ABSENT = -1


def free_bytes(folder: str) -> int:
    """Return the free bytes of the file system of a folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@dataclass
class _Index:
    """Says where each row of one pool, decoded in one way, lies in the file."""

    starts: NDArray[np.int64]
    shapes: NDArray[np.int32]
    """The number of each row's shape among those that were met."""
    met: dict[tuple[int, ...], int] = field(default_factory=dict)
    listed: list[tuple[int, ...]] = field(default_factory=list)
    """The shapes by their numbers, as `met` has the numbers by shape."""


class DecodedRows:
    """Keeps tensors of uint8 by decoder, pool and row; it may be used by several threads.

    A row is written once, and read by a call that maps nothing: what is kept counts as the system's
    cache, not as memory of the process. The file has no name, and ends with the process.

    Args:
        folder: of scratch. Rows are kept until half of what is free there at first is used, by
            whomever; further ones are decoded anew each time.
        key_of: returns a key that is equal for decoders that do the same, though each trial may
            have a copy of its own; None for one that can't be told from others.
        free: tells the free bytes of the folder.
    """

    def __init__(
        self,
        folder: str,
        key_of: Callable[[Any], Hashable | None],
        free: Callable[[str], int] = free_bytes,
    ) -> None:
        self.key_of = key_of
        self._folder = folder
        self._free = free
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._left = SHARE * free(folder)
        self._full = False
        self._end = 0
        self._indexes: dict[Hashable, _Index] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes that are kept."""
        return self._end

    def get(self, key: Hashable, rows: int, row: int, make: Callable[[], Tensor]) -> Tensor:
        """Return a row that is kept, or what makes it, which is kept if there is space.

        Args:
            key: names the pool and the decoder.
            rows: the number of rows of the pool.
            row: the position of the row in it.
            make: decodes the row; what it gives is uint8, contiguous and on the CPU.
        """
        index = self._indexes.get(key)
        if index is not None and index.starts[row] != _ABSENT:
            return self._read(int(index.starts[row]), index.listed[int(index.shapes[row])])
        made = make()
        with self._lock:
            self._write(key, rows, row, made)
        return made

    def _read(self, start: int, shape: tuple[int, ...]) -> Tensor:
        found = torch.empty(shape, dtype=torch.uint8)
        memory = found.numpy().reshape(-1).data
        done = 0
        while done < len(memory):
            count = os.preadv(self._file.fileno(), [memory[done:]], start + done)  # type: ignore[union-attr]
            if not count:
                raise OSError(f"decoded rows in {self._folder!r} end before byte {start + done}")
            done += count
        return found

    def _write(self, key: Hashable, rows: int, row: int, made: Tensor) -> None:
        """Append a row, unless there is no space."""
        if self._full:
            return
        if self._free(self._folder) - made.nbytes < self._left:
            self._full = True
            return
        index = self._indexes.setdefault(
            key, _Index(np.full(rows, _ABSENT, np.int64), np.zeros(rows, np.int32))
        )
        if index.starts[row] != _ABSENT:  # another thread was first
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(  # noqa: SIM115  # it stays open
                    dir=self._folder, buffering=0
                )
            memory = made.numpy().reshape(-1).data
            done = 0
            while done < len(memory):
                done += os.pwrite(self._file.fileno(), memory[done:], self._end + done)
        except OSError:  # the disk filled meanwhile: the row is not there
            self._full = True
            return
        shape = tuple(made.shape)
        index.shapes[row] = index.met.setdefault(shape, len(index.met))
        if len(index.met) > len(index.listed):
            index.listed.append(shape)
        index.starts[row] = self._end
        self._end += made.nbytes
