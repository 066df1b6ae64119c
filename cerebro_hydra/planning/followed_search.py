"""A search that is simulated: its searcher proposes and decides, and candidates are admitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.run_config import trial_config
from cerebro_hydra.plan.costs.model import CostModel
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.events import (
    Event,
    SearchClosed,
    TrialAdded,
    TrialProposed,
    TrialRefused,
)
from cerebro_hydra.plan.messages.instructions import Instruction
from cerebro_hydra.planning.planned_trials import PlannedTrial

Admit = Callable[[TrialProposed], PlannedTrial | str]
"""Returns the trial that a candidate becomes, or why it is refused."""


class Follower(Protocol):
    """Proposes and decides as a search does; `AskAndTell` is one."""

    def begin(self) -> list[Event]:
        """Return what is proposed before the first trial trains."""
        ...

    def follow(self, event: Event, instructions: Sequence[Instruction]) -> list[Event]:
        """Return what is decided when this has happened."""
        ...


class Recorded:
    """Proposes the trials of an earlier run, each for as many epochs as it trained there."""

    def __init__(self, trials: Sequence[tuple[PlannedTrial, int]]) -> None:
        self._trials = trials

    def begin(self) -> list[Event]:
        """Return all of them, and that no more will follow."""
        proposed = [
            TrialProposed(number, dict(trial.spec.params), epochs)
            for number, (trial, epochs) in enumerate(self._trials)
        ]
        return [*proposed, SearchClosed()]

    def follow(self, event: Event, instructions: Sequence[Instruction]) -> list[Event]:
        """Decide nothing."""
        return []


class FollowedSearch:
    """Is what a simulated run trains: candidates are admitted one at a time, as they are proposed.

    Args:
        config: what is fixed for the run.
        follower: proposes and decides.
        admit: admits a candidate.
        costs: say how long that takes. The first one is admitted before the run begins.

    Attributes:
        trials: those that were admitted, by number.
        refused: why others were not.
    """

    def __init__(
        self, config: HopConfig, follower: Follower, admit: Admit, costs: CostModel
    ) -> None:
        self.config = config
        self._follower, self._admit, self._costs = follower, admit, costs
        self.trials: dict[int, PlannedTrial] = {}
        self.refused: dict[int, str] = {}
        self._free_at = 0.0
        self._structures: set[str] = set()

    def events(self) -> Sequence[Event]:
        """Return the events that begin the run."""
        return self._follower.begin()

    def after(
        self, now: float, event: Event, instructions: Sequence[Instruction]
    ) -> Sequence[tuple[float, Event]]:
        """Return what follows from an event, and when."""
        decided = [(now, each) for each in self._follower.follow(event, instructions)]
        if isinstance(event, TrialProposed):
            decided.append(self._admitted(now, event))
        return decided

    def _admitted(self, now: float, candidate: TrialProposed) -> tuple[float, Event]:
        if candidate.parent is not None:
            raise ConfigurationError(
                "the search forks trials by what they measure, which no plan knows; plan a "
                "GridSearch or RandomSearch of as many trials"
            )
        found = self._admit(candidate)
        if isinstance(found, str):
            self.refused[candidate.trial] = found
            return now, TrialRefused(candidate.trial, found)
        costs = self._costs
        if self.trials:
            first = found.structure not in self._structures
            self._free_at = max(self._free_at, now)
            known = (costs.admission if first else costs.admission_again).mean
            self._free_at += known if found.admission is None else found.admission
        self._structures.add(found.structure)
        self.trials[candidate.trial] = found
        return max(now, self._free_at), TrialAdded(trial_config(found.spec), candidate.budget)
