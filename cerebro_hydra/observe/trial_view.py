"""Holds what has become of one trial."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cerebro_hydra.plan.instructions import ChangeCut


@dataclass
class TrialView:
    """One trial: its parameters, where it is, and what it has measured."""

    trial: int
    trial_id: str
    params: dict[str, Any]
    keep: str = "last"
    """Whether its result is the state after its "best" epoch, or after its "last"."""
    status: str = "waiting"
    """"waiting", "training", "evaluating", or the end: "finished", "failed", "stopped", and
    "interrupted" if the run ended before the trial."""
    budget: int = 0
    """The epoch up to which the search lets it train; 0 before it is admitted."""
    reason: str = ""
    """Why it ended: a failed trial's traceback, or why a trial stopped early."""
    uncut_because: str = ""
    """What an audit found to differ, so that it is trained again in one piece."""
    epoch: int = 0
    partition: int | None = None
    worker: int | None = None
    attempt: int | None = None
    """The task that it is in; the next one may start before this one is committed."""
    loss: float | None = None
    """Training loss of the latest batch or sub-epoch that an agent reported."""
    base: int = 0
    """The visit at which it was forked from another trial, whose sub-epochs and epochs before that
    are its own too; 0 if it was not."""
    visits: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(epoch, partition) of each surviving sub-epoch, by visit."""
    epochs: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics of each ended epoch: "train_loss", "val_loss", ..."""
    best_epoch: int | None = None
    """The epoch, from 0, with the best finite value so far; None for trials that keep the last."""
    shards: int = 0
    shards_before: int = 0
    """How many it had before it ran out of memory and was cut finer; 0 if it was not."""
    parameters: int = 0
    """How many the model has, frozen ones too; 0 if it was not admitted."""
    result_visit: int | None = None
    """The visit whose state is its result, which the run folder holds; 0 if it failed."""
    seconds: float = 0.0
    """Seconds spent in sub-epochs, their hops and evaluations, repeated ones too."""
    sub_epochs: int = 0
    """How many sub-epochs those seconds include."""

    @property
    def over(self) -> bool:
        """Return whether nothing more will happen to it."""
        return self.status in ("finished", "failed", "stopped")

    def change_cut(self, change: ChangeCut) -> None:
        """Note that it was cut finer."""
        self.shards, self.shards_before = change.shards, change.shards_before

    @property
    def stopped_early(self) -> bool:
        """Return whether it finished before its last epoch because it had stopped improving."""
        return self.status == "finished" and self.reason != ""

    @property
    def result_epoch(self) -> int | None:
        """Return the epoch, from 0, of its result: the best one, or the last that ended."""
        return self.best_epoch if self.best_epoch is not None else max(self.epochs, default=None)

    @property
    def result_metrics(self) -> dict[str, float]:
        """Return the metrics of `result_epoch`; empty before the first epoch has ended."""
        epoch = self.result_epoch
        return {} if epoch is None else self.epochs[epoch]

    @property
    def visit_log(self) -> list[tuple[int, int]]:
        """Return (epoch, partition) of each surviving sub-epoch, in the order of training."""
        return [self.visits[visit] for visit in sorted(self.visits)]

    @property
    def history(self) -> dict[str, list[float]]:
        """Return the values of each measured name, one per ended epoch."""
        ended = [self.epochs[epoch] for epoch in sorted(self.epochs)]
        return {name: [metrics[name] for metrics in ended] for name in (ended[0] if ended else ())}
