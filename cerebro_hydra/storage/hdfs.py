"""Stores files on HDFS; its client is Python and Rust, without Java or libhdfs."""

from __future__ import annotations

import getpass
import os
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.storage.remote import RemoteStore

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


_CONNECT_SECONDS = 20


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
