"""Reads what a run was when its driver ended, so that another one can go on with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from cerebro_hydra.errors import JournalError, StoreError
from cerebro_hydra.hopper.journal import Journal
from cerebro_hydra.hopper.trials import is_written, write_recut
from cerebro_hydra.observe.records import Decision, TrialAdmitted, records_of
from cerebro_hydra.plan.hop.journal import RemadeStates, fold
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.messages.codec import from_json
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.instructions import ChangeCut, ForkState
from cerebro_hydra.storage.run_folder import RunFolder


class ResumedRun:
    """The state that the journal of a run folds to, and the way to go on from there.

    Args:
        folder: the run's files.

    Raises:
        JournalError: the journal is absent or damaged, or another version has written it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        config = next((line for lines in folder.read_segments() for line in lines), None)
        if config is None:
            raise JournalError(
                f"the run {folder.path!r} has no journal, because it was killed before its first "
                "decision; start it anew"
            )
        self.config: HopConfig = from_json(config.get("config"))
        self._records = 0
        self.state: HopState = fold(self.config, self._counted())

    def check_trials(self) -> None:
        """Read what every trial is, so that nothing begins if one of them can't go on.

        Raises:
            StoreError: the document of a trial is absent or damaged, or another version's.
        """
        for number in self.state.trials:
            self._folder.read_trial(number, self._folder.run_id)

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
        """Go on with the journal."""
        return Journal(self._folder, self._records, *self._folder.journal_end())

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

    def _lacks(self, fork: ForkState) -> bool:
        stored = self.state.holders.states_at("store")
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
