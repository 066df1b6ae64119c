"""Reads what a run was when its driver ended, so that another one can go on with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Any

from cerebro_hydra.errors import JournalError, StoreError
from cerebro_hydra.hopper.journal import Journal
from cerebro_hydra.hopper.trials import is_written, write_recut
from cerebro_hydra.observe.records import Decision, TrialAdmitted, records_of
from cerebro_hydra.plan.hop.holders import STORE
from cerebro_hydra.plan.hop.journal import RemadeStates, fold
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.hop.trial_status import TrialStatus
from cerebro_hydra.plan.messages.codec import from_json
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.instructions import ChangeCut, ForkState
from cerebro_hydra.storage.names import state_name, trial_name
from cerebro_hydra.storage.run_folder import RunFolder

_MOST_NAMED = 3
"""How many files that are gone are named."""


class ResumedRun:
    """The state that the journal of a run folds to, and the way to go on from there.

    Args:
        folder: the run's files.

    Raises:
        JournalError: the journal is absent or damaged, or another version has written it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        # Looked at before the records are read, so that a segment which another program writes from
        # now on, counted or not, has the name of the one that this program writes next.
        self._end = folder.journal_end()
        config = next((line for lines in folder.read_segments() for line in lines), None)
        if config is None:
            raise JournalError(
                f"the run {folder.path!r} has no journal, because it was killed before its first "
                "decision; start it anew"
            )
        self.config: HopConfig = from_json(config.get("config"))
        self._records = 0
        self.state: HopState = fold(self.config, self._counted())
        self.missing: tuple[tuple[int, int], ...] = ()
        """Trial and number of each state that lacks files, and is made again."""

    def check_trials(self) -> None:
        """Read what every trial is, so that nothing begins if one of them can't go on.

        Raises:
            StoreError: the document of a trial is absent or damaged, or another version's.
        """
        for number in self.state.trials:
            self._folder.read_trial(number, self._folder.run_id)

    def check_states(self, trials: Iterable[int]) -> list[str]:
        """Look for the files of all states that trials may go on from.

        Args:
            trials: those that go on.

        Returns:
            a line for each trial that goes on from an older state, because files are gone.

        Raises:
            StoreError: a trial has no state left to go on from.
        """
        told, missing = [], list[tuple[int, int]]()
        holders, folder = self.state.holders, self._folder
        stored = {
            number: [s for s in holders.states(number) if holders.holds(number, s, STORE)]
            for number in trials
        }
        named = (holders.segments(n, state) for n, states in stored.items() for state in states)
        objects = set(folder.missing_objects(chain.from_iterable(named)))
        for number, states in stored.items():
            documents = folder.states(number)
            gone: dict[int, list[str]] = {}
            for state in states:
                files = [
                    f"objects/{o}.safetensors"
                    for o in holders.segments(number, state)
                    if o in objects
                ]
                if state not in documents and (number, state) not in self._unwritten:
                    files.append(f"trials/{trial_name(number)}/{state_name(state)}")
                if files:
                    gone[state] = files
            if not gone:
                continue
            all_gone = list(dict.fromkeys(chain.from_iterable(gone.values())))
            left = [state for state in states if state not in gone]
            trial = self.state.trials[number]
            what = (
                f"{trial_name(number)}: of its states {[*gone]}, {len(all_gone)} files in "
                f"{folder.path!r} are gone, or no plain files: {', '.join(all_gone[:_MOST_NAMED])}"
                f"{', ...' if len(all_gone) > _MOST_NAMED else ''}"
            )
            if not left or (trial.base in gone and len(gone) > 1):
                raise StoreError(f"{what}; restore them from a copy, or begin a new run")
            told.append(f"{what}; it goes on from an older state, {left[-1]} at the latest")
            ended = trial.over and trial.status is not TrialStatus.FINISHED
            if not ended and trial.status is not TrialStatus.RECUTTING:
                missing += [(number, state) for state in gone if state != trial.base]
        self.missing = tuple(missing)
        return told

    def decisions(self) -> Iterator[Decision]:
        """Read the decisions that were made before."""
        for line in self._folder.read_records():
            if line["seq"] == self._records:
                return
            yield Decision.from_json(line)

    def records(self) -> Iterator[TrialAdmitted | Decision]:
        """Read all that was told of the run before."""
        for record in records_of(self._folder):
            if isinstance(record, TrialAdmitted | Decision):
                yield record

    def journal(self) -> Journal:
        """Go on with the journal as it was read.

        Its first write raises `JournalError` if another program has written since.
        """
        return Journal(self._folder, self._records, *self._end)

    def document(self, name: str) -> dict[str, Any]:
        """Return a document that the run has written, or an empty one."""
        with suppress(StoreError):
            return self._folder.read_json(name)
        return {}

    def write_states(self) -> None:
        """Carry out every `ForkState` and `ChangeCut` that was journalled and not carried out."""
        for decision in self.decisions():
            for each in decision.instructions:
                if isinstance(each, ForkState) and self._lacks(each):
                    at = (each.trial, each.parent, each.state)
                    self._folder.fork_state(*at, self.config.partitions)
                if isinstance(each, ChangeCut) and not is_written(self._folder, decision):
                    write_recut(self._folder, decision)

    @cached_property
    def _unwritten(self) -> set[tuple[int, int]]:
        """The states that forks begin with, whose documents may still be written."""
        told = chain.from_iterable(each.instructions for each in self.decisions())
        return {(each.trial, each.state) for each in told if isinstance(each, ForkState)}

    def _lacks(self, fork: ForkState) -> bool:
        stored = self.state.holders.states_at(STORE)
        at = (fork.trial, fork.state)
        return at in stored and fork.state not in self._folder.states(fork.trial)

    def remade(self) -> RemadeStates:
        """Return what compares states that are made again, once the workers are lost."""
        newest = {number: trial.newest for number, trial in self.state.trials.items()}
        return RemadeStates(newest, ((each.event, each.instructions) for each in self.decisions()))

    def _counted(self) -> Iterator[dict[str, Any]]:
        for line in self._folder.read_records():
            self._records += 1
            yield line
