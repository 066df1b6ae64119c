"""Says which tasks enter the queues of a worker, describes them there, and reports their ends.

A task enters once its trial is profiled and has no other visit; one for which the disk had no room
beside others enters alone. Each attempt ends once, unless the coordinator took it back.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from cerebro_hydra.agent.device.endings import MOST_DEATHS, deadly
from cerebro_hydra.agent.device.messages import FailureKind
from cerebro_hydra.agent.device.task_watch import Task, described
from cerebro_hydra.agent.device.worker_devices import WorkerDevice
from cerebro_hydra.agent.memory.fetch import FetchManager
from cerebro_hydra.agent.visit import Visit
from cerebro_hydra.data.batches import batch_sizes
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.events import EvaluationDone, SubEpochDone
from cerebro_hydra.plan.messages.instructions import StartSubEpoch
from cerebro_hydra.plan.queues.ledger import StateName
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.sizing.pipeline import ALONE
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.storage.names import trial_name
from cerebro_hydra.storage.run_document import TrialSpec

_log = logging.getLogger(__name__)


class TaskEntrance:
    """Decides which tasks may enter the queues of a worker; one thread uses it.

    A trial has one visit at a time, because a visit has its model to itself.
    """

    def __init__(self) -> None:
        self.profiles: dict[int, TrialProfile] = {}
        self.profiling: set[int] = set()  # trials that the first device is asked about
        self._deaths: defaultdict[int, list[str]] = defaultdict(list)  # of those that profiled it
        self._inside: set[int] = set()  # trials that have a visit
        self._waiting: dict[int, deque[Task]] = defaultdict(deque)
        self._to_be_alone: deque[Task] = deque()
        self._alone: int | None = None  # the trial that has entered alone, until it leaves

    def wait(self, task: Task) -> bool:
        """Let a task wait; return whether its trial has to be profiled, which nobody does yet."""
        self._waiting[task.trial].append(task)
        asks = task.trial not in self.profiles and task.trial not in self.profiling
        if asks:
            self.profiling.add(task.trial)
        return asks

    def wait_to_be_alone(self, task: Task, why: str) -> None:
        """Let a task of a profiled trial in when no visit is left, and no other one beside it."""
        _log.warning(
            "%s begins again when nothing else trains here: %s", trial_name(task.trial), why
        )
        self._to_be_alone.append(task)

    def next(self) -> Task | None:
        """Return a task that enters now, if one may."""
        if self._to_be_alone:
            if self._inside:
                return None
            task = self._to_be_alone.popleft()
            self._inside.add(task.trial)
            self._alone = task.trial
            return task
        if self._alone is not None:
            return None
        for trial, waiting in self._waiting.items():
            if waiting and trial in self.profiles and trial not in self._inside:
                self._inside.add(trial)
                return waiting.popleft()
        return None

    def leave(self, trial: int) -> None:
        """Note that the visit of a trial is over."""
        self._inside.discard(trial)
        if trial == self._alone:
            self._alone = None

    def is_alone(self, trial: int) -> bool:
        """Return whether a trial has entered alone."""
        return trial == self._alone

    def profiled(self, trial: int, profile: TrialProfile) -> None:
        """Take what the first device found out about a trial."""
        self.profiling.discard(trial)
        self.profiles[trial] = profile

    def unprofiled(self, trial: int) -> Iterable[Task]:
        """Return the tasks of a trial that can't be built; they wait no more."""
        self.profiling.discard(trial)
        return self._waiting.pop(trial, ())

    def asking(self, trial: int) -> int:
        """Return the attempt that needs a trial."""
        return self._waiting[trial][0].attempt

    def died(self, trial: int, ending: str) -> str | None:
        """Note how the first device ended that built a trial; return an error if it was often."""
        self._deaths[trial].append(ending)
        endings = self._deaths[trial]
        return deadly(endings) if len(endings) == MOST_DEATHS else None

    def forget(self, trial: int) -> None:
        """Forget a trial that is over, or was cut finer."""
        self.profiling.discard(trial)
        self._deaths.pop(trial, None)
        self.profiles.pop(trial, None)
        self._waiting.pop(trial, None)
        self._to_be_alone = deque(task for task in self._to_be_alone if task.trial != trial)


Split = Literal["train", "val"]

RESIDENT_UNIT_SECONDS = 0.5
"""What the tasks of a unit take at most on the agent's device, whose visits seldom take turns."""


