"""Audits training: now and then one step is also taken by the uncut model, and compared.

Where a second copy of the whole state does not fit, the step is taken with the model's own forward
while one shard at a time is in memory.

An audit compares it with the step that the engine took, where a second copy of the whole state does
not fit. For a cut by graph it compares the graphs with the user's modules. A cut by modules runs
the same code, so there it compares what lies around it: whether recomputing equals keeping, state
that left memory and came back, what shards share or alias, the order of updates and of the barrier
before clipping, and a model that was built anew with one that has trained.

The step is the first of a sub-epoch: the state before it stays until the sub-epoch is committed, so
that nobody has to copy it.


An audit is a run of its own, of one step from the same state, by a model that the factory builds
anew: the plain trainer trains it where a device has room for the whole, else its own forward runs
shard by shard; see `agent/audits.py` for what that guards. The queues bring its shards like
those of any other run, so that it keeps to every budget.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from cerebro_hydra.agent.device.builder import TrialBuilder, TrialRuntime
from cerebro_hydra.agent.device.messages import Done
from cerebro_hydra.agent.device.process import WorkerDevice
from cerebro_hydra.agent.device.task_watch import Task, TaskWatch, located
from cerebro_hydra.agent.memory.pool import ScratchFile
from cerebro_hydra.agent.memory.segment_store import SegmentStore
from cerebro_hydra.agent.memory.shard_store import HeldShard
from cerebro_hydra.agent.queued_run import QueuedRun
from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import NonFiniteLoss, StepDiffers
from cerebro_hydra.plan.messages.actions import ActionKind
from cerebro_hydra.plan.messages.instructions import StartSubEpoch
from cerebro_hydra.plan.policy.audit_budget import AuditBudget
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.recipe import Recipe, Window
from cerebro_hydra.shards.admission.profile import TrialProfile
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.cut.sample import copy_example
from cerebro_hydra.shards.engine.differences import StepResult, tensor_digests
from cerebro_hydra.shards.engine.engine import Cursor
from cerebro_hydra.shards.engine.layout import (
    Bytes,
    GradientLayout,
    HostSegments,
    ShardLayout,
    TrialLayout,
    memory_of,
    on_host,
)
from cerebro_hydra.shards.engine.shard_run import ShardRun
from cerebro_hydra.shards.engine.uncut import PlainStep

STEPS_OF_AN_AUDIT = 4
"""Steps of training that a trial's first audit is thought to last, beside the factory."""

_log = logging.getLogger(__name__)


class Auditor:
    """Audits the sub-epochs of an agent, within a share of its training time and its memory.

    Args:
        builder: builds a second recipe of the audited trial.
        segments: gives memory for a copy of its state.
        watch: times the uncut step as a batch of its own.
        share: how much of the training time audits may take; 0 makes none.
    """

    def __init__(
        self, builder: TrialBuilder, segments: SegmentStore, watch: TaskWatch, share: float
    ) -> None:
        self.builder = builder
        self.segments = segments
        self.watch = watch
        self.budget = AuditBudget(share)
        self.recipes: dict[int, Recipe] = {}  # for the next audit of each trial
        self._seconds: dict[int, float] = {}  # of each trial's latest audit
        self._impossible: set[int] = set()  # the trials that can't be audited here

    def prepare(self, task: StartSubEpoch) -> None:
        """Let the factory build a model to audit with, while no engine uses the trial's own."""
        trial, begun = task.trial, time.perf_counter()
        if not self.budget.share or trial in self.recipes or trial in self._impossible:
            return
        seconds = self.builder.get(trial).build_seconds + self._seconds.get(trial, 0.0)
        if self.budget.allows(seconds, first_epoch=task.epoch == 0):
            with self.told_if_impossible(task), self.watch.waiting():
                self.recipes[trial] = self.builder.another_recipe(trial)
                self.recipes = {
                    n: each for n, each in self.recipes.items() if self.builder.keeps(n)
                }
            self.budget.spent += time.perf_counter() - begun

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        self.recipes.pop(trial, None)
        self._seconds.pop(trial, None)
        self._impossible.discard(trial)

    def is_due(self, task: StartSubEpoch, step_seconds: float) -> bool:
        """Return whether a step may be audited now."""
        seconds = self._seconds.get(task.trial, STEPS_OF_AN_AUDIT * step_seconds)
        allowed = self.budget.allows(seconds, first_epoch=task.epoch == 0)
        return allowed and task.trial in self.recipes

    def note(self, task: StartSubEpoch, seconds: float) -> None:
        """Note how long an audit took, without the time of the factory."""
        self._seconds[task.trial] = seconds

    @contextmanager
    def told_if_impossible(self, task: StartSubEpoch) -> Iterator[None]:
        """Give audits of a trial up where the body raises; keep random numbers as they are."""
        try:
            with _random_numbers_kept():
                yield
        except Exception as error:
            self._impossible.add(task.trial)
            _log.warning(
                "steps of this trial are no longer audited on worker %d: %s: %s",
                task.worker, type(error).__name__, error,
            )  # fmt: skip

    @contextmanager
    def sub_epoch(
        self, task: StartSubEpoch, runtime: TrialRuntime, look: Callable[[int], HeldShard]
    ) -> Iterator[SubEpochAudit]:
        """Audit one step of a sub-epoch, if the budget comes to allow it.

        Args:
            look: returns a shard of the state before.
        """
        audit = SubEpochAudit(self, task, runtime, look)
        try:
            yield audit
        finally:
            audit.close()


