"""Rewrites journals of finished runs, with digests that fit, as somebody who forges them would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.digested_json import encode_lines


def rewrite_journal(folder: RunFolder, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` change every instruction of a run's journal."""
    for number, lines in enumerate([*folder.read_segments()]):
        for line in lines:
            for instruction in line.get("instructions", ()):
                change(instruction)
        folder.store.write(f"{folder.path}/journal/{number:08d}.jsonl", encode_lines(lines))
