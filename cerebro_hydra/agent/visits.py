"""Lets tasks into the queues of a worker, describes them there, and ends and reports them.

A task enters once its trial is profiled and has no other run; one for which the disk had no room
beside others enters alone. Each attempt ends once, unless the coordinator took it back.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from cerebro_hydra.agent.audits import QueueAudits
from cerebro_hydra.agent.device.messages import Failed, Forget, Profile, Profiled
from cerebro_hydra.agent.device.process import DEADLY, MOST_DEATHS, WorkerDevice, WorkerDevices
from cerebro_hydra.agent.device.task_watch import Task, described
from cerebro_hydra.agent.memory.fetch import FetchManager
from cerebro_hydra.agent.memory.out_of_memory import memory_that_ran_out
from cerebro_hydra.agent.memory.shard_store import ShardStore
from cerebro_hydra.agent.queued_run import QueuedRun
from cerebro_hydra.agent.trainer import OUT_OF_MEMORY
from cerebro_hydra.agent.worker_loop import WorkerLoop
from cerebro_hydra.data.batches import batch_sizes
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.errors import ScratchFull, StepDiffers, TransferError
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.events import EvaluationDone, SubEpochDone
from cerebro_hydra.plan.messages.instructions import StartSubEpoch
from cerebro_hydra.plan.queues.events import RunCancelled, RunReleased
from cerebro_hydra.plan.queues.run_progress import RunSpec
from cerebro_hydra.plan.schedules.pick import DEFAULT_PICK, PICKS, Candidate
from cerebro_hydra.shards.admission.profile import TrialProfile
from cerebro_hydra.storage.names import trial_name
from cerebro_hydra.storage.run_document import TrialSpec


class TaskEntrance:
    """Keeps the profiles of trials, and the tasks that wait; one thread uses it.

    The first device profiles a trial. A trial has one run at a time, because a run has its model
    to itself.

    Args:
        enter: takes a task into the queues, until `leave`.
    """

    def __init__(
        self,
        planner: RunPlanner,
        devices: WorkerDevices,
        reports: AttemptReports,
        enter: Callable[[Task, TrialProfile], object],
    ) -> None:
        self._planner = planner
        self._devices = devices
        self._reports = reports
        self._enter = enter
        self._profiles: dict[int, TrialProfile] = {}
        self._profiling: set[int] = set()
        self._deaths: Counter[int] = Counter()  # of devices that profiled a trial
        self._inside: set[int] = set()  # trials that have a run
        self._waiting: dict[int, deque[Task]] = defaultdict(deque)
        self._to_be_alone: deque[Task] = deque()
        self._alone: int | None = None  # the trial that has entered alone, until it leaves

    def enter(self, task: Task) -> None:
        """Let a task in as soon as it may enter."""
        self._waiting[task.trial].append(task)
        if task.trial in self._profiles:
            self._go_on()
        elif task.trial not in self._profiling:
            self._profiling.add(task.trial)
            self._ask(task.trial)

    def leave(self, trial: int) -> None:
        """Note that the run of a trial is over."""
        self._inside.discard(trial)
        if trial == self._alone:
            self._alone = None
        self._go_on()

    def enter_alone(self, task: Task) -> None:
        """Let a task of a profiled trial in when no run is left, and no other one beside it."""
        self._to_be_alone.append(task)
        self._go_on()

    def is_alone(self, trial: int) -> bool:
        """Return whether a trial has entered alone."""
        return trial == self._alone

    def hear(self, answer: Profiled | Failed, asked: TrialSpec) -> None:
        """Take what the first device found out about a trial, unless it was cut finer meanwhile."""
        if not self._planner.knows(asked.trial) or self._planner.trial(asked.trial) != asked:
            return
        self._profiling.discard(answer.trial)
        if isinstance(answer, Failed):
            for task in self._waiting.pop(answer.trial, ()):
                self._reports.failed(task, answer.kind, answer.error, answer.lacking)
        else:
            self._profiles[answer.trial] = answer.profile
            self._go_on()

    def ask_again(self, died_of: TrialSpec | None) -> None:
        """Ask the first device again, which was replaced.

        Args:
            died_of: the trial that it was building; one that too many devices died of fails.
        """
        if died_of is not None:
            self._deaths[died_of.trial] += 1
            if self._deaths[died_of.trial] == MOST_DEATHS:
                self.hear(Failed(None, died_of.trial, "", DEADLY), died_of)
        for trial in self._profiling:
            self._ask(trial)

    def forget(self, trial: int) -> None:
        """Forget a trial that is over, or was cut finer, with what devices have built of it."""
        self._profiling.discard(trial)
        self._deaths.pop(trial, None)
        self._profiles.pop(trial, None)
        self._waiting.pop(trial, None)
        self._to_be_alone = deque(task for task in self._to_be_alone if task.trial != trial)
        self._devices.tell(Forget(trial))

    def _go_on(self) -> None:
        """Let in who may enter now."""
        while self._to_be_alone and not self._inside:
            task = self._to_be_alone.popleft()
            self._let_in(task)
            self._alone = task.trial if self._inside else None
        if self._to_be_alone or self._alone is not None:
            return
        for trial, waiting in tuple(self._waiting.items()):
            while waiting and trial in self._profiles and trial not in self._inside:
                self._let_in(waiting.popleft())

    def _let_in(self, task: Task) -> None:
        """Let a task in, unless it was taken back."""
        if task.attempt in self._reports:
            self._inside.add(task.trial)
            self._enter(task, self._profiles[task.trial])

    def _ask(self, trial: int) -> None:
        attempt = self._waiting[trial][0].attempt
        self._devices.ask(self._devices[0], Profile(self._planner.trial(trial), attempt))


Split = Literal["train", "val"]

_log = logging.getLogger(__name__)


class RunPlanner:
    """Knows the trials that the agent was told of, and the rows of a run.

    Args:
        rows: returns how many rows a partition of a split has.
        budget: the bytes of the smallest device; None if that has no limit.
        devices: how many there are.
        pick: how a free device chooses among trials, a name of `PICKS`.
    """

    def __init__(
        self,
        rows: Callable[[Split, int], int],
        budget: int | None,
        devices: int = 1,
        pick: str = DEFAULT_PICK,
    ) -> None:
        self._trials: dict[int, TrialSpec] = {}
        self._rows = rows
        self._budget = budget
        self._devices = devices
        self._sparing: set[int] = set()  # trials that have run out of memory
        self._pick = PICKS[pick]
        self._audits: set[int] = set()  # the runs that audit another one

    @classmethod
    def of(cls, manifest: Manifest, resources: WorkerResources) -> RunPlanner:
        """Return the planner of a run."""
        rows = {(info.split, info.index): info.rows for info in manifest.partitions}
        return cls(
            lambda split, partition: rows[split, partition],
            resources.device_memory,
            resources.devices,
            resources.pick,
        )

    def learn(self, spec: TrialSpec) -> bool:
        """Take in what a trial is, before anything else is asked of it; called from any thread.

        Return whether it was another one before, because it was cut finer.
        """
        before = self._trials.get(spec.trial, spec)
        self._trials[spec.trial] = spec
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

    def rule(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Pick as the backend says, but audits first, because the runs that they audit wait."""
        audits = [each for each in candidates if each.run in self._audits]
        return self._pick(audits or candidates)

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


