"""Keeps bytes in a file without a name, so that nothing is left of it when its process ends."""

from __future__ import annotations

import resource
import tempfile

from cerebro_hydra.shards.layout import Bytes


class ScratchFile:
    """Holds the bytes that it was made of; the file goes with the last reference to this object.

    Args:
        folder: on a disk of this machine.
        content: is written at once.

    Raises:
        OSError: the disk is full, or too few file descriptors would be left for connections.
    """

    def __init__(self, folder: str, content: Bytes) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        if self._file.fileno() > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            raise OSError("half of the process's file descriptors are in use (ulimit -n)")
        rest = content.data
        while rest:
            rest = rest[self._file.write(rest) :]

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # not if the folder was no good
            self._file.close()

    def read_into(self, buffer: Bytes) -> None:
        """Fill the buffer; one thread at a time.

        Raises:
            OSError: the disk failed.
        """
        self._file.seek(0)
        rest = buffer.data
        while count := self._file.readinto(rest):
            rest = rest[count:]
