"""Decides which sub-epochs in the queues of a worker are audited, and compares first steps.

An audit is a run of its own, of one step from the same state, by a model that the factory builds
anew: the plain trainer trains it where a device has room for the whole, else its own forward runs
shard by shard; see `agent/step_by_shard.py` for what that guards. The queues bring its shards like
those of any other run, so that it keeps to every budget.
"""

from __future__ import annotations

import logging

from cerebro_hydra.agent.auditor import STEPS_OF_AN_AUDIT
from cerebro_hydra.agent.device_messages import Done
from cerebro_hydra.agent.queued_run import QueuedRun
from cerebro_hydra.agent.task_watch import Task, located
from cerebro_hydra.agent.worker_devices import WorkerDevice
from cerebro_hydra.errors import NonFiniteLoss
from cerebro_hydra.plan.audit_budget import AuditBudget
from cerebro_hydra.plan.instructions import StartSubEpoch
from cerebro_hydra.shards.trial_profile import TrialProfile

_log = logging.getLogger(__name__)


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
