"""Ends the runs in the queues of a worker: with a result, an error, or taken back."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable

from cerebro_hydra.agent.attempt_reports import AttemptReports
from cerebro_hydra.agent.fetch_manager import FetchManager
from cerebro_hydra.agent.out_of_memory import memory_that_ran_out
from cerebro_hydra.agent.queue_audits import QueueAudits
from cerebro_hydra.agent.queued_run import QueuedRun
from cerebro_hydra.agent.run_planner import RunPlanner
from cerebro_hydra.agent.shard_store import ShardStore
from cerebro_hydra.agent.task_entrance import TaskEntrance
from cerebro_hydra.agent.task_watch import described
from cerebro_hydra.agent.worker_devices import DEADLY, MOST_DEATHS, WorkerDevice
from cerebro_hydra.agent.worker_loop import WorkerLoop
from cerebro_hydra.errors import ScratchFull, StepDiffers
from cerebro_hydra.plan.worker_events import RunCancelled, RunReleased
from cerebro_hydra.storage.names import trial_name

_log = logging.getLogger(__name__)

_REMEDY = "raise device_memory or host_memory, or cut the trial into more shards"


class RunEnds:
    """Reports how runs end; one thread uses it.

    A run whose devices have closed it waits for its audit. An audit is a run, too, of which nothing
    is reported.

    Args:
        incarnation: names this agent.
        report_devices: tells the coordinator what the devices have done so far.
        after: is called when a run was ended early.
    """

    def __init__(
        self,
        incarnation: str,
        loop: WorkerLoop,
        planner: RunPlanner,
        audits: QueueAudits,
        entrance: TaskEntrance,
        reports: AttemptReports,
        shard_store: ShardStore,
        fetch_manager: FetchManager,
        report_devices: Callable[[], object],
        after: Callable[[], object],
    ) -> None:
        self._incarnation = incarnation
        self._loop = loop
        self._planner = planner
        self._audits = audits
        self._entrance = entrance
        self._reports = reports
        self._shard_store = shard_store
        self._fetch_manager = fetch_manager
        self._report_devices = report_devices
        self._after = after
        self._deaths: Counter[int] = Counter()  # of devices, by the attempt whose code they ran

    def early(self, run: QueuedRun) -> None:
        """End a run where it stands, with its audit, and take back what it published."""
        was_over, run.over = run.over, True
        run.retract(self._shard_store)
        self._loop.tell(RunCancelled(run.number), RunReleased(run.number))
        run.cancel()
        self._after()
        self.end_audit(run)
        self._planner.end_audit(run.number)
        if not was_over and run.audits is None:
            self._entrance.leave(run.task.trial)

    def end_audit(self, run: QueuedRun) -> None:
        """End the audit of a run, if there is one."""
        if run.audit is not None and not run.audit.over:
            self.early(run.audit)

    def fail(self, run: QueuedRun, kind: str, why: str, lacking: str | None = None) -> None:
        """End a run with an error; see `AttemptReports.failed`.

        A run that lacks memory is done once more if it may need less then, and one that lacks disk
        is done once more alone.
        """
        if run.over:
            return
        was_alone = self._entrance.is_alone(run.task.trial)
        self.early(run)
        if run.audits is not None:
            self._go_on(run.audits, self._audits.failed(run, kind, why))
        elif lacking is not None and self._planner.can_spare(run.spec, run.trial, run.profile):
            self._entrance.enter(run.task)  # once more, from the state before it
        elif kind == ScratchFull.__name__ and not was_alone:
            name = trial_name(run.task.trial)
            _log.warning("%s begins again when nothing else trains here: %s", name, why)
            self._entrance.enter_alone(run.task)
        else:
            finer = lacking is not None and self._planner.helps_finer(run.task, run.spec)
            self._reports.failed(run.task, kind, why, lacking, finer)

    def refused(self, run: QueuedRun, reason: str) -> None:
        """End a run that the worker has no room for."""
        self.fail(run, "", f"{reason}; {_REMEDY}")

    def raised(self, run: QueuedRun, error: Exception) -> None:
        """End a run because of an error of this process."""
        if isinstance(error, ScratchFull):
            why = f"{described(run.task)}: {error}"
        else:
            why = "".join(traceback.format_exception(error))
        self.fail(run, type(error).__name__, why, memory_that_ran_out(error))

    def closed(self, run: QueuedRun, device: WorkerDevice) -> None:
        """End a run once every device has closed it, and its audit is over."""
        run.closing.discard(device)
        if run.closing or run.over:
            return
        if run.audits is not None:
            self.early(run)
            self._go_on(run.audits, self._audits.ended(run))
        elif run.audit is None or run.audit.over:
            self._finish(run)
        else:
            run.closed = True

    def died(self, run: QueuedRun) -> None:
        """Fail a run whose code has ended too many devices."""
        self._deaths[run.task.attempt] += 1
        if self._deaths[run.task.attempt] >= MOST_DEATHS:
            self.fail(run, "", DEADLY)

    def unclosed(self, run: QueuedRun, device: WorkerDevice) -> None:
        """End a run that a device did not live to close; an evaluation is done once more."""
        if run.over or run.spec.graph.training:
            self.closed(run, device)
        else:
            self.early(run)
            self._entrance.enter(run.task)

    def _go_on(self, run: QueuedRun, difference: str | None) -> None:
        """Go on with a run whose audit is over."""
        if difference is not None:
            self.fail(run, StepDiffers.__name__, difference)
        elif run.closed:
            self._finish(run)

    def _finish(self, run: QueuedRun) -> None:
        result = run.result(self._incarnation, self._fetch_manager.take_hop(run.task.trial))
        if (fault := self._planner.fault(run.task, result)) is not None:
            self.fail(run, "", fault)
            return
        run.over = True
        self._report_devices()
        self._reports.done(result)
        self._entrance.leave(run.task.trial)
