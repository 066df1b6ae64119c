"""Finds the processes that another one has started."""

from __future__ import annotations

from pathlib import Path


def children_of(pid: int | None) -> list[int]:
    processes = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal())
    return sorted(process for process in processes if parent_of(process) == pid)


def ancestors_of(pid: int | None) -> list[int]:
    parent = parent_of(pid)
    return [] if parent is None else [parent, *ancestors_of(parent)]


def parent_of(pid: int | None) -> int | None:
    """Return None where there is no such process, or it is the first of all."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(status.rpartition(")")[2].split()[1]) or None
