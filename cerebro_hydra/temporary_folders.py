"""Makes temporary folders, and deletes those whose process was killed before it could."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from contextlib import suppress

from cerebro_hydra.process_identity import begun, boot, has_ended

_NAME = re.compile(r"cerebro-hydra-[a-z]+-(\d+)-(\d+)-([0-9a-f]{16})-\w+")


def temporary_folder(what: str, where: str | None = None) -> tempfile.TemporaryDirectory[str]:
    """Make a folder whose name says what it is for, and which process has it.

    Those of dead processes of this user, boot and PID namespace beside it are deleted. Without
    Linux's files nobody can see that a process has ended, so none are.

    Args:
        what: a word.
        where: the folder that it is made in; None is the system's.
    """
    where, name = where or tempfile.gettempdir(), f"cerebro-hydra-{what}-"
    with suppress(OSError):
        own = hashlib.sha256(boot().encode()).hexdigest()[:16]
        name += f"{os.getpid()}-{begun()}-{own}-"
        _delete_left(where, own)
    return tempfile.TemporaryDirectory(prefix=name, dir=where, ignore_cleanup_errors=True)


def _delete_left(where: str, own: str) -> None:
    with os.scandir(where) as entries:
        for entry in entries:
            found = _NAME.fullmatch(entry.name)
            if found is None or found[3] != own or not has_ended(int(found[1]), found[2]):
                continue
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                shutil.rmtree(entry.path, ignore_errors=True)
