"""Writes what becomes of a run into its folder, and deletes states there that no trial needs.

The journal of a run is numbered immutable segments, which fold to its state.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from cerebro_hydra.errors import CerebroHydraError, JournalError, StoreError
from cerebro_hydra.hopper.trials import write_recut
from cerebro_hydra.observe.records import Decision, NotSaved
from cerebro_hydra.plan.hop.checkpoints import LONGEST_WAIT, wait_after
from cerebro_hydra.plan.hop.holders import STORE
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.messages.codec import to_json
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.events import Event, ForkFailed, RecutRefused
from cerebro_hydra.plan.messages.instructions import (
    Checkpoint,
    Collect,
    FinishTrial,
    ForkState,
    Instruction,
)
from cerebro_hydra.storage.run_folder import RunFolder
from cerebro_hydra.threads import own_thread

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
        self.error: CerebroHydraError | None = None
        """Why what waits could not be written; None if nothing was refused."""
        self._folder = folder
        self._decisions = decisions
        self._waiting: list[dict[str, Any]] = []
        self._tried = 0  # of those that wait, those that make up a segment that was refused
        self._failures = 0  # in a row
        self._next_try = -math.inf
        self._merged = merged  # segments that are merged, or handed to the thread that merges
        self._segments = segments
        self._merger = own_thread("journal")

    @classmethod
    def begin(cls, folder: RunFolder, config: HopConfig) -> Journal:
        """Begin the journal of a run that has none."""
        folder.write_segment(0, [{"run_id": folder.run_id, "config": to_json(config)}])
        return cls(folder, segments=1)

    @property
    def waiting(self) -> bool:
        """Return whether events wait to be written."""
        return bool(self._waiting)

    @property
    def unwritten_ends(self) -> tuple[int, ...]:
        """Return the trials whose ends are among the events that wait."""
        told = (each for line in self._waiting for each in line["instructions"])
        return tuple(each["trial"] for each in told if each["type"] == FinishTrial.__name__)

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

        Without the merge the journal is as whole, and why something could not be written is in
        `error`.
        """
        self._next_try = -math.inf
        try:
            self.write()
        except CerebroHydraError as error:
            self.error = error
        if self._segments - self._merged > 1 and not isinstance(self.error, JournalError):
            self._merge_rest()  # unless another program goes on
        self._merger.shutdown()

    def _merge_rest(self) -> None:
        first, self._merged = self._merged, self._segments
        self._merger.submit(self._merge, first, self._merged - 1)

    def _merge(self, first: int, last: int) -> None:
        try:
            self._folder.merge_segments(first, last)
        except CerebroHydraError as error:
            _LOGGER.warning("the journal stays in more files than it needs: %s", error)


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
        self._unwritten: dict[str, Mapping[str, Any]] = {}  # documents that the store refused
        self._epoch = time.time() - monotonic()  # what the journal tells durations by is never set

    @property
    def waiting(self) -> bool:
        """Return whether events wait to be journalled."""
        return self._journal.waiting

    def append(self, decided: Sequence[tuple[Event, Sequence[Instruction]]]) -> list[Decision]:
        """Journal events with their instructions, and return them numbered."""
        decisions = self._journal.append(self._epoch + monotonic(), decided)
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
        if error is None and self._told:
            self._write_documents()
        self._told = error is not None

    def write_document(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a document that the run can do without; if the store refuses it, try it again."""
        self._unwritten.pop(name, None)
        try:
            self._folder.write_json(name, document)
        except StoreError as error:
            self._unwritten[name] = dict(document)
            self._tell(NotSaved(name, str(error)))

    def _write_documents(self) -> None:
        """Write those that the store refused, of which was told."""
        for name, document in tuple(self._unwritten.items()):
            with suppress(StoreError):
                self._folder.write_json(name, document)
                del self._unwritten[name]

    def prepare(self, checkpoint: Checkpoint, state: HopState) -> None:
        """Let no deletion that is under way take what an agent is about to write."""
        at = (checkpoint.trial, checkpoint.state)
        self._collector.spare(*at, state.holders.segments(*at))

    def collect(self, instruction: Collect) -> None:
        """Delete a state, as soon as the journal says so."""
        self._collector.hold(instruction)
        self._look_at_journal()

    def fork(self, fork: ForkState, partitions: int) -> ForkFailed | None:
        """Name a state as that of a fork too; return the event if that fails."""
        try:
            self._folder.fork_state(fork.trial, fork.parent, fork.state, partitions)
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

    def close(self) -> tuple[int, ...]:
        """Write and delete what is left; return the trials whose ends could not be written."""
        self._journal.close()
        self._look_at_journal()
        self._write_documents()
        self._collector.close()
        return self._journal.unwritten_ends

    def finish(self, state: HopState, untidy: bool) -> None:
        """Delete what no trial names, if losses or earlier drivers may have left such files.

        Raises:
            StoreError: the journal lacks the end of the run.
        """
        if (error := self._journal.error) is not None:
            raise StoreError(f"the end of the journal is not written: {error}") from error
        if untidy or not self._collector.complete:
            kept: dict[int, set[int]] = {number: set() for number in state.trials}
            for trial, kept_state in state.holders.states_at(STORE):
                kept[trial].add(kept_state)
            with suppress(StoreError):  # it is tidier without, and no less true
                self._folder.sweep(kept)


_File = tuple[int, int] | str
"""A state by trial and number, or a segment by its digest."""


class Collector:
    """Carries out `Collect` on a thread of its own.

    The document of a state goes before its segments, so that after a crash no document names what
    is gone. A crash, or a store that refuses, can only leave files that nothing names; `RunFolder`
    sweeps them when the run ends.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.complete = True
        """Whether everything was deleted that should have been."""
        self._folder = folder
        self._changed = threading.Condition()
        self._held: list[_File] = []  # decided, but not journalled yet
        self._left: list[_File] = []
        self._now: _File | None = None
        self._thread = own_thread("collector")

    def hold(self, collect: Collect) -> None:
        """Take in what is to be deleted once the decision is journalled."""
        self._held += [(collect.trial, collect.state), *collect.objects]

    def release(self) -> None:
        """Delete what was held, because the journal now says so."""
        if self._held:
            with self._changed:
                self._left += self._held
            self._held = []
            self._thread.submit(self._delete_all)

    def spare(self, trial: int, state: int, objects: Collection[str]) -> None:
        """Delete neither this state nor these segments, because they are about to be written."""
        spared = {(trial, state), *objects}
        self._held = [each for each in self._held if each not in spared]
        with self._changed:
            self._left = [each for each in self._left if each not in spared]
            while self._now in spared:
                self._changed.wait()

    def keep_segments(self) -> None:
        """Delete no segment that was to be deleted; all that nobody names is swept later."""
        self.complete = False
        self._held = [each for each in self._held if not isinstance(each, str)]
        with self._changed:
            self._left = [each for each in self._left if not isinstance(each, str)]
            while isinstance(self._now, str):
                self._changed.wait()

    def close(self) -> None:
        """Wait until everything is deleted."""
        self._thread.shutdown()

    def _delete_all(self) -> None:
        while (file := self._next()) is not None:
            try:
                if isinstance(file, str):
                    self._folder.delete_object(file)
                else:
                    self._folder.delete_state(*file)
            except StoreError as error:
                self.complete = False
                _LOGGER.warning("a file stays that the run needs no more: %s", error)

    def _next(self) -> _File | None:
        with self._changed:
            self._now = self._left.pop(0) if self._left else None
            self._changed.notify_all()
            return self._now
