"""Measures how much DRAM this process may have: the machine's, or less where a cgroup says so."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_FIRST = ("sys/fs/cgroup/memory", "memory.limit_in_bytes")  # of cgroups, version 1
_SECOND = ("sys/fs/cgroup", "memory.max")


def host_and_memory(_: object = None) -> tuple[str, int]:
    """Return the name of this machine, and the bytes of DRAM that a process here may have."""
    return socket.gethostname(), usable_memory()


def usable_memory(root: Path = Path("/")) -> int:
    """Return the machine's DRAM in bytes, or the least limit of this process's cgroups.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    fields = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    (total,) = (1024 * int(value) for name, value, *_ in fields if name == "MemTotal:")
    return min([total, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controllers != "memory":
            continue
        folder, name = _SECOND if number == "0" else _FIRST
        group = PurePosixPath(path.lstrip("/"))
        for each in (group, *group.parents):  # a limit holds for all groups below it
            with contextlib.suppress(ValueError):  # "max" is none
                yield int(_text(root / folder / each / name))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
