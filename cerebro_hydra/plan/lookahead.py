"""Looks ahead to the tasks that would follow if idle workers always took the best trial."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from cerebro_hydra.plan.progress import TaskKind, TrialProgress, visit_order
from cerebro_hydra.plan.trial_end import outcome

if TYPE_CHECKING:
    from cerebro_hydra.plan.hop_state import HopState

PairValues = list[list[float]]  # by trial and partition
SecondsTable = dict[TaskKind, PairValues]  # expected seconds of every task

# An overdue task, or an agent that has yet to join, is expected after this share of a task's time.
OVERDUE_SHARE = 0.05


class PlannedTask(NamedTuple):
    """Names a task in the simulated future."""

    trial: int
    kind: TaskKind
    partition: int


@dataclass(slots=True)
class Forecast:
    """Follows a trial in the simulated future; times are seconds by the clock of the estimates."""

    epoch: int
    kind: TaskKind  # what it does now
    unassigned: list[int]  # the partitions that are still to be assigned for that
    ready: float  # when its newest state is there
    work: float  # seconds left if it never waits; an epoch's evaluations count once
    evaluated: float = 0.0  # when the last of its evaluations ends


@dataclass(slots=True)
class Lookahead:
    """Rolls out futures from a snapshot of the present, by the state's own estimates."""

    state: HopState
    workers: list[int]  # by partition; a negative number where an agent has yet to join
    seconds: SecondsTable
    mean: float  # seconds of a mean sub-epoch
    forecasts: dict[int, Forecast]  # by trial, of those that have not ended
    free_at: dict[int, float]  # by worker
    load: dict[int, float]  # by worker, the seconds of work that is not assigned yet

    @property
    def bound(self) -> float:
        """Return the time before which no future ends, by longest trial and fullest worker."""
        trials = [max(f.ready, f.evaluated) + f.work for f in self.forecasts.values()]
        workers = [until + self.load[worker] for worker, until in self.free_at.items()]
        return max(0.0, *trials, *workers)

    def rollout(
        self, preferences: PairValues, max_wait: float, horizon: int
    ) -> tuple[float, list[PlannedTask]]:
        """Follow one rule for up to ``horizon`` tasks; return the end of the run and the tasks.

        The rule considers a worker and a trial once both are free, or will be within ``max_wait``
        seconds. The pair with the most work left goes first, counting the trial's work, the
        worker's load and the pair's preference, all in seconds. If the horizon comes before the end
        of the run, the returned end is a lower bound.
        """
        forecasts = {
            trial: replace(forecast, unassigned=list(forecast.unassigned))
            for trial, forecast in self.forecasts.items()
        }
        future = replace(
            self, forecasts=forecasts, free_at=dict(self.free_at), load=dict(self.load)
        )
        open_trials = {trial for trial, forecast in forecasts.items() if forecast.unassigned}
        ready = (forecasts[trial].ready for trial in open_trials)
        moments = sorted({*future.free_at.values(), *ready})
        tasks: list[PlannedTask] = []
        end = 0.0
        while moments and open_trials and len(tasks) < horizon:
            now = heapq.heappop(moments)
            soon = now + max_wait
            # Nobody waits for an agent that may never join, only for one that is there.
            idle = {w for w, until in future.free_at.items() if until <= (soon if w >= 0 else now)}
            while idle and (task := future._best_task(soon, idle, open_trials, preferences)):
                worker, until = future._run_task(task)
                tasks.append(task)
                idle.discard(worker)
                end = max(end, until)
                heapq.heappush(moments, until)
                if not forecasts[task.trial].unassigned:
                    open_trials.discard(task.trial)
        return max(end, future.bound), tasks

    def _best_task(
        self, soon: float, idle: set[int], open_trials: set[int], preferences: PairValues
    ) -> PlannedTask | None:
        best_score, best = float("-inf"), None
        seeded = self.state.config.order == "seeded"
        for trial in open_trials:
            forecast = self.forecasts[trial]
            if forecast.ready > soon:
                continue
            only_next = seeded and forecast.kind == "train"
            for partition in forecast.unassigned[:1] if only_next else forecast.unassigned:
                worker = self.workers[partition]
                if worker in idle:
                    score = forecast.work + self.load[worker] + preferences[trial][partition]
                    if score > best_score:
                        best_score, best = score, PlannedTask(trial, forecast.kind, partition)
        return best

    def _run_task(self, task: PlannedTask) -> tuple[int, float]:
        """Run the task in this future; return its worker and the time at which it ends."""
        trial, kind, partition = task
        forecast, seconds = self.forecasts[trial], self.seconds[kind][trial][partition]
        worker = self.workers[partition]
        until = max(self.free_at[worker], forecast.ready) + seconds
        self.free_at[worker] = until
        self.load[worker] -= seconds
        forecast.unassigned.remove(partition)
        config = self.state.config
        if kind == "train":
            forecast.ready = until
            forecast.work -= seconds
        else:
            forecast.evaluated = max(forecast.evaluated, until)
        if forecast.unassigned:
            return worker, until
        if kind == "train" and config.evaluate:
            forecast.kind = "evaluate"
            forecast.unassigned = list(range(config.partitions))
            return worker, until
        if kind == "evaluate":
            forecast.ready = forecast.evaluated
            forecast.work -= max(self.seconds["evaluate"][trial])
        forecast.epoch += 1
        forecast.kind = "train"
        if forecast.epoch < config.epochs:
            forecast.unassigned = list(visit_order(config, trial, forecast.epoch))
        return worker, until


