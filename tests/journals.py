"""Rewrites journals of finished runs, with digests that fit, as somebody who forges them would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cerebro_hydra.storage import RunFolder


def cut_journal(folder: RunFolder, last: Callable[[list[Any]], int]) -> list[Any]:
    """Leave a run's journal up to the line whose number `last` returns; return the lines after."""
    lines = [line for segment in folder.read_segments() for line in segment]
    folder.store.delete(f"{folder.path}/journal")
    folder.write_segment(0, lines[: last(lines) + 1])
    return lines[last(lines) + 1 :]


def rewrite_journal(folder: RunFolder, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` change every instruction of a run's journal."""
    segments = [*folder.read_segments()]
    folder.store.delete(f"{folder.path}/journal")
    for number, lines in enumerate(segments):
        for line in lines:
            for instruction in line.get("instructions", ()):
                change(instruction)
        folder.write_segment(number, lines)
