"""A file system that is reached by URL alone, and whose files every process here sees."""

from __future__ import annotations

import os
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from cerebro_hydra.storage.remote import RemoteStore


class SharedFileSystem(LocalFileSystem):
    """This machine's files, with HDFS's rename."""

    protocol = "shared"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("shared://").rstrip("/") or "/"

    def mv(self, path1: str, path2: str, overwrite: bool = False, **kwargs: Any) -> None:
        if overwrite:
            os.replace(path1, path2)
        else:
            os.link(path1, path2)
            os.unlink(path1)


class SharedStore(RemoteStore):
    """A remote store without a server; its URLs mean nothing to `open`."""

    scheme = "shared"

    def _connect(self) -> SharedFileSystem:
        return SharedFileSystem(skip_instance_cache=True)
