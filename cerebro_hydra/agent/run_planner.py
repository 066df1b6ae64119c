"""Describes the tasks of an agent to its queues: microbatches, bytes, what is computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from cerebro_hydra.agent.task_watch import Task
from cerebro_hydra.agent.trial_profile import TrialProfile
from cerebro_hydra.data.batches import batch_sizes
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.plan.events import EvaluationDone, SubEpochDone
from cerebro_hydra.plan.instructions import StartSubEpoch
from cerebro_hydra.plan.run_progress import RunSpec
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec

Split = Literal["train", "val"]


class RunPlanner:
    """Knows the trials and the rows of a run.

    Args:
        trials: by their number.
        rows: returns how many rows a partition of a split has.
        budget: the bytes of the smallest device; None if that has no limit.
    """

    def __init__(
        self,
        trials: Sequence[TrialSpec],
        rows: Callable[[Split, int], int],
        budget: int | None,
    ) -> None:
        self._trials = trials
        self._rows = rows
        self._budget = budget

    @classmethod
    def of(cls, document: RunDocument, manifest: Manifest, budget: int | None) -> RunPlanner:
        """Return the planner of a run."""
        rows = {(info.split, info.index): info.rows for info in manifest.partitions}
        return cls(document.trials, lambda split, partition: rows[split, partition], budget)

    def num_shards(self, trial: int) -> int:
        """Return how many shards a trial has."""
        return len(self._trials[trial].shards)

    def run_spec(self, number: int, task: Task, profile: TrialProfile) -> RunSpec:
        """Describe a task as a run."""
        trial = self._trials[task.trial]
        if not isinstance(task, StartSubEpoch):
            sizes = batch_sizes(self._rows("val", task.partition), trial.batch_size)
            return profile.evaluation(number, len(sizes))
        sizes = batch_sizes(self._rows("train", task.partition), trial.batch_size)
        recompute = trial.recompute
        if recompute is None:
            recompute = self._budget is not None and profile.state_bytes > self._budget
        return profile.training(number, len(sizes), trial.accumulate, recompute)

    def fault(self, task: Task, result: SubEpochDone | EvaluationDone) -> str | None:
        """Return what is wrong with the rows that a sub-epoch trained on, None if nothing is."""
        expected = self._rows("train", task.partition)
        if isinstance(result, EvaluationDone) or result.rows == expected:
            return None
        return (
            f"epoch {task.epoch} trained on {result.rows} rows of partition {task.partition}, "
            f"which has {expected}"
        )
