"""Opens the sub-epochs and evaluations of trials that are built with the user's factory.

A trial is trained uncut on a device that has all of its shards at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, cast

import torch

from cerebro_hydra.agent.device.builder import Partitions, TrialBuilder, decode_partitions
from cerebro_hydra.agent.device.device import DeviceRun, MovingDeviceRun
from cerebro_hydra.agent.device.messages import Done, RunOrder
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.messages.instructions import Evaluate
from cerebro_hydra.recipe import Evaluation, Recipe, Window
from cerebro_hydra.recipe.placement import CPU
from cerebro_hydra.recipe.randomness import compute_as, compute_deterministically
from cerebro_hydra.shards.admission.profile import TaskProfile, TrialProfile
from cerebro_hydra.shards.engine.differences import tensor_digests
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.layout import (
    Bytes,
    GradientLayout,
    Segments,
    TrialLayout,
    memory_of,
)
from cerebro_hydra.shards.engine.microbatch import MemoryLimit
from cerebro_hydra.shards.engine.pass_record import PassRecord
from cerebro_hydra.shards.engine.shard_run import MovingRun, ShardRun
from cerebro_hydra.shards.engine.uncut import uncut_training
from cerebro_hydra.storage import Store
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec


def open_trials(
    document: RunDocument,
    manifest: Manifest,
    own: Sequence[int],
    scratch: str,
    factory: Callable[..., Any],
    device: torch.device = CPU,
) -> TrialRuns:
    """Return what opens runs on a device, in a process of its own."""
    torch.set_num_threads(document.threads)
    compute_as(document.numerics)
    compute_deterministically(device)
    store = Store.from_dict(dict(document.store))
    decoded = partial(decode_partitions, manifest, store, scratch, None)
    splits = decoded(own)
    builder = TrialBuilder(document, factory, splits["train"], splits["val"], device)
    return TrialRuns(builder, decoded)


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
        self._spares: dict[int, Recipe | Exception] = {}  # for the next audit of each trial

    def profile(self, trial: TrialSpec) -> TrialProfile:
        """Build a trial, unless it was built before, and describe it."""
        self._builder.add(trial)
        runtime = self._builder.get(trial.trial)
        tasks = None if trial.tasks is None else TaskProfile.from_json(trial.tasks)
        profile = TrialProfile.of(runtime.recipe, runtime.cut_model, runtime.layout, tasks)
        return replace(profile, build_seconds=runtime.build_seconds)

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        self._builder.forget(trial)
        self._spares.pop(trial, None)

    def open(self, order: RunOrder) -> DeviceRun:
        """Return a run of a trial."""
        task = order.task
        self._builder.add(order.trial)
        if not self._builder.has(task.partition):
            splits = self._decoded([task.partition])
            self._builder.add_partitions(splits["train"], splits["val"])
        if order.watched or order.audits:
            self._build_spare(task.trial)
        runtime = self._builder.get(task.trial)
        recipe, cut_model, layout = runtime.recipe, runtime.cut_model, runtime.layout
        if order.audits:
            recipe = self._take_spare(task.trial)
        if order.audits or task.uncut:
            cut_model = cut_model.eager(recipe.model)
        seed, steps = runtime.spec.seed, runtime.spec.steps_per_epoch
        cut = (cut_model, layout, recipe, seed)
        shared, limit = (), None
        if (tasks := order.trial.tasks) is not None:
            shared = tasks["shared"]
            if order.task_bytes is not None and recipe.collate is not None:
                limit = MemoryLimit(tasks["batch"], order.task_bytes)  # else batches are alike
        if isinstance(task, Evaluate):
            batches = self._builder.validation(task.trial, task.partition)
            return EvaluationRun(ShardEvaluation(*cut, batches, shared, limit))
        windows = self._builder.windows(task.trial, task.epoch, task.partition)
        metrics = task.metrics or None
        if order.audits:
            windows = islice(windows, 1)
        run: DeviceRun
        if (order.audits or task.uncut) and not order.recompute:
            run = PlainRun(recipe, layout, seed, steps, order.start_step, windows, metrics)
        else:
            kind = MovingRun if order.moves else ShardRun
            sub_epoch = kind(
                *cut, steps, order.recompute, order.start_step, windows, metrics, shared, limit
            )
            run = TrainingRun(sub_epoch, layout, order.recompute)
        if order.watched or order.audits:
            return WatchedRun(run, layout, recipe.accumulate)
        return run

    def _build_spare(self, trial: int) -> None:
        """Build a second recipe of a trial for an audit, while no run uses its model.

        The factory may give the same model again, or fail; then the audit tells of it.
        """
        if trial not in self._spares:
            try:
                self._spares[trial] = self._builder.another_recipe(trial)
            except Exception as error:
                self._spares[trial] = error
            kept = filter(self._builder.keeps, self._spares)
            self._spares = {each: self._spares[each] for each in kept}

    def _take_spare(self, trial: int) -> Recipe:
        spare = self._spares.pop(trial)
        if isinstance(spare, Exception):
            raise spare
        return spare


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

    def perform(self, task: Action) -> Done:
        """Do a task; the loss counts once the microbatch has ended."""
        self._run.perform(task)
        number = task.microbatch or 0
        if task.kind is ActionKind.B and task.shard == 0:
            return Done(task, losses={number: self._run.losses[number]})
        return Done(task)

    def take_up(self, task: Action, slab: Bytes, record: PassRecord) -> None:
        """Begin a unit of a microbatch that moves."""
        assert isinstance(self._run, MovingRun)
        self._run.take_up(task, memory_of(slab), record)

    def put_down(self) -> PassRecord:
        """End such a unit."""
        assert isinstance(self._run, MovingRun)
        return self._run.put_down()

    def close(self) -> None:
        """End the run after its last task."""
        self._run.close()

    def cancel(self) -> None:
        """End the run where it stands."""
        self._run.cancel()


class WatchedRun:
    """Tells the digests of each shard after the first step of another run, for an audit."""

    def __init__(self, run: DeviceRun, layout: TrialLayout, accumulate: int) -> None:
        self.stays = run.stays
        self._run = run
        self._layout = layout
        self._accumulate = accumulate
        self._slots: dict[int, Segments] = {}

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        """Take a shard."""
        self._slots[shard] = slots
        self._run.load(shard, slots, cursor)

    def unload(self, shard: int) -> tuple[Mapping[str, Any] | None, bool]:
        """Let go of a shard."""
        del self._slots[shard]
        return self._run.unload(shard)

    def perform(self, task: Action) -> Done:
        """Do a task, and look at what the first step has made of its shard."""
        done, k = self._run.perform(task), task.shard
        if task.kind is not ActionKind.U or (task.microbatch or 0) >= self._accumulate:
            return done
        digests = tensor_digests(self._layout.shards[k], self._slots[k]["trainable"])
        return replace(done, digests=digests)

    def take_up(self, task: Action, slab: Bytes, record: PassRecord) -> None:
        """Begin a unit of a microbatch that moves."""
        cast(MovingDeviceRun, self._run).take_up(task, slab, record)

    def put_down(self) -> PassRecord:
        """End such a unit."""
        return cast(MovingDeviceRun, self._run).put_down()

    def close(self) -> Evaluation | None:
        """End the run after its last task."""
        return self._run.close()

    def cancel(self) -> None:
        """End the run where it stands."""
        self._slots.clear()
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

    def perform(self, task: Action) -> Done:
        """Do F of a shard."""
        self._run.perform(task)
        return Done(task)

    def close(self) -> Evaluation:
        """End the evaluation, and return what it gave."""
        self._run.close()
        return self._run.result

    def cancel(self) -> None:
        """End the evaluation where it stands."""
        self._run.close()


class PlainRun:
    """Takes each step with the plain trainer, when the last microbatch's first backward comes.

    All shards are loaded then, because the run keeps them from F to B. Its other tasks do nothing.

    Args:
        windows: the batches of each optimizer step.
        start_step: the number of optimizer steps that the trial has done before.
        epoch_metrics: see `Engine.train`.
    """

    stays = True

    def __init__(
        self,
        recipe: Recipe,
        layout: TrialLayout,
        trial_seed: int,
        steps_per_epoch: int,
        start_step: int,
        windows: Iterator[Window],
        epoch_metrics: Mapping[str, float] | None,
    ) -> None:
        self._recipe = recipe
        self._layout = layout
        self._trial_seed = trial_seed
        self._steps_per_epoch = steps_per_epoch
        self._start_step = start_step
        self._windows = enumerate(windows)
        self._at: tuple[int, Window] = (-1, ())
        self._epoch_metrics = epoch_metrics
        self._slots: dict[int, Segments] = {}
        self._cursors: dict[int, dict[str, Any] | None] = {}

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        """Take a shard, which lies in the slots."""
        self._slots[shard] = slots
        self._cursors[shard] = None if cursor is None else dict(cursor)

    def unload(self, shard: int) -> tuple[Mapping[str, Any] | None, bool]:
        """Let go of a shard."""
        del self._slots[shard]
        return self._cursors[shard], False

    def perform(self, task: Action) -> Done:
        """Take a step if the task is the first backward of its last microbatch."""
        number = task.microbatch or 0
        place, window = divmod(number, self._recipe.accumulate)[::-1]
        while self._at[0] < window:
            self._at = next(self._windows)
        last_of_all = place == len(self._at[1]) - 1 and task.shard == len(self._layout.shards) - 1
        if task.kind is not ActionKind.B or not last_of_all:
            return Done(task)
        losses = self._step(self._start_step + window, self._at[1])
        first = number - place
        of_batches = zip(losses, self._at[1], strict=True)
        return Done(
            task, losses={first + n: (loss, b.rows) for n, (loss, b) in enumerate(of_batches)}
        )

    def _step(self, step: int, window: Window) -> list[float]:
        numbers = range(len(self._layout.shards))
        metrics = self._epoch_metrics if step == self._start_step else None
        torch.set_num_threads(torch.get_num_threads())  # OpenMP keeps their number per thread
        with uncut_training(
            self._recipe, self._layout, [self._slots[k] for k in numbers], self._cursors[0],
            self._trial_seed, self._steps_per_epoch, step, metrics,
        ) as training:  # fmt: skip
            losses = training.step(window)
            training.check_unwritten()
            cursor = training.cursor()
        self._cursors = dict.fromkeys(numbers, cursor)
        return losses

    def close(self) -> None:
        """End the run; nothing is left to be done."""

    def cancel(self) -> None:
        """End the run where it stands."""
        self._slots.clear()
