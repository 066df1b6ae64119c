"""A run in the queues of a worker, as its shell knows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cerebro_hydra.agent.device_messages import Close, Compute, Done, RunOrder
from cerebro_hydra.agent.run_boundary import RunBoundary
from cerebro_hydra.agent.run_time import RunTime
from cerebro_hydra.agent.shard_home import ShardHome
from cerebro_hydra.agent.shard_store import HeldShard, Shard, ShardStore, State
from cerebro_hydra.agent.task_watch import Task
from cerebro_hydra.agent.worker_devices import WorkerDevice
from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.plan.events import EvaluationDone, Hop, SubEpochDone
from cerebro_hydra.plan.instructions import StartSubEpoch
from cerebro_hydra.plan.run_progress import RunSpec
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.step_result import StepResult
from cerebro_hydra.shards.trial_profile import TrialProfile
from cerebro_hydra.storage.run_document import TrialSpec


@dataclass(eq=False)
class QueuedRun:
    """Holds what a run has, and what it gave so far.

    Attributes:
        state: what the run publishes; None for an evaluation.
        start_step: the optimizer steps that the trial has done before the run.
        look: finds a shard of the state before, or says that it will never come.
        time: of its own computing.
        limited: whether its devices have a budget.
        boundary: what a microbatch leaves between two units, if it goes from device to device.
        opened: the devices that have opened the run.
        over: whether it has been reported how the run ended.
        closing: the devices that have yet to say that its results can be used.
        begun: when its first shard was there.
        losses: the mean loss of each microbatch and its rows.
        closed: whether every device has said so, and its audit is not over.
        watched: whether its first step may be audited.
        audits: the run whose first step this one takes again with the uncut model, if it does.
        audit: the run that does so with this one.
        first_step: what the first step gave.
        first_seconds: what devices computed for it.
        audit_seconds: what an audit took that found no difference; 0 if there was none.
    """

    trial: TrialSpec
    task: Task
    profile: TrialProfile
    spec: RunSpec
    look: Callable[[int], HeldShard | None]
    time: RunTime
    limited: bool = False
    state: State | None = None
    start_step: int | None = None
    homes: dict[int, ShardHome] = field(default_factory=dict)
    boundary: RunBoundary | None = None
    opened: set[WorkerDevice] = field(default_factory=set)
    over: bool = False
    closing: set[WorkerDevice] = field(default_factory=set)
    begun: float | None = None
    losses: dict[int, tuple[float, int]] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    digests: dict[int, tuple[str, str]] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    closed: bool = False
    watched: bool = False
    audits: QueuedRun | None = None
    audit: QueuedRun | None = None
    first_step: StepResult = field(default_factory=StepResult)
    first_seconds: float = 0.0
    audit_seconds: float = 0.0

    @property
    def number(self) -> int:
        """Return what tells the runs of a worker apart."""
        return self.spec.run

    def announce(self, store: ShardStore) -> None:
        """Announce the state that a sub-epoch will publish."""
        if isinstance(self.task, StartSubEpoch) and self.audits is None:
            shards = self.spec.graph.shards
            self.state = store.expect(self.task.trial, self.task.visit, shards)

    def retract(self, store: ShardStore) -> None:
        """Take back what was published."""
        if self.state is not None:
            store.retract(self.state)

    def begin_anew(self) -> None:
        """Forget what the run gave."""
        self.homes.clear()
        self.boundary = None
        self.opened.clear()
        self.losses.clear()
        self.digests.clear()
        self.nbytes.clear()
        self.audit = None
        self.first_step = StepResult()
        self.first_seconds = self.audit_seconds = 0.0

    def order(self, cursor: Mapping[str, Any] | None) -> RunOrder:
        """Return what a device must know to open the run, one of whose shards has this cursor."""
        if self.start_step is None:  # the first device opens a run before any update
            self.start_step = int((cursor or {}).get("step", 0))
        return RunOrder(
            self.number,
            self.trial,
            self.task,
            self.start_step,
            self.spec.recompute,
            self.watched,
            self.audits is not None,
            self.spec.task_bytes if self.limited else None,
            not self.spec.stays,
        )

    def unit(self, tasks: Sequence[Action]) -> Compute:
        """Return the order to do a unit."""
        return Compute(tuple(tasks)) if self.boundary is None else self.boundary.order(tasks)

    def cancel(self) -> None:
        """Let every device end the run where it stands."""
        for device in self.opened:
            device.give(Close(self.number, cancelled=True))

    def saved_sizes(self, shard: int) -> dict[str, int]:
        """Return the bytes of slabs that a shard's changes are written back to, by name."""
        sizes = {
            "trainable": self.profile.shards[shard].trainable,
            "gradients": self.gradients(shard),
        }
        return {name: nbytes for name, nbytes in sizes.items() if nbytes}

    def gradients(self, shard: int) -> int:
        """Return the bytes of a shard's gradients if they outlive a unit, else 0."""
        return self.profile.kept_gradients(shard, self.spec.graph)

    def published(self, number: int, shard: Shard) -> None:
        """Note what was published of a shard."""
        self.digests[number] = shard.digests
        self.nbytes[number] = sum(buffer.nbytes for _, buffer in shard.segments.values())

    def begins_last_step(self, action: Action) -> bool:
        """Return whether a task is the first of the last optimizer step."""
        graph = self.spec.graph
        last = graph.window_of(graph.microbatches - 1).start
        first = action.kind is ActionKind.F and action.shard == 0 and action.microbatch == last
        return first and graph.training and self.audits is None

    def note(self, done: Done) -> None:
        """Keep what a task gave."""
        self.losses |= done.losses
        if done.record is not None and self.boundary is not None:
            self.boundary.note(done.record)
        first = self.spec.graph.window_of(0)
        if done.action.kind.computes and done.action.microbatch in first:
            self.first_seconds += done.seconds
            if done.digests is not None:
                self.first_step.shards[done.action.shard] = done.digests
            if all(microbatch in self.losses for microbatch in first):
                self.first_step.loss = self.window_loss(0)

    @property
    def first_step_is_over(self) -> bool:
        """Return whether everything is known of the first step."""
        return len(self.first_step.shards) == self.spec.graph.shards

    def ends_batch(self, task: Action) -> bool:
        """Return whether a batch has been through all shards with a task."""
        if self.spec.graph.training:
            return task.kind is ActionKind.B and task.shard == 0
        return task.shard == self.spec.graph.shards - 1

    def seconds(self) -> float:
        """Return the seconds since the run's first shard was there."""
        return 0.0 if self.begun is None else time.perf_counter() - self.begun

    def progress(self, microbatch: int) -> dict[str, Any]:
        """Return what a view shows after a microbatch's forward."""
        graph = self.spec.graph
        return {
            "trial": self.task.trial,
            "epoch": self.task.epoch,
            "partition": self.task.partition,
            "step": microbatch // graph.window + 1,
            "steps": graph.windows,
            "loss": self.window_loss(microbatch),
        }

    def result(self, incarnation: str, hop: Hop) -> SubEpochDone | EvaluationDone:
        """Return what the whole run gave."""
        training = self.spec.graph.training
        return self._trained(incarnation, hop) if training else self._evaluated(incarnation, hop)

    def window_loss(self, microbatch: int) -> float:
        """Return the mean loss over the rows of a microbatch's window, as far as it was trained."""
        window = self.spec.graph.window_of(microbatch)
        parts = [self.losses[m] for m in window if m in self.losses]
        return sum(loss * rows for loss, rows in parts) / sum(rows for _, rows in parts)

    def _trained(self, incarnation: str, hop: Hop) -> SubEpochDone:
        """Return what a sub-epoch gave; losses are summed in the order of its batches."""
        loss_sum = 0.0
        for microbatch in sorted(self.losses):
            loss, rows = self.losses[microbatch]
            loss_sum += loss * rows
        return SubEpochDone(
            attempt=self.task.attempt,
            incarnation=incarnation,
            rows=sum(rows for _, rows in self.losses.values()),
            loss_sum=loss_sum,
            digests=tuple(self.digests[shard] for shard in sorted(self.digests)),
            nbytes=sum(self.nbytes.values()),
            seconds=self.seconds(),
            hop=hop,
            device_seconds=self.time.seconds,
            audit_seconds=self.audit_seconds,
        )

    def _evaluated(self, incarnation: str, hop: Hop) -> EvaluationDone:
        """Return what an evaluation gave."""
        assert self.evaluation is not None
        found = self.evaluation
        return EvaluationDone(
            attempt=self.task.attempt,
            incarnation=incarnation,
            sums=found.sums,
            seconds=self.seconds(),
            hop=hop,
            states=found.states,
            device_seconds=self.time.seconds,
        )
