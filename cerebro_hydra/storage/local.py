"""Stores files on a file system that every worker sees under the same path."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.storage.store import UNFINISHED, Store, Usage, explained


class LocalStore(Store):
    """Holds its files below `prefix_path`, on a local disk or in a folder that machines share.

    Args:
        prefix_path: the folder of prepared data and runs.
        train_path: a folder of Parquet files, or one file, that `search.fit_on_prepared_data()`
            trains on as it is; nothing is written there.
        val_path: such files to validate on; without it, a share of the training rows is held back.

    Raises:
        StoreError: the folder can't be created or written.
        ConfigurationError: a path is not a file system's, or there is a val_path alone.
    """

    scheme = "file"
    options = ("train_path", "val_path")

    def __init__(
        self,
        prefix_path: str | os.PathLike[str],
        train_path: str | os.PathLike[str] | None = None,
        val_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Create the prefix with its `data` and `runs` folders."""
        super().__init__(prefix_path, train_path=train_path, val_path=val_path)  # type: ignore[arg-type]

    def _name(self, prefix_path: Any, **options: Any) -> None:
        super()._name(_absolute("prefix_path", prefix_path))
        given = {name: path for name, path in options.items() if path is not None}
        if "val_path" in given and "train_path" not in given:
            raise ConfigurationError(
                f"val_path is {given['val_path']!r} and there is no train_path: give both, or "
                "neither"
            )
        for name, path in given.items():
            setattr(self, name, _absolute(name, path))

    def _create(self) -> None:
        if set(self.prefix) & set("#?"):
            raise StoreError(
                f"store prefix {self.prefix!r} holds '#' or '?', which readers of Parquet take as "
                "part of a URL: choose another folder"
            )
        for name in ("data", "runs"):
            folder = os.path.join(self.prefix, name)
            with explained("create", folder):
                os.makedirs(folder, exist_ok=True)
            with explained("write to", folder):
                if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
                    # Spark would meet it late, and say it in Java.
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def read(self, path: str) -> bytes:
        """Return the whole content of a file; StoreError if there is none."""
        with explained("read", path):
            return Path(path).read_bytes()

    def write(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """Write a file atomically: write beside it, flush that to the disk, rename it."""
        with explained("write", path), _finished_file(path, data) as unfinished:
            os.replace(unfinished, path)

    def create(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """Write a file atomically; StoreError if it is there already, which is then unchanged."""
        with explained("write", path), _finished_file(path, data) as unfinished:
            os.link(unfinished, path)
            os.unlink(unfinished)

    def exists(self, path: str) -> bool:
        """Say whether there is a file or folder at `path`."""
        return os.path.exists(path)

    def list(self, path: str) -> list[str]:
        """List sorted names in a folder, without unfinished writes; empty if there is no folder."""
        with explained("list", path):
            try:
                names = os.listdir(path)
            except FileNotFoundError:
                return []
        return sorted(name for name in names if not name.startswith(UNFINISHED))

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all in it; nothing happens if it is absent."""
        with explained("delete", path), suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def delete_unfinished(self, path: str) -> None:
        """Delete what writers below a folder left when they were killed; nobody may write there."""
        with explained("delete unfinished files in", path):
            for at, _, names in os.walk(path):
                for name in names:
                    if name.startswith(UNFINISHED):
                        os.unlink(os.path.join(at, name))

    def usage(self, path: str) -> Usage:
        """Return what a file, or a folder with all in it, takes; nothing if it is absent."""
        below = (os.path.join(at, name) for at, _, names in os.walk(path) for name in names)
        size, modified = 0, None
        with explained("look at", path):
            for each in [path] if os.path.isfile(path) else below:
                with suppress(FileNotFoundError):  # another program may write and delete meanwhile
                    found = os.stat(each)
                    size, modified = size + found.st_size, max(modified or 0.0, found.st_mtime)
        return Usage(size, modified)

    def open(self, path: str) -> BinaryIO:
        """Open a file to read parts of it; StoreError if there is none."""
        with explained("read", path):
            return Path(path).open("rb")

    def url(self, path: str) -> str:
        """Return what Spark calls the same file or folder."""
        return f"file://{path}"

    @contextmanager
    def local_copy(self, folder: str, below: str, scratch: str | None = None) -> Iterator[str]:
        """Yield the folder itself, whose files are on this machine."""
        yield folder


def _absolute(argument: str, path: Any) -> str:
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text:
        raise ConfigurationError(f"{argument} is {path!r}; give the path of a folder")
    text = text.removeprefix("file://")
    if "://" in text:
        raise ConfigurationError(
            f"{argument} is {path!r}; a LocalStore takes a path of a file system that the driver "
            "and all workers see, such as a mounted share; for hdfs:// there is HDFSStore"
        )
    return os.path.abspath(os.path.expanduser(text))


@contextmanager
def _finished_file(path: str, data: bytes | bytearray | memoryview) -> Iterator[str]:
    """Yield a file beside `path` that holds `data` on the disk, to be moved there by the caller."""
    folder = os.path.dirname(path)
    unfinished = os.path.join(folder, f"{UNFINISHED}{uuid.uuid4().hex}")
    os.makedirs(folder, exist_ok=True)
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield unfinished
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise
    # A rename lives in the folder: without this a power cut could take it back.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
