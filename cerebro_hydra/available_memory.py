"""Tells how much memory this process may take, on its machine and in its container."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ROOT = Path("/")


class _Version(NamedTuple):
    """Names the files of a version of control groups."""

    folder: str
    limit: str
    used: str
    cached: str


_FIRST = _Version(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_SECOND = _Version("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def usable_memory(root: Path = _ROOT) -> float:
    """Return the machine's bytes, or the least limit of this process's control groups.

    Args:
        root: where ``proc`` and ``sys`` are, by which the kernel tells of memory.
    """
    return min([_told(root / "proc/meminfo", "MemTotal:"), *(limit for *_, limit in _limits(root))])


def available_memory(root: Path = _ROOT) -> float:
    """Return how many bytes are free, or infinity where the system doesn't tell.

    Pages of files that a control group counts are free, as the kernel takes them back.
    """
    free = [_told(root / "proc/meminfo", "MemAvailable:")]
    for group, version, limit in _limits(root):
        used = _lines(group / version.used)
        if used and used[0].isdecimal():
            cached = _told(group / "memory.stat", version.cached, missing=0)
            free.append(limit - int(used[0]) + cached)
    return max(min(free), 0)


def memory_kills(root: Path = _ROOT) -> float:
    """Return how many processes the kernel has ended for their memory; NaN if it doesn't tell."""
    return _told(root / "proc/vmstat", "oom_kill", missing=math.nan)


def _limits(root: Path) -> Iterator[tuple[Path, _Version, int]]:
    """Yield the limits of this process's control groups and of those around them."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _FIRST if controllers else _SECOND
        for group in (
            PurePosixPath(path),
            *PurePosixPath(path).parents,
        ):  # in a container, the root
            folder = root / version.folder / group.relative_to("/")
            limit = _lines(folder / version.limit)
            if limit and limit[0].isdecimal():  # "max" is none
                yield folder, version, int(limit[0])


def _told(file: Path, name: str, missing: float = math.inf) -> float:
    """Return the bytes that a line of a file has for a name."""
    for words in map(str.split, _lines(file)):
        if words[0] == name:
            return int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    return missing


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