class AttemptReports:
    """Knows which attempts are open; one thread uses it.

    Args:
        incarnation: names this agent.
        fetch_manager: knows why a state could not be fetched.
        report: takes an event for the coordinator.
    """

    def __init__(
        self,
        incarnation: str,
        fetch_manager: FetchManager,
        report: Callable[[events.Event], object],
    ) -> None:
        self._incarnation = incarnation
        self._fetch_manager = fetch_manager
        self._report = report
        self._open: set[int] = set()

    def __contains__(self, attempt: int) -> bool:
        """Return whether an attempt was accepted, and neither ended nor was taken back."""
        return attempt in self._open

    def accept(self, attempt: int) -> None:
        """Note that an attempt will be performed."""
        self._open.add(attempt)

    def take_back(self, attempt: int) -> None:
        """Report nothing of an attempt any more."""
        self._open.discard(attempt)

    def done(self, result: events.SubEpochDone | events.EvaluationDone) -> None:
        """Report what an attempt gave."""
        if result.attempt in self._open:
            self._open.remove(result.attempt)
            self._report(result)

    def failed(
        self, task: Task, kind: str, why: str, lacking: str | None = None, finer: bool = False
    ) -> None:
        """Report why an attempt failed.

        Args:
            kind: the name of the exception's class, if there was one.
            lacking: what memory ran out.
            finer: whether a finer cut would need less of it.
        """
        if task.attempt not in self._open:
            return
        self._open.remove(task.attempt)
        make: Callable[[int, str, str], events.Event] = events.TaskFailed
        name = task.trial, task.source.visit
        if kind == TransferError.__name__:
            lacking = lacking or self._fetch_manager.lacking(*name)
            why = self._fetch_manager.error(*name) or why
            make = events.TransferFailed
        elif kind == StepDiffers.__name__:
            make = events.AuditFailed
        if lacking is not None:
            why = OUT_OF_MEMORY.format(task.trial, described(task), lacking) + why
            make = partial(events.TaskFailed, memory=finer)
        self._report(make(task.attempt, self._incarnation, why))
