"""Which states of a trial are kept, and where it goes back to when some are lost."""

from __future__ import annotations

from cerebro_hydra.plan.holders import STORE, Holders
from cerebro_hydra.plan.hop_config import HopConfig
from cerebro_hydra.plan.outcome import best_visit, needed
from cerebro_hydra.plan.visits import TrialProgress

Copy = tuple[int, str]  # visit, place


class Retention:
    """Asks the table of holders what a loss would cost; changes nothing.

    Two states matter: the newest, which training goes on from, and the result, which is the best
    one of a trial with patience. Either may be on one worker alone. Then an older state, with the
    best one up to there, is kept elsewhere.
    """

    def __init__(self, config: HopConfig, holders: Holders) -> None:
        self._config = config
        self._holders = holders

    def intact(self, index: int, trial: TrialProgress) -> bool:
        """Whether every state that the trial needs is somewhere."""
        return all(self._holders.where(index, visit) for visit in needed(self._config, trial))

    def fallback(self, index: int, trial: TrialProgress, lost: str | None = None) -> int:
        """Return the newest state to go back to, if the place ``lost`` were gone as well.

        It, and the best one up to there, are somewhere. State 0 always is: it is in the store.
        """
        for visit in reversed(self._holders.visits(index)):
            best = best_visit(self._config, trial, visit)
            if all(self._places(index, v, lost) for v in (visit, best) if v is not None):
                return visit
        raise AssertionError(f"trial {index} has no state left, not even its first")

    def kept(self, index: int, trial: TrialProgress) -> set[Copy]:
        """Return the copies that may not be dropped."""
        keep: set[Copy] = set() if trial.saving is None else {trial.saving}
        if trial.status is not None:
            return keep
        for visit in needed(self._config, trial):
            places = self._holders.where(index, visit)
            keep.update((visit, place) for place in places)
            if len(places) == 1 and places[0] != STORE:
                keep.update(self._spare(index, trial, places[0]))
        return keep

    def _spare(self, index: int, trial: TrialProgress, lost: str) -> set[Copy]:
        """One copy of whatever the trial would go back to without this place."""
        back = self.fallback(index, trial, lost)
        best = best_visit(self._config, trial, back)
        states = {back} if best is None else {back, best}
        return {(visit, self._places(index, visit, lost)[0]) for visit in states}

    def _places(self, index: int, visit: int, lost: str | None) -> list[str]:
        return [place for place in self._holders.where(index, visit) if place != lost]
