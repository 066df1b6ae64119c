"""Defines the contract of stores, which hold whole files by path, below one prefix.

`LocalStore` keeps them on a file system that every worker sees under the same path.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import stat
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, BinaryIO, ClassVar, NamedTuple

from cerebro_hydra.available_memory import available_memory
from cerebro_hydra.documents import decode
from cerebro_hydra.errors import CerebroHydraError, ConfigurationError, StoreError, kind_of
from cerebro_hydra.storage.local_paths import local_path
from cerebro_hydra.storage.names import checked_name

UNFINISHED = ".unfinished-"
"""How the names of files begin that are still written."""

UNFINISHED_NAME = re.compile(rf"{re.escape(UNFINISHED)}[0-9a-f]{{32}}")

_SMALL = 64 << 20  # bytes that are read without a look at how much memory there is


class Usage(NamedTuple):
    """Tells what files take in a store: their bytes, and when the latest was written.

    `modified` is in seconds since 1970, by the clock of the store; None if there is no file.
    """

    bytes: int
    modified: float | None


class Store(ABC):
    """Holds prepared data under `<prefix>/data` and runs under `<prefix>/runs`.

    A file is whole or absent: a reader, in this process or another, never sees part of a `write`,
    not even after a crash in the middle of one. Two writers of one path leave one of the two
    contents; of two creators exactly one succeeds. Every method may be called from any thread, and
    a store holds nothing but its paths, so that its dictionary rebuilds it in another process.

    `train_path` and `val_path` name Parquet files that somebody else wrote; they are trained and
    validated on as they are, and nothing is ever written there.
    """

    scheme: ClassVar[str] = ""
    """The scheme of its files' URLs, which finds the store of a run."""
    options: ClassVar[tuple[str, ...]] = ()
    """The attributes beside `prefix` that its description holds where they are not None."""
    train_path: str | None = None
    val_path: str | None = None
    _kinds: ClassVar[dict[str, type[Store]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the subclass by its name, for `from_dict`."""
        super().__init_subclass__(**kwargs)
        Store._kinds[cls.__name__] = cls

    def __init__(self, prefix_path: str, **options: Any) -> None:
        """Name the paths and create the folders."""
        self._name(prefix_path, **options)
        self._create()

    def _name(self, prefix_path: str, **options: Any) -> None:
        """Keep the paths and options; nothing is created, asked or connected."""
        self.prefix = prefix_path

    @abstractmethod
    def _create(self) -> None:
        """Create the prefix with its `data` and `runs` folders; StoreError if that fails."""

    def data_path(self, fingerprint: str) -> str:
        """Return the folder of one data set."""
        return f"{self.prefix}/data/{checked_name(fingerprint, 'data fingerprint')}"

    def run_path(self, run_id: str) -> str:
        """Return the folder of one run."""
        return f"{self.prefix}/runs/{checked_name(run_id, 'run id')}"

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the whole content of a file; StoreError if there is none."""

    @abstractmethod
    def write(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """Write a file atomically, with the folders above it, over one that may be there."""

    @abstractmethod
    def create(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """Write a file atomically; StoreError if it is there already, which is then unchanged."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Say whether there is a file or folder at `path`."""

    @abstractmethod
    def list(self, path: str) -> list[str]:
        """List sorted names in a folder, without unfinished writes; empty if there is no folder."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all in it; nothing happens if it is absent.

        A link that lies below `data` or `runs` is deleted itself, and nothing behind it.

        Raises:
            StoreError: the path leads through such a link, or it can't be deleted.
        """

    @abstractmethod
    def delete_one(self, path: str) -> None:
        """Delete a file, or an empty folder; nothing happens if it is absent.

        A folder with something in it stays, because a file of ours is no folder.

        Raises:
            StoreError: as of `delete`.
        """

    @abstractmethod
    def delete_unfinished(self, path: str) -> None:
        """Delete what writers below a folder left when they were killed; nobody may write there."""

    @abstractmethod
    def usage(self, path: str) -> Usage:
        """Return what a file, or a folder with all in it, takes; nothing if it is absent."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """Open a file to read parts of it; StoreError if there is none."""

    @abstractmethod
    def url(self, path: str) -> str:
        """Return what Spark calls the same file or folder."""

    @abstractmethod
    def local_copy(
        self, folder: str, below: str, scratch: str | None = None
    ) -> AbstractContextManager[str]:
        """Yield a folder of this machine that has what lies at the path `below` in `folder`.

        A copy lies in `scratch`, or among temporary files, and is deleted afterwards.
        """

    @classmethod
    def existing(cls, prefix_path: str) -> Store:
        """Open a store only to read it; nothing is created, StoreError if there is none."""
        store = cls.__new__(cls)
        store._name(prefix_path)
        if not store.exists(store.prefix):
            raise StoreError(f"there is no store at {prefix_path!r}: check the path")
        return store

    @staticmethod
    def at(prefix_path: str) -> Store:
        """Open a store by its prefix alone, only to read it; the URL's scheme tells its class.

        Raises:
            StoreError: there is no store, or no kind of that scheme was imported here.
        """
        scheme = prefix_path.partition("://")[0] if "://" in prefix_path else "file"
        for kind in Store._kinds.values():
            if kind.scheme == scheme:
                return kind.existing(prefix_path)
        known = sorted({kind.scheme for kind in Store._kinds.values()} - {""})
        raise StoreError(
            f"no store is known for {prefix_path!r}: known are {known}; import the module that "
            f"defines one for {scheme!r}"
        )

    def to_dict(self) -> dict[str, str]:
        """Describe the store in JSON, for another process."""
        options = {name: getattr(self, name) for name in self.options}
        given = {name: value for name, value in options.items() if value is not None}
        return {"type": type(self).__name__, "prefix_path": self.prefix, **given}

    @staticmethod
    def from_dict(description: Any) -> Store:
        """Rebuild a store from `to_dict`; nothing is created before something is written.

        Raises:
            StoreError: no store of that type was imported here, or it has no such option.
            ConfigurationError: the store refuses an option.
        """
        options = decode(dict[str, str], description, "the description of a store")
        kind = Store._kinds.get(name := options.pop("type", ""))
        if kind is None:
            raise StoreError(
                f"unknown store type {name!r}: known are {sorted(Store._kinds)}; "
                "import the module that defines it"
            )
        if "prefix_path" not in options or options.keys() - {"prefix_path", *kind.options}:
            raise StoreError(
                f"the description of a {name} is {options!r}; it has prefix_path, and may have "
                f"{list(kind.options)}"
            )
        store = kind.__new__(kind)
        store._name(**options)
        return store


@contextmanager
def explained(action: str, path: str) -> Iterator[None]:
    """Turn whatever a file system or its client raises into a StoreError that says what to do."""
    try:
        yield
    except CerebroHydraError:
        raise
    except Exception as error:
        # A Java server adds its stack to the message, below the first line.
        text = str(getattr(error, "strerror", None) or error)
        said = text.split("\\n")[0].split("\n")[0].strip() or type(error).__name__
        raise StoreError(f"can't {action} {path!r}: {said}; {_remedy(error)}") from error


def _remedy(error: Exception) -> str:
    match error:
        case FileNotFoundError():
            return "check the path"
        case FileExistsError():
            return "it exists already and may not change: delete it, or use another name"
        case NotADirectoryError():
            return "a part of the path is a file: choose another folder"
        case IsADirectoryError():
            return "choose another name or folder"
        case OSError(errno=errno.EROFS):
            return "the file system is read-only: choose another folder"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return "the disk is full: free space or choose another disk"
        case OSError(errno=errno.EFBIG):
            return "it is larger than a file may be here: raise the limit (ulimit -f)"
        case ConnectionError() | TimeoutError() | socket.gaierror():
            return "check that the server runs, and its host and port"
        case _ if isinstance(error, PermissionError) or "AccessControlException" in str(error):
            return "choose a folder that this user may write, or change its permissions"
        case _:
            return "check the file system"


def require_store(store: object) -> None:
    """Refuse an argument that is not a store.

    Raises:
        ConfigurationError: it is something else, such as a path.
    """
    if not isinstance(store, Store):
        raise ConfigurationError(
            f"store is {store!r}, {kind_of(store)}; give a store, such as "
            'LocalStore(prefix_path="/some/folder")'
        )


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
        with self.open(path) as file, explained("read", path):
            require_memory(os.fstat(file.fileno()).st_size, path)
            return file.read()

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
            except OSError as error:
                if error.errno != errno.ELOOP:  # a link to itself leads to no folder
                    raise
                return []
        return sorted(name for name in names if not name.startswith(UNFINISHED))

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all in it; nothing happens if it is absent."""
        with explained("delete", path), suppress(FileNotFoundError):
            self._require_no_link_above(path)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def delete_one(self, path: str) -> None:
        """Delete a file, or an empty folder; a folder with something in it stays."""
        with explained("delete", path), suppress(FileNotFoundError):
            self._require_no_link_above(path)
            if not os.path.isdir(path) or os.path.islink(path):
                os.unlink(path)
            elif not os.listdir(path):
                os.rmdir(path)

    def delete_unfinished(self, path: str) -> None:
        """Delete what writers below a folder left when they were killed; nobody may write there."""
        with explained("delete unfinished files in", path):
            self._require_no_link_above(f"{path}/{UNFINISHED}")
            for at, _, names in os.walk(path):
                for name in names:
                    if UNFINISHED_NAME.fullmatch(name):
                        os.unlink(os.path.join(at, name))

    def _require_no_link_above(self, path: str) -> None:
        """Raise StoreError if a folder on the way to a path of the store is a link.

        The store itself may lie behind links, and so may its folders `data` and `runs`.
        """
        folders = os.path.relpath(path, self.prefix).split(os.sep)[:-1]
        for depth in range(2, len(folders) + 1):
            folder = os.path.join(self.prefix, *folders[:depth])
            if os.path.islink(folder):
                raise StoreError(
                    f"{path!r} is not deleted, because {folder!r} is a link to "
                    f"{os.path.realpath(folder)!r}: put a folder in its place, or delete what lies "
                    "there yourself"
                )

    def usage(self, path: str) -> Usage:
        """Return what a file, or a folder with all in it, takes; links are not followed."""
        below = (os.path.join(at, name) for at, _, names in os.walk(path) for name in names)
        size, modified = 0, None
        with explained("look at", path):
            for each in [path] if os.path.isfile(path) else below:
                with suppress(FileNotFoundError):  # another program may write and delete meanwhile
                    found = os.stat(each, follow_symlinks=False)
                    size, modified = size + found.st_size, max(modified or 0.0, found.st_mtime)
        return Usage(size, modified)

    def open(self, path: str) -> BinaryIO:
        """Open a file to read parts of it; StoreError if there is none, or it is no plain file."""
        with explained("read", path):
            _require_plain(os.stat(path), path)  # because opening a device may do something
            # Not blocking, should it be a FIFO by now.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                _require_plain(os.fstat(descriptor), path)
                return os.fdopen(descriptor, "rb")
            except BaseException:
                os.close(descriptor)
                raise

    def url(self, path: str) -> str:
        """Return what Spark calls the same file or folder."""
        return f"file://{path}"

    @contextmanager
    def local_copy(self, folder: str, below: str, scratch: str | None = None) -> Iterator[str]:
        """Yield the folder itself, whose files are on this machine."""
        yield folder


def _absolute(argument: str, given: Any) -> str:
    if (path := local_path(argument, given)) is None:
        instead = "for hdfs:// there is HDFSStore"
        if "dbfs:" in str(given).lower():
            instead = "dbfs:/x is mounted as /dbfs/x"
        raise ConfigurationError(
            f"{argument} is {given!r}; a LocalStore takes a path of a file system that the driver "
            f"and all workers see, such as a mounted share; {instead}"
        )
    return path


def require_memory(nbytes: int, path: str) -> None:
    """Refuse to read a file for which there is no memory, before any of it is read.

    Raises:
        StoreError: there is none.
    """
    if nbytes > _SMALL and nbytes > available_memory():
        raise StoreError(
            f"{path!r} has {nbytes:,} bytes, and this process may take {available_memory():,.0f} "
            "bytes of memory: restore the file from a copy, or read it on a larger machine"
        )


def _require_plain(found: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(found.st_mode), "a device")
        raise StoreError(f"{path!r} is {kind} and no plain file: restore it from a copy")


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
