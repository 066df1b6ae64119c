"""Stores files on file systems that are reached through fsspec, and on HDFS.

The client of HDFS is Python and Rust, without Java or libhdfs.
"""

from __future__ import annotations

import getpass
import os
import socket
import tempfile
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit, urlunsplit

from cerebro_hydra.errors import ConfigurationError, SetupError, StoreError
from cerebro_hydra.storage.store import UNFINISHED, UNFINISHED_NAME, Store, Usage, explained

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


_READS = 3

_CONNECT_SECONDS = 20


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
            except (FileNotFoundError, NotADirectoryError):
                return False
            except Exception as error:
                if "(is not a directory)" in str(error):  # what HDFS says of a path below a file
                    return False
                raise
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

    def delete_one(self, path: str) -> None:
        """Delete a file, or an empty folder; a folder with something in it stays."""
        with explained("delete", path), suppress(FileNotFoundError):
            own = self._path(path)
            if not (self._files.isdir(own) and self._files.ls(own, detail=False, refresh=True)):
                self._files.rm(own, recursive=True)

    def delete_unfinished(self, path: str) -> None:
        """Delete what writers below a folder left when they were killed; nobody may write there."""
        with explained("delete unfinished files in", path):
            for found in self._files.find(self._path(path)):
                if UNFINISHED_NAME.fullmatch(str(found).rpartition("/")[2]):
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
                file.write(memoryview(data).cast("B"))  # Arrow's bytes are signed, HDFS's are not
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


class HDFSStore(RemoteStore):
    """Holds its files below a folder of HDFS.

    What the URL leaves out comes from Hadoop's own settings (`HADOOP_CONF_DIR`), which Spark reads
    too: the default file system, name services, Kerberos. Without Kerberos, HDFS believes the name
    in `HADOOP_USER_NAME`, else the login name.

    Args:
        prefix_path: the folder of prepared data and runs, as `hdfs://namenode:8020/user/me/cerebro`
            or as `/user/me/cerebro`.
        host: the name node or name service, if `prefix_path` names none.
        port: the name node's port, if `prefix_path` names none.
        user: who must be acting; this is checked here and on every worker.

    Raises:
        ConfigurationError: the path is not on HDFS, or another user is acting.
        SetupError: the client's package is not installed.
        StoreError: HDFS can't be reached, or the folder can't be created.
    """

    scheme = "hdfs"
    options = ("user",)
    user: str | None = None

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
    ) -> None:
        """Create the prefix with its `data` and `runs` folders."""
        super().__init__(prefix_path, host=host, port=port, user=user)

    def _name(self, prefix_path: str, **options: Any) -> None:
        self.user = user = options.get("user")
        acting = os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
        if user is not None and user != acting:
            raise ConfigurationError(
                f"the store is to be used by {user!r} and this process acts as {acting!r}: set "
                f"HADOOP_USER_NAME={user} before Spark starts, and for executors on other machines "
                f'.config("spark.executorEnv.HADOOP_USER_NAME", {user!r})'
            )
        super()._name(_url(prefix_path, options.get("host"), options.get("port")))

    def _connect(self) -> AbstractFileSystem:
        try:
            from hdfs_native.fsspec import HdfsFileSystem
        except ImportError as error:
            raise SetupError(
                f"HDFSStore needs the package hdfs-native ({error}): "
                "pip install 'cerebro-hydra[hdfs]', on the driver and on every worker"
            ) from error
        address = urlsplit(self.prefix)
        if address.hostname and address.port:
            # The client goes on for minutes where nobody listens; a name service has no port.
            with socket.create_connection((address.hostname, address.port), _CONNECT_SECONDS):
                pass
        # fsspec's cache would keep one connection for each thread that asks.
        return HdfsFileSystem(address.netloc, skip_instance_cache=True)


def _url(prefix_path: str, host: str | None, port: int | None) -> str:
    """Return the one form in which a prefix is kept and sent."""
    given = urlsplit(prefix_path)
    if given.scheme not in ("", "hdfs") or not given.path.startswith("/"):
        raise ConfigurationError(
            f"prefix_path is {prefix_path!r}: give an absolute path of HDFS, such as "
            "'hdfs://namenode:8020/user/me/cerebro'"
        )
    if given.netloc and (host is not None or port is not None):
        raise ConfigurationError(
            f"prefix_path {prefix_path!r} names its host already: leave host and port out"
        )
    if port is not None and host is None:
        raise ConfigurationError(f"port is {port} without a host: give both")
    netloc = given.netloc or (f"{host or ''}" if port is None else f"{host}:{port}")
    return f"hdfs://{netloc}{urlunsplit(('', '', *given[2:]))}"
