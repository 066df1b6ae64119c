"""Writes what becomes of a run into its folder, whatever the store does meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cerebro_hydra.errors import StoreError
from cerebro_hydra.hopper.collector import Collector
from cerebro_hydra.hopper.journal import Journal
from cerebro_hydra.hopper.recut_documents import write_recut
from cerebro_hydra.observe.records import Decision, NotSaved
from cerebro_hydra.plan.events import Event, ForkFailed
from cerebro_hydra.plan.holders import STORE
from cerebro_hydra.plan.hop_state import HopState
from cerebro_hydra.plan.instructions import Checkpoint, Collect, ForkState, Instruction
from cerebro_hydra.plan.recut_events import RecutRefused
from cerebro_hydra.storage.run_folder import RunFolder


class RunWriter:
    """Keeps the journal and the documents of a run, and names and deletes states of trials.

    Args:
        folder: the run's files.
        journal: of the run.
        tell: is told once of each file that the store refuses; the run goes on.
    """

    def __init__(
        self, folder: RunFolder, journal: Journal, tell: Callable[[NotSaved], object]
    ) -> None:
        self._folder = folder
        self._journal = journal
        self._tell = tell
        self._collector = Collector(folder)
        self._told = False  # that the journal can't be written

    @property
    def waiting(self) -> bool:
        """Return whether events wait to be journalled."""
        return self._journal.waiting

    def append(self, decided: Sequence[tuple[Event, Sequence[Instruction]]]) -> list[Decision]:
        """Journal events with their instructions, and return them numbered."""
        decisions = self._journal.append(time.time(), decided)
        self._look_at_journal()
        return decisions

    def write(self) -> None:
        """Journal the events that wait."""
        self._journal.write()
        self._look_at_journal()

    def _look_at_journal(self) -> None:
        """Delete what the journal says, or tell that it can't be written."""
        error = self._journal.error
        if error is None:
            self._collector.release()
        elif not self._told:
            self._tell(NotSaved("the journal", str(error)))
        self._told = error is not None

    def write_document(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a document that the run can do without."""
        try:
            self._folder.write_json(name, document)
        except StoreError as error:
            self._tell(NotSaved(name, str(error)))

    def prepare(self, checkpoint: Checkpoint, state: HopState) -> None:
        """Let no deletion that is under way take what an agent is about to write."""
        at = (checkpoint.trial, checkpoint.visit)
        self._collector.spare(*at, state.holders.segments(*at))

    def collect(self, instruction: Collect) -> None:
        """Delete a state, as soon as the journal says so."""
        self._collector.hold(instruction)
        self._look_at_journal()

    def fork(self, fork: ForkState, partitions: int) -> ForkFailed | None:
        """Name a state as that of a fork too; return the event if that fails."""
        try:
            self._folder.fork_state(fork.trial, fork.parent, fork.visit, partitions)
        except StoreError as error:
            return ForkFailed(fork.trial, str(error))
        return None

    def keep_segments(self) -> None:
        """Delete no segment that was to be deleted, because a cut may write an equal one."""
        self._collector.keep_segments()

    def change_cut(self, trial: int, decision: Decision) -> RecutRefused | None:
        """Write what a trial is in another cut; return the event if that fails."""
        try:
            write_recut(self._folder, decision)
        except StoreError as error:
            return RecutRefused(trial, str(error))
        return None

    def close(self) -> None:
        """Write and delete what is left."""
        self._journal.close()
        self._look_at_journal()
        self._collector.close()

    def finish(self, state: HopState, untidy: bool) -> None:
        """Delete what no trial names, if losses or earlier drivers may have left such files.

        Raises:
            StoreError: the journal lacks the end of the run.
        """
        if (error := self._journal.error) is not None:
            raise StoreError(f"the end of the journal is not written: {error}") from error
        if untidy or not self._collector.complete:
            kept: dict[int, set[int]] = {number: set() for number in state.trials}
            for trial, visit in state.holders.states_at(STORE):
                kept[trial].add(visit)
            with suppress(StoreError):  # it is tidier without, and no less true
                self._folder.sweep(kept)
