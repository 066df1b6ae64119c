"""Audits training: now and then one step is also taken by the uncut model, and compared."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from cerebro_hydra.agent.segment_store import SegmentStore
from cerebro_hydra.agent.shard_store import HeldShard
from cerebro_hydra.agent.step_by_shard import memory_of_step, step_by_shard
from cerebro_hydra.agent.task_watch import TaskWatch, located
from cerebro_hydra.agent.trial_builder import TrialBuilder, TrialRuntime
from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import NonFiniteLoss, StepDiffers
from cerebro_hydra.plan.audit_budget import AuditBudget
from cerebro_hydra.plan.instructions import StartSubEpoch
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.engine import Cursor
from cerebro_hydra.shards.layout import Bytes, HostSegments, memory_of
from cerebro_hydra.shards.sample import copy_example
from cerebro_hydra.shards.step_result import StepResult, tensor_digests
from cerebro_hydra.shards.uncut import PlainStep

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
