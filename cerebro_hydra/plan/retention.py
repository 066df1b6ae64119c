"""Decides which copies of states a trial keeps, and where it rolls back to after a loss."""

from __future__ import annotations

from cerebro_hydra.plan.holders import STORE
from cerebro_hydra.plan.progress import TrialProgress
from cerebro_hydra.plan.tables import RunTables
from cerebro_hydra.plan.trial_end import best_visit, needed_visits

StateCopy = tuple[int, str]  # visit, place


class Retention:
    """Reads from the table of holders what a loss would cost; it changes nothing.

    Two states matter: the newest, from which training continues, and the result, which is the best
    state of a trial that keeps it. While either of them is on one worker alone, an older state and
    the best state up to that one are kept elsewhere.
    """

    def __init__(self, tables: RunTables) -> None:
        self._config = tables.config
        self._tables = tables
        self._holders = tables.holders

    def needed(self, trial: TrialProgress) -> set[int]:
        """Return the visits of the states that the trial needs."""
        return needed_visits(self._config, trial, self._tables.search_closed)

    def intact(self, index: int, trial: TrialProgress) -> bool:
        """Return whether every state that the trial needs is held somewhere."""
        return all(self._holders.where(index, visit) for visit in self.needed(trial))

    def fallback(self, index: int, trial: TrialProgress, lost: str | None = None) -> int:
        """Return the newest state to roll back to if the place ``lost`` were gone as well.

        That state and the best state up to it are both held elsewhere. The first state, or the one
        that a fork began with, always is, because it is in the store.
        """
        for visit in reversed(self._holders.visits(index)):
            if all(self._places_left(index, v, lost) for v in self._with_best(trial, visit)):
                return visit
        raise AssertionError(f"trial {index} has no state left, not even its first")

    def stored_fallback(self, trial: TrialProgress, stored: list[int]) -> set[int]:
        """Return the stored states to go on from if every worker were gone."""
        for visit in reversed(stored):
            if (kept := self._with_best(trial, visit)).issubset(stored):
                return kept
        raise AssertionError(f"of the stored states {stored} none can be gone on from")

    def copies_to_keep(self, index: int, trial: TrialProgress) -> set[StateCopy]:
        """Return the copies that must not be dropped."""
        copies: set[StateCopy] = set() if trial.saving is None else {trial.saving}
        for fork in self._tables.forks.get(index, ()):
            base = self._tables.trials[fork].base
            copies.update((base, place) for place in self._holders.where(index, base))
        if trial.over or trial.awaits is not None:
            return copies
        for visit in self.needed(trial):
            places = self._holders.where(index, visit)
            if trial.status == "paused" and STORE in places:
                continue  # the store keeps what it has, and memory is for those that train
            copies.update((visit, place) for place in places)
            if len(places) == 1 and STORE not in places:
                copies.update(self._fallback_copies(index, trial, *places))
        return copies

    def _fallback_copies(self, index: int, trial: TrialProgress, lost: str) -> set[StateCopy]:
        """Return one copy of each state that the trial would need without the place ``lost``."""
        visits = self._with_best(trial, self.fallback(index, trial, lost))
        return {(visit, self._places_left(index, visit, lost)[0]) for visit in visits}

    def _with_best(self, trial: TrialProgress, visit: int) -> set[int]:
        best = best_visit(self._config, trial, visit)
        return {visit} if best is None else {visit, best}

    def _places_left(self, index: int, visit: int, lost: str | None) -> list[str]:
        return [place for place in self._holders.where(index, visit) if place != lost]
