"""Defines the base of stores on file systems that are reached through fsspec."""

from __future__ import annotations

import os
import tempfile
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from cerebro_hydra.errors import StoreError
from cerebro_hydra.storage.store import UNFINISHED, Store, Usage, explained

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_READS = 3


class RemoteStore(Store):
    """Holds its files below a URL; a subclass names its `scheme` and connects.

    The file system's `mv(source, target, overwrite=)` must be one atomic step: with
    `overwrite=False` it fails with FileExistsError where a target is, which decides between two
    creators. Plain object stores have no such step.

    Args:
        prefix_path: the URL of the folder of prepared data and runs.

    Raises:
        StoreError: the folder can't be created or reached.
    """

    _connected: tuple[int, AbstractFileSystem] | None = None

    def _name(self, prefix_path: str, **options: Any) -> None:
        super()._name(prefix_path.rstrip("/"))

    def _create(self) -> None:
        if set(self.prefix) & set("#?%"):
            raise StoreError(
                f"store prefix {self.prefix!r} holds '#', '?' or '%', which mean something else in "
                "a URL: choose another folder"
            )
        for name in ("data", "runs"):
            with explained("create", f"{self.prefix}/{name}"):
                self._files.makedirs(self._path(f"{self.prefix}/{name}"), exist_ok=True)

    @abstractmethod
    def _connect(self) -> AbstractFileSystem:
        """Return a file system that any thread of this process may use."""

    def read(self, path: str) -> bytes:
        """Return the whole content of a file; StoreError if there is none."""
        with explained("read", path):
            for _ in range(_READS - 1):
                try:
                    return self._files.cat_file(self._path(path))
                except FileNotFoundError:
                    raise
                except Exception:
                    # A file that is replaced while it is read can lose its bytes under the reader.
                    continue
            return self._files.cat_file(self._path(path))

    def write(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """Write a file atomically: write beside it, then rename that over it."""
        with explained("write", path), self._finished_file(path, data) as unfinished:
            self._files.mv(unfinished, self._path(path), overwrite=True)

    def create(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """Write a file atomically; StoreError if it is there already, which is then unchanged."""
        with explained("write", path), self._finished_file(path, data) as unfinished:
            self._files.mv(unfinished, self._path(path), overwrite=False)

    def exists(self, path: str) -> bool:
        """Say whether there is a file or folder at `path`."""
        with explained("look at", path):
            try:
                self._files.info(self._path(path))
            except FileNotFoundError:
                return False
            return True

    def list(self, path: str) -> list[str]:
        """List sorted names in a folder, without unfinished writes; empty if there is no folder."""
        with explained("list", path):
            try:
                paths = self._files.ls(self._path(path), detail=False, refresh=True)
            except FileNotFoundError:
                return []
        names = (str(found).rstrip("/").rpartition("/")[2] for found in paths)
        return sorted(name for name in names if not name.startswith(UNFINISHED))

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all in it; nothing happens if it is absent."""
        with explained("delete", path), suppress(FileNotFoundError):
            self._files.rm(self._path(path), recursive=True)

    def delete_unfinished(self, path: str) -> None:
        """Delete what writers below a folder left when they were killed; nobody may write there."""
        with explained("delete unfinished files in", path):
            for found in self._files.find(self._path(path)):
                if str(found).rpartition("/")[2].startswith(UNFINISHED):
                    self._files.rm_file(found)

    def usage(self, path: str) -> Usage:
        """Return what a file, or a folder with all in it, takes; nothing if it is absent."""
        size, modified = 0, None
        with explained("look at", path), suppress(FileNotFoundError):
            for name, found in self._files.find(self._path(path), detail=True).items():
                written = self._files.modified(name).timestamp()
                size, modified = size + found["size"], max(modified or 0.0, written)
        return Usage(size, modified)

    def open(self, path: str) -> BinaryIO:
        """Open a file to read parts of it; StoreError if there is none."""
        with explained("read", path):
            file: BinaryIO = self._files.open(self._path(path), "rb")
            return file

    def url(self, path: str) -> str:
        """Return the path itself, which is a URL that Spark takes."""
        return path

    @contextmanager
    def local_copy(self, folder: str, below: str, scratch: str | None = None) -> Iterator[str]:
        """Yield a folder with a copy of what lies at `below`; it is deleted afterwards."""
        with tempfile.TemporaryDirectory(prefix=".copy-", dir=scratch) as copied:
            with explained(f"copy '{folder}/{below}' to", copied):
                self._copy(self._path(f"{folder}/{below}"), os.path.join(copied, below))
            yield copied

    def _copy(self, path: str, target: str) -> None:
        if not self._files.isdir(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            self._files.get_file(path, target)
            return
        os.makedirs(target)
        for found in self._files.ls(path, detail=False, refresh=True):
            name = str(found).rstrip("/").rpartition("/")[2]
            self._copy(found, os.path.join(target, name))

    @contextmanager
    def _finished_file(self, path: str, data: bytes | bytearray | memoryview) -> Iterator[str]:
        """Yield a file beside `path` that holds `data`, to be moved there by the caller."""
        folder = self._path(path).rpartition("/")[0]
        unfinished = f"{folder}/{UNFINISHED}{uuid.uuid4().hex}"
        self._files.makedirs(folder, exist_ok=True)
        try:
            with self._files.open(unfinished, "wb") as file:
                file.write(data)
            yield unfinished
        except BaseException:
            with suppress(Exception):
                self._files.rm_file(unfinished)
            raise

    @property
    def _files(self) -> AbstractFileSystem:
        """Return the file system; a fork connects anew, since client threads don't survive it."""
        connected = self._connected
        if connected is None or connected[0] != os.getpid():
            self._connected = connected = (os.getpid(), self._connect())
        return connected[1]

    def _path(self, path: str) -> str:
        stripped: str = self._files._strip_protocol(path)
        return stripped

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which connects by itself."""
        return {**self.__dict__, "_connected": None}
