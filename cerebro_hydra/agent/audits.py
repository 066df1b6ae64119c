"""Audits training: now and then one step is also taken by the uncut model, and compared.

For a cut by graph that compares the graphs with the user's modules. A cut by modules runs the same
code, so there it compares what lies around it: whether recomputing equals keeping, state that left
memory and came back, what shards share or alias, the order of updates and of the barrier before
clipping, and a model that was built anew with one that has trained.

An audit is a visit of its own, of one step, by a model that the factory builds anew: the plain
trainer trains it where a device has room for the whole, else its own forward runs shard by shard.
The queues bring its shards like those of any other visit, so that it keeps to every budget. Any
step is as likely to be drawn: each shard is copied before its first task of it, but for what
updates alone need, which is copied before its update. Where memory has no room for the copies it is
the first step, from the state before, which stays until the sub-epoch is committed. What the step
changed that hops with no shard, such as attributes, is compared, too.
The limits of a task hold for its audit, too: code that hangs there can't be told from slow code.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cerebro_hydra.agent.device.messages import Done, FailureKind
from cerebro_hydra.agent.device.task_watch import located
from cerebro_hydra.agent.device.worker_devices import WorkerDevice
from cerebro_hydra.agent.memory.segment_store import SegmentStore
from cerebro_hydra.agent.visit import Visit
from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.messages.instructions import StartSubEpoch
from cerebro_hydra.plan.policy.audit_budget import AuditBudget, drawn_window
from cerebro_hydra.shards.admission.effects.late_effects import history_told
from cerebro_hydra.shards.engine.layout import Bytes

STEPS_OF_AN_AUDIT = 4
"""Steps of training that a trial's first audit is thought to last, beside the factory."""

AUDIT_PATIENCE = 10
"""Times the limits of a task: an audit may take that long, because it trains uncut, and maybe in
mapped files, at the disk's speed."""

OVERDUE_AUDIT = "its audit takes too long (audit_share=0 makes none): "

