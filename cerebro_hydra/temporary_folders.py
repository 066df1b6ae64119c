"""Makes temporary folders, and deletes those whose process was killed before it could."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cerebro_hydra.process_identity import begun, boot, has_ended

_SHARED = re.compile(r"cerebro-hydra-[0-9a-f]{32}")
_OWNER = re.compile(r"owner-(\d+)-(\d+)-([0-9a-f]{16})")
_OF_WORKER = re.compile(r"worker-\d+")
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
        name += f"{os.getpid()}-{begun()}-{_boot()}-"
        _delete_left(where, _boot())
    return tempfile.TemporaryDirectory(prefix=name, dir=where, ignore_cleanup_errors=True)


def _delete_left(where: str, own: str) -> None:
    with os.scandir(where) as entries:
        for entry in entries:
            found = _NAME.fullmatch(entry.name)
            if found is None or found[3] != own or not has_ended(int(found[1]), found[2]):
                continue
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                shutil.rmtree(entry.path, ignore_errors=True)


def shared_folder(name: str, where: str) -> str:
    """Make the folder of a run's workers on this machine, and note in it that this process has one.

    Such folders of other runs, all of whose processes were killed, are deleted as by
    `temporary_folder`.

    Args:
        name: "cerebro-hydra-" and 32 hex digits, which no other run has.
        where: the folder that it is made in.
    """
    folder = os.path.join(where, name)
    os.makedirs(where, exist_ok=True)
    with _locked(where):
        os.makedirs(folder, exist_ok=True)
        with suppress(OSError), open(_owner(folder), "wb"):
            pass
    with suppress(OSError), _locked(where, fcntl.LOCK_NB) as locked:
        if locked:
            _delete_shared(where, folder)
    return folder


def leave_shared_folder(folder: str) -> None:
    """Note that this process has no worker any more; the last one deletes the folder."""
    with suppress(OSError), _locked(os.path.dirname(folder)):
        os.unlink(_owner(folder))
        os.rmdir(folder)


def _boot() -> str:
    return hashlib.sha256(boot().encode()).hexdigest()[:16]


def _owner(folder: str) -> str:
    return f"{folder}/owner-{os.getpid()}-{begun()}-{_boot()}"


@contextmanager
def _locked(folder: str, how: int = 0) -> Iterator[bool]:
    """Let no other process make or delete shared folders here; False where that can't be had."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        locked = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | how)
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def _delete_shared(where: str, kept: str) -> None:
    """Delete the shared folders that have owners, all of which were processes seen from here."""
    own = _boot()
    with os.scandir(where) as entries:
        for entry in entries:
            if not _SHARED.fullmatch(entry.name) or entry.path == kept:
                continue
            found = entry.stat(follow_symlinks=False)
            if not entry.is_dir(follow_symlinks=False) or found.st_uid != os.geteuid():
                continue
            names = os.listdir(entry.path)
            owners = [each for each in map(_OWNER.fullmatch, names) if each]
            if not owners or any(o[3] != own or not has_ended(int(o[1]), o[2]) for o in owners):
                continue
            with suppress(OSError):
                for name in filter(_OF_WORKER.fullmatch, names):
                    shutil.rmtree(f"{entry.path}/{name}")
                # What says whose they were goes last: a kill before that leaves nothing for ever.
                for each in owners:
                    os.unlink(f"{entry.path}/{each[0]}")
                os.rmdir(entry.path)
