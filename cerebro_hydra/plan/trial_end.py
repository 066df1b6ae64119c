"""Tells from a trial's history alone how the trial ends and which state is its result."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite
from typing import NamedTuple

from cerebro_hydra.plan.hop_config import HopConfig
from cerebro_hydra.plan.progress import TrialProgress, TrialStatus


class Outcome(NamedTuple):
    """Holds the status and reason with which a trial ends once its result is in the store."""

    status: TrialStatus
    reason: str


def outcome(config: HopConfig, trial: TrialProgress, search_closed: bool) -> Outcome | None:
    """Return the trial's outcome, or None while it has epochs to train or may be given more."""
    if trial.stop_reason is not None:
        return Outcome("stopped", trial.stop_reason)
    if search_closed and len(trial.history) >= trial.budget:
        return Outcome("finished", "")
    patience = trial.config.patience
    if patience is None:
        return None
    best = _best_epoch(config, trial, trial.newest)
    since = first_epoch(trial.base, config.partitions) if best is None else best + 1
    if len(trial.history) - since < patience:
        return None
    epochs = "1 epoch" if patience == 1 else f"{patience} epochs"
    if best is None:
        return Outcome("finished", f"stopped early: {config.metric} was not finite in {epochs}")
    value = trial.history[best][config.metric]
    reason = (
        f"stopped early: {config.metric} was best after epoch {best + 1} ({value:.4g}) "
        f"and not better for {epochs}"
    )
    return Outcome("finished", reason)


def best_epoch(values: Iterable[float], direction: str) -> int | None:
    """Return the first epoch with the best finite value, or None if there is none.

    ``direction`` is "min" or "max".
    """
    best, at = inf, None
    for epoch, value in enumerate(values):
        loss = -value if direction == "max" else value
        if isfinite(value) and loss < best:
            best, at = loss, epoch
    return at


def best_visit(config: HopConfig, trial: TrialProgress, visits: int) -> int | None:
    """Return the visit of the best state among the epochs that the first ``visits`` complete.

    It is None if the trial keeps its last state, or if no such epoch was finite.
    """
    best = _best_epoch(config, trial, visits) if trial.config.keep == "best" else None
    return None if best is None else (best + 1) * config.partitions


def _best_epoch(config: HopConfig, trial: TrialProgress, visits: int) -> int | None:
    """Return the best of the epochs that the first ``visits`` complete.

    Of the epochs that a fork inherits only the last one counts, and only if it goes on from the end
    of that.
    """
    first = first_epoch(trial.base, config.partitions)
    epochs = trial.history[first : visits // config.partitions]
    best = best_epoch((metrics[config.metric] for metrics in epochs), config.direction)
    return None if best is None else first + best


def first_epoch(base: int, partitions: int) -> int:
    """Return the first epoch after which a state was the own one of a trial that began at base."""
    return max(0, -(-base // partitions) - 1)


def result_visit(config: HopConfig, trial: TrialProgress) -> int:
    """Return the visit of the trial's result so far: its best state, else its newest."""
    best = best_visit(config, trial, trial.newest)
    return trial.newest if best is None else best


def needed_visits(config: HopConfig, trial: TrialProgress, search_closed: bool) -> set[int]:
    """Return the visits of the states that a trial needs: its result and, to go on, its newest."""
    if outcome(config, trial, search_closed) is not None:
        return {result_visit(config, trial)}
    return {result_visit(config, trial), trial.newest}
