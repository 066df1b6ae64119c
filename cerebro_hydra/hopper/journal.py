"""Writes the journal of a run: numbered immutable segments, which fold to its state."""

from __future__ import annotations

from collections.abc import Sequence

from cerebro_hydra.observe.records import Decision
from cerebro_hydra.plan.codec import to_json
from cerebro_hydra.plan.events import Event
from cerebro_hydra.plan.hop_config import HopConfig
from cerebro_hydra.plan.instructions import Instruction
from cerebro_hydra.storage.run_folder import RunFolder


class Journal:
    """Writes decisions before they are carried out.

    The first line of segment 0 is the run's configuration, every further line one event with the
    instructions that it led to. A segment is written whole or not at all, and never changes.
    """

    def __init__(self, folder: RunFolder, config: HopConfig) -> None:
        """Begin the journal of a run that has none."""
        self._folder = folder
        self._segments = 1
        self._decisions = 0
        folder.write_segment(0, [{"config": to_json(config)}])

    def append(
        self, time: float, decided: Sequence[tuple[Event, Sequence[Instruction]]]
    ) -> list[Decision]:
        """Write events with their instructions as the next segment, and return them numbered.

        `time` (seconds since 1970) is for readers, never for the fold.
        """
        decisions = [
            Decision(seq, time, event, tuple(instructions))
            for seq, (event, instructions) in enumerate(decided, start=self._decisions)
        ]
        if decisions:
            self._folder.write_segment(self._segments, [each.to_json() for each in decisions])
            self._segments += 1
            self._decisions += len(decisions)
        return decisions
