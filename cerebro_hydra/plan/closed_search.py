"""Describes a search that knows all its trials before the first one trains."""

from __future__ import annotations

from dataclasses import dataclass

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.events import (
    BudgetExtended,
    Event,
    SearchClosed,
    SearchReopened,
    TrialAdded,
)
from cerebro_hydra.plan.hop_config import HopConfig, TrialConfig
from cerebro_hydra.plan.hop_state import HopState


@dataclass(frozen=True, slots=True)
class ClosedSearch:
    """Holds the trials of a run, each of which trains for the same number of epochs.

    Raises:
        ConfigurationError: there are no trials or epochs, or a trial can't be trained.
    """

    config: HopConfig
    trials: tuple[TrialConfig, ...]
    epochs: int

    def __post_init__(self) -> None:
        """Refuse a search that no run can start with."""
        if self.epochs < 1:
            raise ConfigurationError(f"epochs={self.epochs} must be at least 1")
        if not self.trials:
            raise ConfigurationError("there are no trials; a run needs at least one trial")
        for trial in self.trials:
            self.config.check_trial(trial)

    def events(self) -> list[Event]:
        """Return the events that begin the run: every trial with its whole budget, then the end."""
        return [*(TrialAdded(trial, self.epochs) for trial in self.trials), SearchClosed()]

    def events_after(self, state: HopState) -> list[Event]:
        """Return the events that make a run one of this search: new trials, and larger budgets."""
        news: list[Event] = []
        for trial in self.trials:
            known = state.trials.get(trial.trial)
            if known is None:
                news.append(TrialAdded(trial, self.epochs))
            elif known.budget < self.epochs:
                news.append(BudgetExtended(trial.trial, self.epochs))
        if not state.tables.search_closed:
            return [*news, SearchClosed()]
        return [SearchReopened(), *news, SearchClosed()] if news else []