WRITTEN_LATE = (
    "the bytes of shards {} changed after they were published, which is right after their last "
    "update: code that runs later, such as a backward hook of an earlier module, writes to their "
    "buffers or parameters"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AuditRoom:
    """Holds the memory that was found for the shards of a visit as they are before a step.

    Args:
        copies: for each shard, unless the step is the first one; None if there is no room.
        seconds: what it took to find it.
    """

    copies: dict[int, Bytes] | None
    seconds: float

    @classmethod
    def find(cls, segments: SegmentStore, visit: Visit) -> AuditRoom:
        """Find room for the shards of a visit that waits; it may take as long as disks do."""
        begun, copies = time.perf_counter(), None
        sizes = [shard.trainable for shard in visit.profile.shards]
        try:
            if segments.has_room(sum(sizes)):
                copied = enumerate(sizes) if visit.drawn else ()
                copies = {k: segments.allocate(n) for k, n in copied}
        except (MemoryError, OSError) as error:
            what = "trial %d is audited by the first step of a sub-epoch on worker %d, for want of "
            _log.warning(f"{what}room for a copy: %s", visit.task.trial, visit.task.worker, error)
        return cls(copies, time.perf_counter() - begun)


class Audits:
    """Keeps the audits of a worker within a share of its training time; one thread uses it.

    Args:
        share: how much of the training time audits may take; 0 makes none.
    """

    def __init__(self, share: float) -> None:
        self.budget = AuditBudget(share)
        self._seconds: dict[int, float] = {}  # of each trial's latest audit
        self._impossible: set[int] = set()  # the trials that can't be audited here
        self._spares: set[tuple[WorkerDevice, int]] = set()  # trials built a second time, and where

    def watch(self, visit: Visit) -> None:
        """Draw the step of a visit that may be audited, if one may."""
        task = visit.task
        if not isinstance(task, StartSubEpoch) or task.trial in self._impossible:
            return
        if visit.spec.graph.staleness:
            return  # the uncut model reads no older weights
        if task.replicas:
            return  # nor has it the gradients of others
        seconds = visit.profile.build_seconds + self._seconds.get(task.trial, 0.0)
        visit.watched = bool(self.budget.share) and self.budget.allows(seconds, task.epoch == 0)
        windows = visit.spec.graph.windows
        visit.drawn = drawn_window(task.trial, task.epoch, task.partitions[0], windows)

    def opens(self, visit: Visit, device: WorkerDevice) -> None:
        """Note that a device opens a visit, for which it may have to build its model again."""
        spare = device, visit.task.trial
        if visit.watched or visit.audits is not None:
            if spare not in self._spares:
                self.budget.spent += visit.profile.build_seconds
            self._spares.add(spare)
        if visit.audits is not None:
            self._spares.remove(spare)

    def note(self, visit: Visit, done: Done) -> None:
        """Note that a device has computed for a visit."""
        if visit.audits is not None:
            self.budget.spent += done.seconds
        elif visit.spec.graph.training:
            self.budget.trained += done.seconds

    def is_due(self, visit: Visit, unit: Sequence[Action]) -> bool:
        """Return whether the step that was drawn begins with a unit, and is to be audited."""
        chosen = visit.choosing or visit.audited is not None
        if visit.over or not visit.watched or chosen or not visit.begins_drawn_step(unit):
            return False
        return self._affords(visit)

    def begins(self, visit: Visit) -> int | None:
        """Return the window whose audit begins now, None if none does.

        If time has become short meanwhile, the visit has no audit.
        """
        if not visit.can_be_audited:
            return None
        if not self._affords(visit):
            visit.audit_ended = True
            visit.given.clear()
            return None
        return visit.audited

    def _affords(self, visit: Visit) -> bool:
        """Return whether there is time for an audit, as far as it is known what that takes."""
        seconds = self._seconds.get(visit.task.trial, STEPS_OF_AN_AUDIT * visit.first_seconds)
        return self.budget.allows(seconds, visit.task.epoch == 0)

    def choose(self, visit: Visit, room: AuditRoom) -> None:
        """Choose the step of a visit that is audited: the one drawn, if memory has room for copies.

        Else it is the first step, from the state before the visit. Where devices compute in the
        agent's memory, which has no room for that step either, it is taken in mapped files.
        """
        visit.copies, visit.audit_is_mapped = (
            room.copies or {},
            visit.resident and room.copies is None,
        )
        visit.audited = visit.drawn if visit.copies else 0
        self.budget.spent += room.seconds

    def ended(self, audit: Visit) -> str | None:
        """Return what differs between a visit's step and its audit, None if no bit does."""
        visit = audit.audits
        assert visit is not None and visit.audited is not None
        self._seconds[visit.task.trial] = audit.first_seconds
        found = visit.steps[visit.audited].difference(audit.steps[0])
        if found is None:
            visit.audit_seconds = audit.first_seconds
        return _told(visit, found)

    def side_effect(self, audit: Visit) -> str | None:
        """Return what a visit's step leaves otherwise, though no bit differs, and hops with no
        shard.

        Such a trial is not exact in one piece, either.
        """
        visit = audit.audits
        assert visit is not None and visit.audited is not None
        step = visit.steps[visit.audited]
        found = None if step.difference(audit.steps[0]) else step.side_effect(audit.steps[0])
        return _told(visit, found and history_told(found))

    def failed(self, audit: Visit, kind: FailureKind, why: str) -> str | None:
        """Return what differs if an audit met no finite loss; else audit its trial no more.

        Args:
            kind: what it failed of.
            why: a traceback, or a sentence.
        """
        visit, why = audit.audits, why.strip().splitlines()[-1]
        assert visit is not None and visit.audited is not None
        if kind is FailureKind.NON_FINITE_LOSS:
            return _told(
                visit, f"the loss is {visit.steps[visit.audited].loss!r}, but uncut: {why}"
            )
        self.give_up(visit, why)
        return None

    def give_up(self, visit: Visit, why: str) -> None:
        """Audit the trial of a visit no more."""
        trial, worker = visit.task.trial, visit.task.worker
        self._impossible.add(trial)
        visit.watched = False
        _log.warning("trial %d is no longer audited on worker %d: %s", trial, worker, why)

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        self._seconds.pop(trial, None)
        self._impossible.discard(trial)
        self._spares = {each for each in self._spares if each[1] != trial}


def _told(visit: Visit, difference: str | None) -> str | None:
    assert isinstance(visit.task, StartSubEpoch) and visit.audited is not None
    step = (visit.start_step or 0) + visit.audited
    return difference and f"{located(visit.task, step)}: {difference}"
