"""Describes the tasks of an agent to its queues: microbatches, bytes, what is computed again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from cerebro_hydra.agent.task_watch import Task
from cerebro_hydra.data.batches import batch_sizes
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.plan.events import EvaluationDone, SubEpochDone
from cerebro_hydra.plan.instructions import StartSubEpoch
from cerebro_hydra.plan.run_progress import RunSpec
from cerebro_hydra.plan.schedules.candidate import Candidate, oldest_first
from cerebro_hydra.plan.schedules.sharp import sharp
from cerebro_hydra.shards.trial_profile import TrialProfile
from cerebro_hydra.storage.names import trial_name
from cerebro_hydra.storage.run_document import TrialSpec

Split = Literal["train", "val"]

_log = logging.getLogger(__name__)


class RunPlanner:
    """Knows the trials that the agent was told of, and the rows of a run.

    Args:
        rows: returns how many rows a partition of a split has.
        budget: the bytes of the smallest device; None if that has no limit.
        devices: how many there are.
    """

    def __init__(
        self, rows: Callable[[Split, int], int], budget: int | None, devices: int = 1
    ) -> None:
        self._trials: dict[int, TrialSpec] = {}
        self._rows = rows
        self._budget = budget
        self._devices = devices
        self._sparing: set[int] = set()  # trials that have run out of memory
        self._rule: Callable[[Sequence[Candidate]], Candidate] = oldest_first
        self._audits: set[int] = set()  # the runs that audit another one

    @classmethod
    def of(cls, manifest: Manifest, budget: int | None, devices: int) -> RunPlanner:
        """Return the planner of a run."""
        rows = {(info.split, info.index): info.rows for info in manifest.partitions}
        return cls(lambda split, partition: rows[split, partition], budget, devices)

    def learn(self, spec: TrialSpec) -> bool:
        """Take in what a trial is, before anything else is asked of it; called from any thread.

        Return whether it was another one before, because it was cut finer.
        """
        before = self._trials.get(spec.trial, spec)
        self._trials[spec.trial] = spec
        if spec.schedule == "sharp":
            self._rule = sharp
        return before != spec

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        self._trials.pop(trial, None)
        self._sparing.discard(trial)

    def knows(self, trial: int) -> bool:
        """Return whether a trial is not over."""
        return trial in self._trials

    def trial(self, trial: int) -> TrialSpec:
        """Return what a trial is."""
        return self._trials[trial]

    @property
    def has_budget(self) -> bool:
        """Return whether the devices' memory has a limit."""
        return self._budget is not None

    def rule(self, candidates: Sequence[Candidate]) -> Candidate:
        """Pick by SHARP once a trial of that schedule was here, else the oldest run first.

        Audits come first, because the runs that they audit wait for them.
        """
        audits = [each for each in candidates if each.run in self._audits]
        return self._rule(audits or candidates)

    def run_spec(self, number: int, task: Task, profile: TrialProfile) -> RunSpec:
        """Describe a task as a run."""
        trial = self._trials[task.trial]
        if not isinstance(task, StartSubEpoch):
            sizes = batch_sizes(self._rows("val", task.partition), trial.batch_size)
            return profile.evaluation(number, len(sizes))
        sizes = batch_sizes(self._rows("train", task.partition), trial.batch_size)
        if task.uncut:
            return self._uncut(number, len(sizes), trial.accumulate, profile)
        recompute = profile.recomputes(trial.recompute, self._budget, trial.accumulate)
        recompute |= task.trial in self._sparing
        return profile.training(number, len(sizes), trial.accumulate, recompute, self._devices)

    def audit_spec(self, number: int, audited: RunSpec, profile: TrialProfile) -> RunSpec:
        """Describe the run that takes the first step of another one again."""
        self._audits.add(number)
        graph = audited.graph
        return self._uncut(number, len(graph.window_of(0)), graph.window, profile)

    def end_audit(self, number: int) -> None:
        """Note that an audit is over."""
        self._audits.discard(number)

    def _uncut(self, number: int, microbatches: int, window: int, profile: TrialProfile) -> RunSpec:
        """Describe a run of the uncut model: whole if a device has room for it, else by shard."""
        recompute = profile.recomputes(None, self._budget, window)
        return profile.training(number, microbatches, window, recompute)

    def can_spare(self, run: RunSpec, trial: TrialSpec, profile: TrialProfile) -> bool:
        """Return whether a run that ran out of memory may need less when it is done once more.

        From now on the trial's activations are computed again instead of kept.
        """
        can_recompute = profile.tasks is None or profile.tasks.recompute is not None
        if not run.keeps_all or trial.recompute is not None or not can_recompute:
            return False
        self._sparing.add(trial.trial)
        _log.warning(
            "%s ran out of memory; its activations are computed again from now on",
            trial_name(trial.trial),
        )
        return True

    def helps_finer(self, task: Task, run: RunSpec) -> bool:
        """Return whether a run that ran out of memory would need less in more shards."""
        return self.has_budget and not (run.keeps_all or task.uncut)

    def fault(self, task: Task, result: SubEpochDone | EvaluationDone) -> str | None:
        """Return what is wrong with the rows that a sub-epoch trained on, None if nothing is."""
        expected = self._rows("train", task.partition)
        if isinstance(result, EvaluationDone) or result.rows == expected:
            return None
        return (
            f"epoch {task.epoch + 1} trained on {result.rows} rows of partition {task.partition}, "
            f"which has {expected}"
        )