def snapshot(state: HopState) -> Lookahead:
    """Return the present of a state, by its own estimates."""
    config, estimates = state.config, state.estimates
    partitions = range(config.partitions)
    seconds: SecondsTable = {
        kind: [
            [estimates.seconds(kind, trial, partition) for partition in partitions]
            for trial in range(len(state.trials))
        ]
        for kind in ("train", "evaluate")
    }
    mean = sum(map(sum, seconds["train"])) / (len(state.trials) * config.partitions)
    workers = [agent.worker if (agent := state.agent_of(p)) else -1 - p for p in partitions]
    free_at, ends = _running_tasks(state, seconds)
    # Agents join one by one and come back, so an absent one is expected soon.
    absent = {worker: estimates.now + OVERDUE_SHARE * mean for worker in workers if worker < 0}
    free_at = absent | free_at

    load = dict.fromkeys(free_at, 0.0)
    forecasts = {}
    for index, trial in enumerate(state.trials):
        if trial.status is not None or outcome(config, trial) is not None:
            continue
        forecast = _forecast(state, index, trial, seconds, ends)
        forecasts[index] = forecast
        later_epochs = config.epochs - forecast.epoch - 1
        for partition, worker in enumerate(workers):
            training, unassigned = forecast.kind == "train", partition in forecast.unassigned
            trainings = later_epochs + (training and unassigned)
            load[worker] += trainings * seconds["train"][index][partition]
            if config.evaluate:
                evaluations = later_epochs + (training or unassigned)
                load[worker] += evaluations * seconds["evaluate"][index][partition]
    return Lookahead(state, workers, seconds, mean, forecasts, free_at, load)


def _running_tasks(
    state: HopState, seconds: SecondsTable
) -> tuple[dict[int, float], dict[int, float]]:
    """Return when each live worker is free, and when each attempt ends."""
    now = state.estimates.now
    free_at: dict[int, float] = {}
    ends: dict[int, float] = {}
    for worker, agent in state.agents.items():
        free_at[worker] = now
        for attempt in (agent.running, agent.reserved):
            if attempt is not None:
                expected = seconds[attempt.kind][attempt.trial][attempt.partition]
                start = attempt.started_at if attempt.started else free_at[worker]
                # An overdue task is not over yet, and idle workers should not wait for it.
                soonest = now + (0.0 if attempt.ending else OVERDUE_SHARE * expected)
                free_at[worker] = ends[attempt.number] = max(soonest, start + expected)
    return free_at, ends


def _forecast(
    state: HopState, index: int, trial: TrialProgress, seconds: SecondsTable, ends: dict[int, float]
) -> Forecast:
    config, epoch = state.config, len(trial.history)
    partitions = range(config.partitions)
    kind: TaskKind = "evaluate" if trial.epoch_trained(config.partitions) else "train"
    if kind == "train":
        assigned = set(trial.visited(config.partitions))
        order = visit_order(config, index, epoch)
    else:
        assigned, order = trial.evaluation_begun(), tuple(partitions)
    training, evaluating = seconds["train"][index], seconds["evaluate"][index]
    later_epochs = config.epochs - epoch - 1
    work = later_epochs * sum(training)
    work += sum(training[p] for p in partitions if kind == "train" and p not in assigned)
    work += (later_epochs + 1) * max(evaluating) if config.evaluate else 0.0
    pending = [ends[a.number] for a in trial.pending_visits if a.number in ends]
    return Forecast(
        epoch,
        kind,
        unassigned=[p for p in order if p not in assigned],
        ready=max(pending, default=0.0),
        work=work,
        evaluated=max((ends[a.number] for a in trial.evaluations.values()), default=0.0),
    )
