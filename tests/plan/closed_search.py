"""A search whose trials are all known beforehand, for simulated and scripted runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.messages.events import Event, SearchClosed, TrialAdded


@dataclass(frozen=True, slots=True)
class ClosedSearch:
    """Holds the trials of a run, each of which trains for the same number of epochs."""

    config: HopConfig
    trials: tuple[TrialConfig, ...]
    epochs: int

    def events(self) -> list[Event]:
        """Return the events that begin the run: every trial with its whole budget, then the end."""
        return [*(TrialAdded(trial, self.epochs) for trial in self.trials), SearchClosed()]

    def after(
        self, now: float, event: Event, instructions: Sequence[ins.Instruction]
    ) -> Sequence[tuple[float, Event]]:
        """Decide nothing: all was known at the begin."""
        return ()
