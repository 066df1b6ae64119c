"""Looks ahead to the tasks that would follow if idle workers always took the best trial."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import NamedTuple

from cerebro_hydra.plan.hop.tables import KINDS
from cerebro_hydra.plan.hop.trials import TaskKind
from cerebro_hydra.plan.policy.view import OVERDUE_SHARE, TrialView, View

PairValues = dict[int, list[float]]  # by trial and partition
SecondsTable = dict[TaskKind, PairValues]  # expected seconds, by kind, trial and partition


class PlannedTask(NamedTuple):
    """Names a task in the simulated future."""

    trial: int
    kind: TaskKind
    partition: int


@dataclass(slots=True)
class Forecast:
    """Follows a trial in the simulated future; times are seconds by the clock of the estimates."""

    epoch: int
    epochs: int  # up to which it trains
    kind: TaskKind  # what it does now
    unassigned: list[int]  # the partitions that are still to be assigned for that
    ready: float  # when its newest state is there
    work: float  # seconds left if it never waits; an epoch's evaluations count once
    evaluated: float = 0.0  # when the last of its evaluations ends

    def copy(self) -> Forecast:
        """Return a forecast that changes by itself; faster than ``dataclasses.replace``."""
        unassigned = self.unassigned.copy()
        return Forecast(
            self.epoch, self.epochs, self.kind, unassigned, self.ready, self.work, self.evaluated
        )


@dataclass(slots=True)
class Lookahead:
    """Rolls out futures from a snapshot of the present, by the state's own estimates."""

    view: View
    trials: dict[int, TrialView]
    workers: list[int]  # by partition; a negative number where an agent has yet to join
    seconds: SecondsTable
    mean: float  # seconds of a mean sub-epoch
    forecasts: dict[int, Forecast]  # by trial, of those that have not ended
    free_at: dict[int, list[float]]  # by worker, of each of its devices, as a heap
    load: dict[int, float]  # by worker, the seconds per device of work that is not assigned yet

    @property
    def bound(self) -> float:
        """Return the time before which no future ends, by longest trial and fullest worker."""
        trials = [max(f.ready, f.evaluated) + f.work for f in self.forecasts.values()]
        workers = [sum(t) / len(t) + self.load[worker] for worker, t in self.free_at.items()]
        return max(0.0, *trials, *workers)

    def rollout(
        self, preferences: PairValues, max_wait: float, horizon: int
    ) -> tuple[float, list[PlannedTask]]:
        """Follow one rule for up to ``horizon`` tasks; return the end of the run and the tasks.

        The rule considers a device and a trial once both are free, or will be within ``max_wait``
        seconds. The pair with the most work left goes first, counting the trial's work, the
        worker's load and the pair's preference, all in seconds. If the horizon comes before the end
        of the run, the returned end is a lower bound.
        """
        future = replace(
            self,
            forecasts={trial: forecast.copy() for trial, forecast in self.forecasts.items()},
            free_at={worker: devices.copy() for worker, devices in self.free_at.items()},
            load=dict(self.load),
        )
        queues = TaskQueues(future, preferences)
        moments = sorted({*chain.from_iterable(future.free_at.values()), *queues.ready_times()})
        tasks: list[PlannedTask] = []
        end = 0.0
        while moments and len(tasks) < horizon:
            now = heapq.heappop(moments)
            soon = now + max_wait
            # Nobody waits for an agent that may never join, only for one that is there.
            idle = {
                worker: count
                for worker, devices in future.free_at.items()
                if (count := sum(until <= (soon if worker >= 0 else now) for until in devices))
            }
            while idle and (task := queues.take_best(soon, idle)):
                worker, until = future._run_task(task)
                queues.end_turn(task)
                tasks.append(task)
                idle[worker] -= 1
                if not idle[worker]:
                    del idle[worker]
                end = max(end, until)
                heapq.heappush(moments, until)
        return max(end, future.bound), tasks

    def _run_task(self, task: PlannedTask) -> tuple[int, float]:
        """Run the task in this future; return its worker and the time at which it ends."""
        trial, kind, partition = task
        forecast, seconds = self.forecasts[trial], self.seconds[kind][trial][partition]
        worker = self.workers[partition]
        devices = self.free_at[worker]
        until = max(devices[0], forecast.ready) + seconds
        heapq.heapreplace(devices, until)
        self.load[worker] -= seconds / len(devices)
        forecast.unassigned.remove(partition)
        if kind == "train":
            forecast.ready = until
            forecast.work -= seconds
        else:
            forecast.evaluated = max(forecast.evaluated, until)
        if forecast.unassigned:
            return worker, until
        if kind == "train" and self.view.evaluates:
            forecast.kind = "evaluate"
            forecast.unassigned = list(range(self.view.partitions))
            return worker, until
        if kind == "evaluate":
            forecast.ready = forecast.evaluated
            forecast.work -= max(self.seconds["evaluate"][trial])
        forecast.epoch += 1
        forecast.kind = "train"
        if forecast.epoch < forecast.epochs:
            forecast.unassigned = self.view.visits_of(trial, forecast.epoch)
        return worker, until


