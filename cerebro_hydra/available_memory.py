"""Tells how much memory this process may take, on its machine and in its container."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")


def available_memory(machine: Path = Path("/proc"), groups: Path = _GROUPS) -> float:
    """Return how many bytes are free, or infinity where the system doesn't tell.

    Pages of files that a control group counts are free, as the kernel takes them back.

    Args:
        machine: where the kernel tells of memory and control groups.
        groups: where the control groups are.
    """
    free = [math.inf]
    for line in _lines(machine / "meminfo"):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) << 10)
    for line in _lines(machine / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            free += _free(groups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            free += _free(groups / "memory", path, *names)
    return max(min(free), 0)


def _free(root: Path, path: str, limit: str, used: str, cached: str) -> Iterator[float]:
    """Yield what a control group and those around it have left; in a container it is the root."""
    for group in (PurePosixPath(path), *PurePosixPath(path).parents):
        folder = root / group.relative_to("/")
        found = {name: _lines(folder / name) for name in (limit, used)}
        if all(lines and lines[0].isdecimal() for lines in found.values()):
            files = [
                line.split()[1]
                for line in _lines(folder / "memory.stat")
                if line.startswith(cached)
            ]
            yield int(found[limit][0]) - int(found[used][0]) + sum(map(int, files[:1]))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
