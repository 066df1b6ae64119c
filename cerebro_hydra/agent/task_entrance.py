"""Lets tasks into the queues of a worker: each once its trial is profiled and has no other run."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable

from cerebro_hydra.agent.attempt_reports import AttemptReports
from cerebro_hydra.agent.device_messages import Failed, Forget, Profile, Profiled
from cerebro_hydra.agent.run_planner import RunPlanner
from cerebro_hydra.agent.task_watch import Task
from cerebro_hydra.agent.worker_devices import DEADLY, MOST_DEATHS, WorkerDevices
from cerebro_hydra.shards.trial_profile import TrialProfile
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

    def enter(self, task: Task) -> None:
        """Let a task in as soon as it may enter."""
        self._waiting[task.trial].append(task)
        if task.trial in self._profiles:
            self._let_in(task.trial)
        elif task.trial not in self._profiling:
            self._profiling.add(task.trial)
            self._ask(task.trial)

    def leave(self, trial: int) -> None:
        """Note that the run of a trial is over."""
        self._inside.discard(trial)
        self._let_in(trial)

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
            self._let_in(answer.trial)

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
        self._devices.tell(Forget(trial))

    def _let_in(self, trial: int) -> None:
        waiting = self._waiting.get(trial)
        while waiting and trial not in self._inside:
            task = waiting.popleft()
            if task.attempt in self._reports:
                self._inside.add(trial)
                self._enter(task, self._profiles[trial])

    def _ask(self, trial: int) -> None:
        attempt = self._waiting[trial][0].attempt
        self._devices.ask(self._devices[0], Profile(self._planner.trial(trial), attempt))