class TaskQueues:
    """Keeps the tasks of a future that may come next: a queue per worker, the most work first.

    Tasks of a trial that is not ready are in no queue. When a trial trains, or its evaluation
    ends, its turn is over: what is queued for it is stale, and its next tasks are queued later.
    """

    def __init__(self, future: Lookahead, preferences: PairValues) -> None:
        self._future = future
        self._preferences = preferences
        # Negative work, trial, partition and turn; the smallest comes first.
        self._queues: dict[int, list[tuple[float, int, int, int]]] = {
            worker: [] for worker in future.free_at
        }
        self._turns = dict.fromkeys(future.forecasts, 0)
        forecasts = future.forecasts.items()
        self._not_ready = sorted((f.ready, trial) for trial, f in forecasts if f.unassigned)

    def ready_times(self) -> set[float]:
        """Return when the trials that have tasks left, but none in a queue, are ready."""
        return {ready for ready, _ in self._not_ready}

    def take_best(self, soon: float, idle: Iterable[int]) -> PlannedTask | None:
        """Take the task with the most work of those that an idle worker can begin by ``soon``."""
        while self._not_ready and self._not_ready[0][0] <= soon:
            self._queue_tasks(heapq.heappop(self._not_ready)[1])
        best_score, best = inf, -1
        for worker in idle:
            queue = self._queues[worker]
            while queue and queue[0][3] != self._turns[queue[0][1]]:
                heapq.heappop(queue)
            if queue:
                score = queue[0][0] - self._future.load[worker]
                if score < best_score:
                    best_score, best = score, worker
        if best_score == inf:
            return None
        _, trial, partition, _ = heapq.heappop(self._queues[best])
        return PlannedTask(trial, self._future.forecasts[trial].kind, partition)

    def end_turn(self, task: PlannedTask) -> None:
        """End the turn of a task's trial, unless other evaluations of the same state go on."""
        forecast = self._future.forecasts[task.trial]
        if task.kind == "train" or forecast.kind == "train":
            self._turns[task.trial] += 1
            if forecast.unassigned:
                heapq.heappush(self._not_ready, (forecast.ready, task.trial))

    def _queue_tasks(self, trial: int) -> None:
        future, turn = self._future, self._turns[trial]
        forecast, preferences = future.forecasts[trial], self._preferences[trial]
        seeded = forecast.kind == "train" and future.view.seeded_order
        for partition in forecast.unassigned[:1] if seeded else forecast.unassigned:
            entry = (-forecast.work - preferences[partition], trial, partition, turn)
            heapq.heappush(self._queues[future.workers[partition]], entry)


def snapshot(view: View) -> Lookahead:
    """Return the present of a run, by its own estimates."""
    partitions = range(view.partitions)
    trials = view.live()
    seconds: SecondsTable = {
        kind: {trial: [view.seconds(kind, trial, p) for p in partitions] for trial in trials}
        for kind in KINDS
    }
    mean = sum(map(sum, seconds["train"].values())) / max(1, len(trials) * len(partitions))
    held = [view.worker(partition) for partition in partitions]
    workers = [-1 - p if worker is None else worker for p, worker in enumerate(held)]
    # Agents join one by one and come back, so an absent one is expected soon.
    soon = [view.now + OVERDUE_SHARE * mean] * view.usual_width
    absent = {worker: soon.copy() for worker in workers if worker < 0}
    free_at = view.free_at() | absent

    load = dict.fromkeys(free_at, 0.0)
    forecasts = {}
    for number, trial in trials.items():
        training, evaluating = seconds["train"][number], seconds["evaluate"][number]
        later_epochs = trial.epochs - trial.epoch - 1
        trains = trial.kind == "train"
        work = later_epochs * sum(training)
        if trains:
            work += sum([training[p] for p in trial.unassigned])
        if view.evaluates:
            work += (later_epochs + 1) * max(evaluating)
        forecasts[number] = Forecast(
            trial.epoch,
            trial.epochs,
            trial.kind,
            list(trial.unassigned),
            trial.ready,
            work,
            trial.evaluated,
        )
        for partition, worker in enumerate(workers):
            unassigned, devices = partition in trial.unassigned, len(free_at[worker])
            sub_epochs = later_epochs + (trains and unassigned)
            load[worker] += sub_epochs * training[partition] / devices
            if view.evaluates:
                evaluations = later_epochs + (trains or unassigned)
                load[worker] += evaluations * evaluating[partition] / devices
    return Lookahead(view, trials, workers, seconds, mean, forecasts, free_at, load)
