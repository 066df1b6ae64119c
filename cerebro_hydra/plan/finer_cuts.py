"""Lets a trial that lacks memory go on in more shards, once.

::

    trains ──TaskFailed──► lacking ──CutFiner──► recutting ──TrialRecut──► trains
                              ▲                      │ │
                              └──(a fork came)───────┘ └─RecutRefused──► failed

No training is lost: the states that the trial needs, its newest and its best one, are in the store
before it is cut, and are laid out anew from there. So is state 0, or what a fork began with; every
other state is deleted. Forks that wait for a state get it before that. A fork that was admitted
before its parent was cut finer, and comes after, is laid out like it, and may be cut finer itself.
"""

from __future__ import annotations

from cerebro_hydra.plan.checkpoints import Checkpoints
from cerebro_hydra.plan.holders import STORE
from cerebro_hydra.plan.instructions import ChangeCut, CutFiner, Drop
from cerebro_hydra.plan.progress import TrialProgress
from cerebro_hydra.plan.recut_events import TrialRecut
from cerebro_hydra.plan.retention import Retention
from cerebro_hydra.plan.tables import RunTables

PARENT_WAS_RECUT = "the trial that it forks was cut finer meanwhile"


class FinerCuts:
    """Asks for finer cuts and carries them into the tables; a part of the state machine."""

    def __init__(self, tables: RunTables, retention: Retention, checkpoints: Checkpoints) -> None:
        self._tables, self._retention, self._checkpoints = tables, retention, checkpoints

    def go_on(self, index: int, trial: TrialProgress) -> str | None:
        """Ask for the cut once it can be made; return why it can't, if a state can't be written."""
        if trial.lacking is None or trial.recutting is not None:
            return None
        visits = self._visits(trial)
        for visit in visits:
            if (error := self._checkpoints.gave_up(trial, visit)) is not None:
                return error
        if all([self._checkpoints.ensure(index, trial, visit) for visit in visits]) and (
            self._is_at_rest(index, trial)
        ):
            trial.recutting = visits
            self._tables.recutting.add(index)
            self._tables.instructions.append(
                CutFiner(index, visits, trial.lacking, trial.lacking == PARENT_WAS_RECUT)
            )
        return None

    def take(self, event: TrialRecut) -> None:
        """Go on with the cut, unless it is no answer to what is asked now."""
        index = event.config.trial
        trial = self._tables.trials[index]
        visits = tuple(state.visit for state in event.states)
        if trial.over or trial.recutting != visits:
            return
        self.forget(index, trial)
        if visits != self._visits(trial) or not self._is_at_rest(index, trial):
            return  # it is asked for again
        holders = self._tables.holders
        for visit in holders.visits(index):
            for place in list(holders.where(index, visit)):
                if place != STORE:
                    holders.drop(index, visit, place)
                    self._tables.instructions.append(Drop(index, visit, place))
                elif visit not in visits:
                    self._checkpoints.delete(index, visit)
            if visit not in visits:
                holders.forget_state(index, visit)
        for state in event.states:
            holders.recut(index, state.visit, state.digests)
        before, shards = (len(each.initial_digests) for each in (trial.config, event.config))
        inherited = trial.lacking == PARENT_WAS_RECUT
        trial.config, trial.lacking = event.config, None
        trial.shards_before = None if inherited else before
        trial.failed_transfers.clear()
        self._tables.log(index, f"goes on from state {trial.newest} in {shards} shards")
        self._tables.instructions.append(ChangeCut(index, trial.newest, before, shards, inherited))

    def forget(self, index: int, trial: TrialProgress) -> None:
        """Forget what was asked, because it has an answer or needs none."""
        trial.recutting = None
        self._tables.recutting.discard(index)

    def _visits(self, trial: TrialProgress) -> tuple[int, ...]:
        """Return the states that the trial needs in the finer cut."""
        return tuple(sorted({trial.base} | self._retention.needed(trial)))

    def _is_at_rest(self, index: int, trial: TrialProgress) -> bool:
        """Return whether no state is being written, and no fork waits for one."""
        return trial.saving is None and index not in self._tables.forks