class SubEpochAudit:
    """Watches the steps of one sub-epoch, and takes one of them again.

    It is the step after the moment at which the budget allows it. Where memory has no room for a
    second copy of the state, it is the first step, taken by shard from the state before.

    Attributes:
        seconds: what an audit took that was made to its end; 0 if there was none.
    """

    def __init__(
        self,
        auditor: Auditor,
        task: StartSubEpoch,
        runtime: TrialRuntime,
        look: Callable[[int], HeldShard],
    ) -> None:
        self._auditor = auditor
        self._task = task
        self._runtime = runtime
        self._look = look
        self._held: dict[int, HostSegments] = {}
        self._ahead: Sequence[Batch] | None = None  # the window of the next step
        self._step_began: float | None = None
        self._plain: PlainStep | None = None
        self._first: tuple[int, StepResult] | None = None  # if it is audited by shard
        self._preparation = 0.0  # its seconds
        self._over = False
        self.seconds = 0.0

    def windows(self, windows: Iterator[Sequence[Batch]]) -> Iterator[Sequence[Batch]]:
        """Pass windows on to the engine, which asks for each before it takes the step before."""
        for window in windows:
            self._ahead = window
            yield window
        self._ahead = None

    def hold(self, shard: int, segments: HostSegments) -> None:
        """Note the memory that the engine trains a shard in."""
        self._held[shard] = segments

    def after_step(self, step: int, loss: float, cursor: Callable[[], Cursor]) -> None:
        """Compare the step if it is the audited one, or prepare to audit the next one.

        Raises:
            StepDiffers: the uncut model takes this step otherwise.
        """
        budget, now = self._auditor.budget, time.perf_counter()
        # The first step waits for shards, too, so that its seconds are not known.
        seconds = 0.0 if self._step_began is None else now - self._step_began
        budget.trained += seconds
        try:
            if self._plain is not None:
                self._compare(self._plain, loss)
            elif self._step_began is None and self._is_by_shard():
                self._note_first(step, loss)
            if self._is_due(seconds):
                if self._first is None:
                    if self._ahead is not None:
                        self._prepare(step + 1, cursor())
                elif self._step_began is not None or self._ahead is None:  # it waits for seconds
                    self._compare_first(*self._first)
        finally:
            budget.spent += time.perf_counter() - now
        self._step_began = time.perf_counter()

    def _is_due(self, step_seconds: float) -> bool:
        return not self._over and self._auditor.is_due(self._task, step_seconds)

    def _is_by_shard(self) -> bool:
        """Return whether the trial would be audited, and memory has room for its shards alone."""
        layout, memory = self._runtime.layout, self._auditor.segments
        if self._task.trial not in self._auditor.recipes or memory.has_room(layout.nbytes):
            return False
        return len(layout.shards) > 1 and memory.has_room(memory_of_step(layout))

    def _note_first(self, step: int, loss: float) -> None:
        """Keep what the first step gave."""
        shards = enumerate(self._runtime.layout.shards)
        digests = {
            k: tensor_digests(each, memory_of(self._held[k]["trainable"])) for k, each in shards
        }
        self._first = step, StepResult(loss, digests)

    def _compare_first(self, step: int, first: StepResult) -> None:
        """Take the first step of the sub-epoch again by shard, and compare it."""
        task, auditor, runtime = self._task, self._auditor, self._runtime
        difference = None
        begun = time.perf_counter()
        self._over = True
        recipe = auditor.recipes.pop(task.trial)
        with auditor.told_if_impossible(task), auditor.watch.waiting():
            try:
                uncut = step_by_shard(
                    recipe,
                    runtime.cut_model,
                    runtime.layout,
                    runtime.spec.seed,
                    runtime.spec.steps_per_epoch,
                    step,
                    next(auditor.builder.windows(task.trial, task.epoch, task.partition)),
                    task.metrics or None,
                    self._look,
                    auditor.segments,
                )
                difference = first.difference(uncut)
            except NonFiniteLoss as error:
                difference = f"the loss is {first.loss!r}, but uncut: {error}"
            self.seconds = time.perf_counter() - begun
        auditor.note(task, time.perf_counter() - begun)
        self._check(step, difference)

    def _check(self, step: int, difference: str | None) -> None:
        if difference is not None:
            raise StepDiffers(f"{located(self._task, step)}: {difference}")

    def _prepare(self, step: int, cursor: Cursor) -> None:
        """Copy the state and the batches of the next step for the uncut model."""
        runtime, window, auditor = self._runtime, self._ahead, self._auditor
        assert window is not None
        begun = time.perf_counter()
        self._over = True
        recipe = auditor.recipes.pop(self._task.trial)
        with auditor.told_if_impossible(self._task), auditor.watch.waiting():
            if not auditor.segments.has_room(runtime.layout.nbytes):
                raise MemoryError("a second copy of its state does not fit into the memory budget")
            held = [self._held[k] for k in range(runtime.num_shards)]
            self._plain = PlainStep(
                recipe,
                runtime.layout,
                [{name: self._copy(buffer) for name, buffer in each.items()} for each in held],
                cursor,
                [Batch(*copy_example((b.features, b.labels)), b.rows) for b in window],
                runtime.spec.seed,
                runtime.spec.steps_per_epoch,
                step,
            )
        self._preparation = time.perf_counter() - begun

    def _compare(self, plain: PlainStep, loss: float) -> None:
        task, auditor = self._task, self._auditor
        difference = None
        begun = time.perf_counter()
        with auditor.told_if_impossible(task):
            held = [self._held[k] for k in range(self._runtime.num_shards)]
            difference = plain.difference(loss, held)
            self.seconds = self._preparation + time.perf_counter() - begun
        self.close()
        auditor.note(task, self._preparation + time.perf_counter() - begun)
        auditor.watch.batch(self._runtime.spec.accumulate)
        self._check(plain.number, difference)

    def _copy(self, buffer: Bytes) -> Bytes:
        copied = self._auditor.segments.allocate(buffer.nbytes)
        copied[:] = buffer
        return copied

    def close(self) -> None:
        """Give the memory of the uncut model back."""
        if self._plain is not None:
            self._plain.close()
            self._plain = None


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Let the generators of torch, Python and NumPy go on as if the body had drawn nothing."""
    ours, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)


def memory_of_step(layout: TrialLayout) -> int:
    """Return the most bytes of memory that the step needs for states of shards."""
    return max(
        shard.frozen.nbytes + _size(shard) + shard.trainable.nbytes for shard in layout.shards
    )


def _size(shard: ShardLayout) -> int:
    return shard.trainable.nbytes + GradientLayout.of(shard).nbytes


def step_by_shard(
    recipe: Recipe,
    cut_model: CutModel,
    layout: TrialLayout,
    trial_seed: int,
    steps_per_epoch: int,
    step: int,
    window: Window,
    epoch_metrics: Mapping[str, float] | None,
    look: Callable[[int], HeldShard],
    segments: SegmentStore,
) -> StepResult:
    """Take the first step of a sub-epoch, and return what it gives.

    Args:
        recipe: one that the factory has just built, so that it shares nothing with the engine's.
        step: the number of the step.
        epoch_metrics: see `Engine.train`.
        look: returns a shard of the state before.
        segments: has the bytes of that state, and gives memory and scratch files.

    Raises:
        NonFiniteLoss: the loss is NaN or infinite.
    """
    run = ShardRun(
        cut_model.eager(recipe.model), layout, recipe, trial_seed, steps_per_epoch, True, step,
        [window], epoch_metrics,
    )  # fmt: skip
    graph = TaskGraph(
        cut_model.num_shards, len(window), len(window), recipe.clip_grad_norm is not None,
        cut_model.tied_groups,
    )  # fmt: skip
    result, place = StepResult(), _Place(run, layout, look, segments)
    try:
        for task in graph.tasks(0, 0):
            place.bring(task.shard)
            run.perform(task)
            if task.kind is ActionKind.U:
                result.shards[task.shard] = tensor_digests(
                    layout.shards[task.shard], memory_of(place.trainable)
                )
        place.leave()
        run.close()
    finally:
        run.cancel()
    result.loss = run.totals.loss_sum / run.totals.rows
    return result


class _Place:
    """Is the memory that has one shard at a time, while the others lie in scratch files."""

    def __init__(
        self,
        run: ShardRun,
        layout: TrialLayout,
        look: Callable[[int], HeldShard],
        segments: SegmentStore,
    ) -> None:
        self._run = run
        self._layout = layout
        self._look = look
        self._segments = segments
        self._here: tuple[int, Bytes] | None = None
        self._files: dict[int, ScratchFile] = {}
        self._cursors: dict[int, dict[str, Any] | None] = {}

    @property
    def trainable(self) -> Bytes:
        """Return the trainable segment of the shard that is here."""
        assert self._here is not None
        shard, memory = self._here
        return memory[: self._layout.shards[shard].trainable.nbytes]

    def bring(self, shard: int) -> None:
        """Let a shard be here, and no other one."""
        if self._here is not None and self._here[0] == shard:
            return
        self.leave()
        held = self._look(shard)
        memory = self._segments.allocate(_size(self._layout.shards[shard]))
        self._here = shard, memory
        gradients = memory[self.trainable.nbytes :]
        if (file := self._files.pop(shard, None)) is not None:
            file.read_into(memory)
        else:
            self.trainable[:] = self._segments.read(held.names["trainable"])
            gradients[:] = 0
            self._cursors[shard] = dict(held.cursor) or None
        frozen = self._segments.read(held.names["frozen"])
        self._run.load(
            shard,
            on_host({"frozen": frozen, "trainable": self.trainable}),
            self._cursors[shard],
            memory_of(gradients),
        )

    def leave(self) -> None:
        """Let the shard that is here go, with what has changed of it."""
        if self._here is not None:
            shard, memory = self._here
            self._here = None
            self._run.unload(shard)
            self._cursors[shard] = self._run.cursor(shard)
            self._files[shard] = self._segments.to_file(memory)


class QueueAudits:
    """Keeps the audits of a worker within a share of its training time; one thread uses it.

    Args:
        share: how much of the training time audits may take; 0 makes none.
    """

    def __init__(self, share: float) -> None:
        self.budget = AuditBudget(share)
        self._seconds: dict[int, float] = {}  # of each trial's latest audit
        self._impossible: set[int] = set()  # the trials that can't be audited here
        self._spares: set[tuple[WorkerDevice, int]] = set()  # trials built a second time, and where

    def watches(self, task: Task, profile: TrialProfile) -> bool:
        """Return whether the first step of a run may be audited."""
        if not isinstance(task, StartSubEpoch) or task.trial in self._impossible:
            return False
        seconds = profile.build_seconds + self._seconds.get(task.trial, 0.0)
        return bool(self.budget.share) and self.budget.allows(seconds, task.epoch == 0)

    def opens(self, run: QueuedRun, device: WorkerDevice) -> None:
        """Note that a device opens a run, for which it may have to build its model again."""
        spare = device, run.task.trial
        if run.watched or run.audits is not None:
            if spare not in self._spares:
                self.budget.spent += run.profile.build_seconds
            self._spares.add(spare)
        if run.audits is not None:
            self._spares.remove(spare)

    def note(self, run: QueuedRun, done: Done) -> None:
        """Note that a device has computed for a run."""
        if run.audits is not None:
            self.budget.spent += done.seconds
        elif run.spec.graph.training:
            self.budget.trained += done.seconds

    def is_due(self, run: QueuedRun) -> bool:
        """Return whether the first step of a run is to be audited now."""
        if not run.watched or run.audit is not None or not run.first_step_is_over:
            return False
        seconds = self._seconds.get(run.task.trial, STEPS_OF_AN_AUDIT * run.first_seconds)
        return self.budget.allows(seconds, run.task.epoch == 0)

    def ended(self, audit: QueuedRun) -> str | None:
        """Return what differs between a run's first step and its audit, None if no bit does."""
        run = audit.audits
        assert run is not None
        self._seconds[run.task.trial] = audit.first_seconds
        found = run.first_step.difference(audit.first_step)
        if found is None:
            run.audit_seconds = audit.first_seconds
        return _told(run, found)

    def failed(self, audit: QueuedRun, kind: str, why: str) -> str | None:
        """Return what differs if an audit met no finite loss; else audit its trial no more.

        Args:
            kind: the name of the exception's class, if there was one.
            why: a traceback, or a sentence.
        """
        run, why = audit.audits, why.strip().splitlines()[-1]
        assert run is not None
        if kind == NonFiniteLoss.__name__:
            return _told(run, f"the loss is {run.first_step.loss!r}, but uncut: {why}")
        trial, worker = run.task.trial, run.task.worker
        self._impossible.add(trial)
        _log.warning("trial %d is no longer audited on worker %d: %s", trial, worker, why)
        return None

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        self._seconds.pop(trial, None)
        self._impossible.discard(trial)
        self._spares = {each for each in self._spares if each[1] != trial}


def _told(run: QueuedRun, difference: str | None) -> str | None:
    assert isinstance(run.task, StartSubEpoch)
    return difference and f"{located(run.task, run.start_step or 0)}: {difference}"
