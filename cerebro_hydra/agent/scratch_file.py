"""Keeps bytes in a file without a name, so that nothing is left of it when its process ends."""

from __future__ import annotations

import errno
import os
import resource
import tempfile

from cerebro_hydra.errors import ScratchFull
from cerebro_hydra.plan.human_units import bytes_text
from cerebro_hydra.shards.layout import Bytes


class ScratchFile:
    """Holds the bytes that it was made of; the file goes with the last reference to this object.

    Args:
        folder: on a disk of this machine.
        content: is written at once.

    Raises:
        ScratchFull: the disk has no room for the whole content; nothing of it is kept.
        OSError: the folder is no good, or too few file descriptors would be left for connections.
    """

    def __init__(self, folder: str, content: Bytes) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            if self._file.fileno() > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
                raise OSError("half of the process's file descriptors are in use (ulimit -n)")
            if content.nbytes:  # all of it has room before any of it is written
                os.posix_fallocate(self._file.fileno(), 0, content.nbytes)
            rest = content.data
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._close()  # whoever handles the error may hold this object
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ScratchFull(_refusal(folder, content.nbytes, error)) from error
            raise

    def __del__(self) -> None:
        self._close()

    def read_into(self, buffer: Bytes) -> None:
        """Fill the buffer; one thread at a time.

        Raises:
            OSError: the disk failed.
        """
        self._file.seek(0)
        rest = buffer.data
        while count := self._file.readinto(rest):
            rest = rest[count:]

    def _close(self) -> None:
        if hasattr(self, "_file"):  # not if the folder was no good
            self._file.close()


def _refusal(folder: str, nbytes: int, error: OSError) -> str:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    return (
        f"can't write {bytes_text(nbytes)} to the scratch folder {folder!r}: {error.strerror}, "
        f"{bytes_text(free)} are free; free space there, or give the backend another scratch or a "
        "larger host_memory"
    )
