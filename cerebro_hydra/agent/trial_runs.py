"""Opens the sub-epochs and evaluations of trials that are built with the user's factory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cerebro_hydra.agent.device_messages import RunOrder
from cerebro_hydra.agent.device_run import DeviceRun
from cerebro_hydra.agent.partitions import Partitions, decode_partitions
from cerebro_hydra.agent.trial_builder import TrialBuilder
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.plan.instructions import Evaluate
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.gradient_layout import GradientLayout
from cerebro_hydra.shards.layout import Segments, TrialLayout
from cerebro_hydra.shards.memory_watch import MemoryLimit
from cerebro_hydra.shards.shard_evaluation import ShardEvaluation
from cerebro_hydra.shards.shard_run import ShardRun
from cerebro_hydra.shards.task_profile import TaskProfile
from cerebro_hydra.shards.trial_profile import TrialProfile
from cerebro_hydra.storage import Store
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec


def open_trials(
    document: RunDocument,
    manifest: Manifest,
    own: Sequence[int],
    scratch: str,
    factory: Callable[..., Any],
) -> TrialRuns:
    """Return what opens runs in a process of its own."""
    torch.set_num_threads(document.threads)
    store = Store.from_dict(dict(document.store))
    decoded = partial(decode_partitions, manifest, store, scratch, None)
    splits = decoded(own)
    return TrialRuns(TrialBuilder(document, factory, splits["train"], splits["val"]), decoded)


class TrialRuns:
    """Opens runs of the trials of a builder.

    Args:
        decoded: decodes the partitions that a lost worker had, when the first task on them comes.
    """

    def __init__(
        self, builder: TrialBuilder, decoded: Callable[[Sequence[int]], Mapping[str, Partitions]]
    ) -> None:
        self._builder = builder
        self._decoded = decoded

    def profile(self, trial: TrialSpec) -> TrialProfile:
        """Build a trial, unless it was built before, and describe it."""
        self._builder.add(trial)
        runtime = self._builder.get(trial.trial)
        tasks = None if trial.tasks is None else TaskProfile.from_json(trial.tasks)
        return TrialProfile.of(runtime.recipe, runtime.cut_model, runtime.layout, tasks)

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        self._builder.forget(trial)

    def open(self, order: RunOrder) -> DeviceRun:
        """Return a run of a trial."""
        task = order.task
        self._builder.add(order.trial)
        if not self._builder.has(task.partition):
            splits = self._decoded([task.partition])
            self._builder.add_partitions(splits["train"], splits["val"])
        runtime = self._builder.get(task.trial)
        cut = (runtime.cut_model, runtime.layout, runtime.recipe, runtime.spec.seed)
        shared, limit = (), None
        if (tasks := order.trial.tasks) is not None:
            shared = tasks["shared"]
            if order.task_bytes is not None and runtime.recipe.collate is not None:
                limit = MemoryLimit(tasks["batch"], order.task_bytes)  # else batches are alike
        if isinstance(task, Evaluate):
            batches = self._builder.validation(task.trial, task.partition)
            return EvaluationRun(ShardEvaluation(*cut, batches, shared, limit))
        windows = self._builder.windows(task.trial, task.epoch, task.partition)
        run = ShardRun(
            *cut,
            runtime.spec.steps_per_epoch,
            order.recompute,
            order.start_step,
            windows,
            task.metrics or None,
            shared,
            limit,
        )
        return TrainingRun(run, runtime.layout, order.recompute)


class TrainingRun:
    """Trains a trial on a device."""

    def __init__(self, run: ShardRun, layout: TrialLayout, recompute: bool) -> None:
        self.stays = not recompute
        self._marks = [len(GradientLayout.of(shard).entries) for shard in layout.shards]
        self._run = run
        self._gradients: dict[int, Any] = {}  # the slots of the shards that have one

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        """Bind a shard to its slots."""
        self._gradients[shard] = slots.get("gradients")
        given = None if cursor is None else dict(cursor)
        self._run.load(shard, slots, given, self._gradients[shard])

    def unload(self, shard: int) -> tuple[Mapping[str, Any], bool]:
        """Leave a shard's slots as the run has changed them."""
        self._run.unload(shard)
        slot = self._gradients.pop(shard)
        has_gradients = slot is not None and bool(slot[: self._marks[shard]].any())
        return self._run.cursor(shard), has_gradients

    def perform(self, task: Action) -> tuple[float, int] | None:
        """Do a task; the loss counts once the microbatch has ended."""
        self._run.perform(task)
        ended = task.kind is ActionKind.B and task.shard == 0
        return self._run.losses[task.microbatch or 0] if ended else None

    def close(self) -> None:
        """End the run after its last task."""
        self._run.close()

    def cancel(self) -> None:
        """End the run where it stands."""
        self._run.cancel()


class EvaluationRun:
    """Evaluates a trial on a device."""

    stays = False

    def __init__(self, run: ShardEvaluation) -> None:
        self._run = run

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        """Bind a shard to its slots."""
        self._run.load(shard, slots)

    def unload(self, shard: int) -> tuple[None, bool]:
        """Leave a shard's slots, which are as they were."""
        self._run.unload(shard)
        return None, False

    def perform(self, task: Action) -> None:
        """Do F of a shard."""
        self._run.perform(task)

    def close(self) -> Evaluation:
        """End the evaluation, and return what it gave."""
        self._run.close()
        return self._run.result

    def cancel(self) -> None:
        """End the evaluation where it stands."""
        self._run.close()