class VisitPlanner:
    """Knows the trials that the agent was told of, and the rows of a visit.

    Args:
        rows: returns how many rows a partition of a split has.
        resources: what the worker trains with.
    """

    def __init__(self, rows: Callable[[Split, int], int], resources: WorkerResources) -> None:
        self._trials: dict[int, TrialSpec] = {}
        self._rows = rows
        self._resources = resources
        self._budget = resources.device_memory
        self.resident = resources.computes_in_place
        self._sparing: set[int] = set()  # trials that have run out of memory

    @classmethod
    def of(cls, manifest: Manifest, resources: WorkerResources) -> VisitPlanner:
        """Return the planner of a run."""
        rows = {(info.split, info.index): info.rows for info in manifest.partitions}
        return cls(lambda split, partition: rows[split, partition], resources)

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

    def visit_spec(self, number: int, task: Task, profile: TrialProfile) -> VisitSpec:
        """Describe a task as a visit."""
        source = StateName(task.trial, task.source.state)
        return replace(self._spec(number, task, profile), source=source)

    def _spec(self, number: int, task: Task, profile: TrialProfile) -> VisitSpec:
        trial = self._trials[task.trial]
        sparing = task.trial in self._sparing
        devices, host = self._resources.devices, self._resources.queued_memory
        recompute, pipeline = profile.way(trial, devices, self._budget, host, sparing)
        if not isinstance(task, StartSubEpoch):
            sizes = batch_sizes(self._rows("val", task.partition), trial.batch_size)
            spec = profile.evaluation(number, len(sizes), ALONE if task.uncut else pipeline)
            whole = replace(spec, recompute=False)
            return whole if task.uncut and self._has_room(whole) else spec
        # Replicas go on together until the largest of their partitions is over.
        rows = max(self._rows("train", partition) for partition in task.partitions)
        sizes = batch_sizes(rows, trial.batch_size)
        if task.uncut or profile.uncut:
            return self._uncut(number, len(sizes), trial.accumulate, profile)
        spec = profile.training(number, len(sizes), trial.accumulate, recompute, pipeline)
        return replace(spec, unit_seconds=RESIDENT_UNIT_SECONDS) if self.resident else spec

    def audit_spec(
        self, number: int, audited: VisitSpec, window: int, profile: TrialProfile
    ) -> VisitSpec:
        """Describe the visit that takes a step of another one again."""
        graph = audited.graph
        microbatches = graph.window_of(window * graph.window)
        spec = self._uncut(number, len(microbatches), graph.window, profile)
        source = None if window else audited.source  # else it has copies
        return replace(spec, source=source, audits=True)

    def _uncut(
        self, number: int, microbatches: int, window: int, profile: TrialProfile
    ) -> VisitSpec:
        """Describe a visit of the uncut model: whole if a device has room for it, else by shard."""
        recompute = profile.recomputes(None, self._budget, window)
        spec = profile.training(number, microbatches, window, recompute)
        if recompute and self._budget is not None:
            return spec
        # Where it is whole, one of its tasks does the work of a window, and all others do nothing.
        whole = replace(spec, recompute=False, unit_seconds=0.0, whole=True)
        if self._has_room(whole):
            return whole
        # A device has room for all but the optimizer state, which stays at home shard by shard.
        return profile.training(number, microbatches, window, recompute=True)

    def _has_room(self, spec: VisitSpec) -> bool:
        return self._budget is None or spec.device_need <= self._budget

    def can_spare(self, visit: Visit) -> bool:
        """Return whether a visit that ran out of memory may need less when it is done once more.

        From now on the trial's activations are computed again instead of kept, but for those of the
        last shard, whose backward follows at once.
        """
        trial, profile = visit.trial, visit.profile
        can_recompute = profile.tasks is None or profile.tasks.recompute is not None
        keeps = visit.spec.graph.training and not visit.recompute and visit.spec.graph.shards > 1
        if not keeps or trial.recompute is not None or not can_recompute:
            return False
        self._sparing.add(trial.trial)
        _log.warning(
            "%s ran out of memory; its activations are computed again from now on",
            trial_name(trial.trial),
        )
        return True

    def helps_finer(self, visit: Visit) -> bool:
        """Return whether a visit that ran out of memory would need less in more shards."""
        return self.has_budget and not (visit.spec.keeps_all or visit.task.uncut)

    def fault(self, task: Task, result: SubEpochDone | EvaluationDone) -> str | None:
        """Return what is wrong with the rows that a sub-epoch trained on, None if nothing is."""
        partition = task.partition
        expected = self._rows("train", partition)
        if isinstance(result, EvaluationDone) or result.rows == expected:
            return None
        return (
            f"epoch {task.epoch + 1} trained on {result.rows} rows of partition {partition}, "
            f"which has {expected}"
        )


