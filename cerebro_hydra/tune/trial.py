"""Describes one trial of a search, as its result shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cerebro_hydra.observe.trial_view import TrialView

History = dict[str, list[float]]
"""Measured values by name, one per ended epoch."""


@dataclass(frozen=True)
class Trial:
    """Describes one trial of a search.

    `status` is "finished", "failed", "stopped", or where an unfinished run left it; `error` is a
    failed trial's traceback. `history` has one value per ended epoch, `visit_log` one (epoch,
    partition) per sub-epoch, both from 0 as in the journal, in the order in which the trial trained
    on them. `result_epoch` is the epoch, counted from 1, whose weights are the trial's result: its
    best or its last, as the search keeps; None before the first has ended.
    `seconds` were spent in its sub-epochs, hops and evaluations, repeated ones too.
    """

    trial_id: str
    params: dict[str, Any]
    status: str
    history: History
    visit_log: list[tuple[int, int]]
    error: str | None = None
    result_epoch: int | None = None
    seconds: float = 0.0

    @property
    def has_result(self) -> bool:
        """Return whether the run keeps a state as its result: it has trained, and did not fail."""
        return self.status in ("finished", "stopped") and bool(self.visit_log)

    @property
    def result_metrics(self) -> dict[str, float]:
        """Return what was measured after `result_epoch`; empty before the first has ended."""
        return self.metrics_of(self.result_epoch) if self.result_epoch else {}

    def metrics_of(self, epoch: int) -> dict[str, float]:
        """Return what was measured after an epoch, counted from 1."""
        return {name: values[epoch - 1] for name, values in self.history.items()}

    @classmethod
    def of_view(cls, view: TrialView) -> Trial:
        """Return a trial of a run."""
        return cls(
            view.trial_id,
            view.params,
            view.status,
            view.history,
            view.visit_log,
            view.reason if view.status == "failed" else None,
            None if view.result_epoch is None else view.result_epoch + 1,
            view.seconds,
        )
