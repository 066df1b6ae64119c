"""Writes the journal of a run: numbered immutable segments, which fold to its state."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

from cerebro_hydra.errors import CerebroHydraError, StoreError
from cerebro_hydra.observe.records import Decision
from cerebro_hydra.plan.codec import to_json
from cerebro_hydra.plan.events import Event
from cerebro_hydra.plan.hop_config import HopConfig
from cerebro_hydra.plan.instructions import Instruction
from cerebro_hydra.plan.write_retries import LONGEST_WAIT, wait_after
from cerebro_hydra.storage.run_folder import RunFolder

MERGED_SEGMENTS = 256
"""How many segments become one file, so that a long run does not leave a file per decision."""

_LOGGER = logging.getLogger(__name__)


class Journal:
    """Writes decisions before they are carried out.

    The first line of segment 0 is the run's configuration, every further line one event with the
    instructions that it led to. A segment is written whole or not at all, and never changes. Full
    batches of segments are merged while the run goes on, and the rest when it ends.

    What a store refuses waits, in order, and is tried again; meanwhile `error` says why.

    Args:
        folder: the run's files.
        decisions: how many the journal has.
        merged: the first segment that is not merged.
        segments: how many segments there are.
    """

    def __init__(
        self, folder: RunFolder, decisions: int = 0, merged: int = 0, segments: int = 0
    ) -> None:
        self.error: StoreError | None = None
        """Why what waits could not be written; None if nothing was refused."""
        self._folder = folder
        self._decisions = decisions
        self._waiting: list[dict[str, Any]] = []
        self._tried = 0  # of those that wait, those that make up a segment that was refused
        self._failures = 0  # in a row
        self._next_try = -math.inf
        self._merged = merged  # segments that are merged, or handed to the thread that merges
        self._segments = segments
        self._merger = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @classmethod
    def begin(cls, folder: RunFolder, config: HopConfig) -> Journal:
        """Begin the journal of a run that has none."""
        folder.write_segment(0, [{"run_id": folder.run_id, "config": to_json(config)}])
        return cls(folder, segments=1)

    @property
    def waiting(self) -> bool:
        """Return whether events wait to be written."""
        return bool(self._waiting)

    def append(
        self, time: float, decided: Sequence[tuple[Event, Sequence[Instruction]]]
    ) -> list[Decision]:
        """Take in events with their instructions, and return them numbered.

        All of them are written as the next segment if there is an instruction to carry out, else
        they wait for the next `append` or `write`. `time` (seconds since 1970) is for readers,
        never for the fold.
        """
        decisions = [
            Decision(seq, time, event, tuple(instructions))
            for seq, (event, instructions) in enumerate(decided, start=self._decisions)
        ]
        self._decisions += len(decisions)
        self._waiting += [each.to_json() for each in decisions]
        if any(each.instructions for each in decisions):
            self.write()
        return decisions

    def write(self) -> None:
        """Write what waits as the next segment, unless the store refused it a moment ago.

        Raises:
            JournalError: another program writes the journal.
        """
        while self._waiting and monotonic() >= self._next_try:
            self._tried = self._tried or len(self._waiting)
            lines = self._waiting[: self._tried]
            try:
                self._write_segment(lines)
            except StoreError as error:
                self.error = error
                self._failures += 1
                self._next_try = monotonic() + (wait_after(self._failures) or LONGEST_WAIT)
                return
            del self._waiting[: self._tried]
            self.error, self._tried, self._failures = None, 0, 0
            self._segments += 1
            if self._segments - self._merged == MERGED_SEGMENTS:
                self._merge_rest()

    def _write_segment(self, lines: Sequence[dict[str, Any]]) -> None:
        try:
            self._folder.write_segment(self._segments, lines)
        except StoreError:
            # A try can fail although it wrote everything, and then the next one can't succeed.
            if not self._folder.holds_segment(self._segments, lines):
                raise

    def close(self) -> None:
        """Write what waits, and merge the segments that are left.

        Errors are logged: without the merge the journal is as whole, and what could not be written
        is in `error`.
        """
        self._next_try = -math.inf
        try:
            self.write()
        except CerebroHydraError:
            _LOGGER.exception("the last events of the run are not in its journal")
        if self._segments - self._merged > 1:
            self._merge_rest()
        self._merger.shutdown()

    def _merge_rest(self) -> None:
        first, self._merged = self._merged, self._segments
        self._merger.submit(self._merge, first, self._merged - 1)

    def _merge(self, first: int, last: int) -> None:
        try:
            self._folder.merge_segments(first, last)
        except CerebroHydraError:
            _LOGGER.exception("the journal stays in more files than it needs")