OUT_OF_MEMORY = "trial {} ran out of memory in {}: {}\n"


@dataclass(eq=False)
class _Deaths:
    """Holds how devices ended that ran an attempt's code, and which deaths are known already."""

    endings: list[str] = field(default_factory=list)
    counted: set[WorkerDevice] = field(default_factory=set)


@dataclass(frozen=True)
class Outbox:
    """Takes what the queues of a worker have to tell; each is called from their thread.

    Args:
        incarnation: names this agent.
        report: takes an event for the coordinator.
        send: takes a message of progress for it.
        begin: tells it of an attempt that comes in, if no device of this process tells by itself.
        fail: takes an error of the queues or devices themselves, which ends the agent.
    """

    incarnation: str
    report: Callable[[events.Event], object]
    send: Callable[[dict[str, Any]], object]
    begin: Callable[[int], object]
    fail: Callable[[Exception], object]


class AttemptReports:
    """Knows which attempts are open; one thread uses it.

    Args:
        outbox: takes how they end.
        fetch_manager: knows why a state could not be fetched.
    """

    def __init__(self, outbox: Outbox, fetch_manager: FetchManager) -> None:
        self._outbox = outbox
        self._fetch_manager = fetch_manager
        self._open: set[int] = set()
        self._deaths: dict[int, _Deaths] = {}  # of devices that ran the code of an open attempt

    def __contains__(self, attempt: int) -> bool:
        """Return whether an attempt was accepted, and neither ended nor was taken back."""
        return attempt in self._open

    def accept(self, attempt: int) -> None:
        """Note that an attempt will be performed."""
        self._open.add(attempt)

    def take_back(self, attempt: int) -> None:
        """Report nothing of an attempt any more."""
        self._open.discard(attempt)
        self._deaths.pop(attempt, None)

    def died(self, task: Task, device: WorkerDevice, beside: Set[WorkerDevice]) -> str | None:
        """Note that a device died of a task's code; return an error if too many did.

        Args:
            beside: the devices that ran its code, too. Their deaths are this one, as when somebody
                ends all processes of a worker.
        """
        if task.attempt not in self._open:
            return None
        deaths = self._deaths.setdefault(task.attempt, _Deaths())
        if device not in deaths.counted:
            deaths.endings.append(device.ending)
        deaths.counted |= beside
        return deadly(deaths.endings) if len(deaths.endings) >= MOST_DEATHS else None

    def ending(self, task: Task) -> None:
        """Report that a sub-epoch comes to its last step."""
        self._outbox.report(events.SubEpochEnding(task.attempt, self._outbox.incarnation))

    def done(self, result: events.SubEpochDone | events.EvaluationDone) -> None:
        """Report what an attempt gave."""
        if result.attempt in self._open:
            self.take_back(result.attempt)
            self._outbox.report(result)

    def failed(
        self,
        task: Task,
        kind: FailureKind,
        why: str,
        lacking: str | None = None,
        finer: bool = False,
    ) -> None:
        """Report why an attempt failed.

        Args:
            kind: what it failed of.
            lacking: what memory ran out, and what to do.
            finer: whether a finer cut would need less of it.
        """
        if task.attempt not in self._open:
            return
        self.take_back(task.attempt)
        make: Callable[[int, str, str], events.Event] = events.TaskFailed
        name = task.trial, task.source.state
        if kind is FailureKind.TRANSFER:
            lacking = lacking or self._fetch_manager.lacking(*name)
            why = self._fetch_manager.error(*name) or why
            make = partial(events.TransferFailed, altered=self._fetch_manager.altered(*name))
        elif kind is FailureKind.DIFFERENCE:
            make = events.AuditFailed
        if lacking is not None:
            why = OUT_OF_MEMORY.format(task.trial, described(task), lacking) + why
            make = partial(events.TaskFailed, memory=finer)
        self._outbox.report(make(task.attempt, self._outbox.incarnation, why))
