"""A look ahead: what would happen from here on if idle workers always took the best trial."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from cerebro_hydra.plan.outcome import outcome
from cerebro_hydra.plan.visits import Kind, visit_order

if TYPE_CHECKING:
    from cerebro_hydra.plan.hop_state import HopState

Bias = list[list[float]]  # seconds by trial and partition
Seconds = dict[Kind, list[list[float]]]  # by trial and partition

SOON = 0.05  # of a task's time: how long whatever should be over or there already will take


class Step(NamedTuple):
    """A task in an imagined future."""

    trial: int
    kind: Kind
    partition: int


@dataclass(slots=True)
class Forecast:
    """A trial in an imagined future."""

    epoch: int
    kind: Kind  # what it does now
    left: list[int]  # the partitions still to be given out for that
    ready: float  # when its state is there
    work: float  # seconds that are left on its own path, evaluations of an epoch counted once
    evaluated: float = 0.0  # when the last of its evaluations ends


@dataclass(slots=True)
class Lookahead:
    """The present, by the state's own estimates; taken once per decision."""

    state: HopState
    workers: list[int]  # of each partition; a negative number where an agent has yet to join
    seconds: Seconds
    mean: float  # seconds of a sub-epoch
    forecasts: dict[int, Forecast]  # of the trials that still have tasks to give out
    free: dict[int, float]  # when each worker is
    load: dict[int, float]  # work that a worker has not been given yet

    @property
    def bound(self) -> float:
        """No future ends before this: the longest trial, the fullest worker."""
        trials = [max(p.ready, p.evaluated) + p.work for p in self.forecasts.values()]
        workers = [until + self.load[worker] for worker, until in self.free.items()]
        return max(0.0, *trials, *workers)

    def rollout(self, bias: Bias, patience: float, horizon: int) -> tuple[float, list[Step]]:
        """Follow one rule for up to ``horizon`` tasks; return (end of the run, the tasks).

        The rule: whenever a worker is free and a trial is ready, or both will be within
        ``patience`` seconds, the pair with the most work left, the trial's plus the worker's plus
        ``bias``, goes first. If the horizon comes before the end, that end is a lower bound.
        """
        forecasts = {
            trial: replace(forecast, left=list(forecast.left))
            for trial, forecast in self.forecasts.items()
        }
        future = replace(self, forecasts=forecasts, free=dict(self.free), load=dict(self.load))
        busy = {trial for trial, forecast in forecasts.items() if forecast.left}
        moments = sorted({*future.free.values(), *(forecasts[trial].ready for trial in busy)})
        steps: list[Step] = []
        end = 0.0
        while moments and busy and len(steps) < horizon:
            now = heapq.heappop(moments)
            soon = now + patience
            # Nobody waits for an agent that may never come: patience is for what runs.
            idle = {w for w, until in future.free.items() if until <= (soon if w >= 0 else now)}
            while idle and (step := future._best(soon, idle, busy, bias)):
                worker, until = future._take(step)
                steps.append(step)
                idle.discard(worker)
                end = max(end, until)
                heapq.heappush(moments, until)
                if not forecasts[step.trial].left:
                    busy.discard(step.trial)
        return max(end, future.bound), steps

    def _best(self, soon: float, idle: set[int], busy: set[int], bias: Bias) -> Step | None:
        best, found = float("-inf"), None
        seeded = self.state.config.order == "seeded"
        for trial in busy:
            forecast = self.forecasts[trial]
            if forecast.ready > soon:
                continue
            only_next = seeded and forecast.kind == "train"
            for partition in forecast.left[:1] if only_next else forecast.left:
                worker = self.workers[partition]
                if worker in idle:
                    score = forecast.work + self.load[worker] + bias[trial][partition]
                    if score > best:
                        best, found = score, Step(trial, forecast.kind, partition)
        return found

    def _take(self, step: Step) -> tuple[int, float]:
        """Do the step; return its worker and when it ends."""
        trial, kind, partition = step
        forecast, seconds = self.forecasts[trial], self.seconds[kind][trial][partition]
        worker = self.workers[partition]
        until = max(self.free[worker], forecast.ready) + seconds
        self.free[worker] = until
        self.load[worker] -= seconds
        forecast.left.remove(partition)
        config = self.state.config
        if kind == "train":
            forecast.ready = until
            forecast.work -= seconds
        else:
            forecast.evaluated = max(forecast.evaluated, until)
        if forecast.left:
            return worker, until
        if kind == "train" and config.evaluate:
            forecast.kind = "evaluate"
            forecast.left = list(range(config.partitions))
            return worker, until
        if kind == "evaluate":
            forecast.ready = forecast.evaluated
            forecast.work -= max(self.seconds["evaluate"][trial])
        forecast.epoch += 1
        forecast.kind = "train"
        if forecast.epoch < config.epochs:
            forecast.left = list(visit_order(config, trial, forecast.epoch))
        return worker, until


def snapshot(state: HopState) -> Lookahead:
    """Take the outlook from the state as it is."""
    config, estimates = state.config, state.estimates
    everywhere = range(config.partitions)
    seconds: Seconds = {
        kind: [
            [estimates.seconds(kind, trial, partition) for partition in everywhere]
            for trial in range(len(state.trials))
        ]
        for kind in ("train", "evaluate")
    }
    workers = [agent.worker if (agent := state.agent_of(p)) else -1 - p for p in everywhere]
    mean = sum(map(sum, seconds["train"])) / (len(state.trials) * config.partitions)

    ends: dict[int, float] = {}  # by attempt
    # Who has yet to join is thought to do so soon: agents join one by one, and come back.
    free = {worker: estimates.now + SOON * mean for worker in workers if worker < 0}
    for worker, agent in state.agents.items():
        free[worker] = estimates.now
        for attempt in (agent.running, agent.reserved):
            if attempt is not None:
                expected = seconds[attempt.kind][attempt.trial][attempt.partition]
                start = attempt.started_at if attempt.started else free[worker]
                # An overdue task is not over yet: whoever is idle should not wait for it.
                soonest = estimates.now + (0.0 if attempt.ending else SOON * expected)
                free[worker] = ends[attempt.number] = max(soonest, start + expected)

    load = dict.fromkeys(free, 0.0)
    forecasts = {}
    for index, trial in enumerate(state.trials):
        if trial.status is not None or outcome(config, trial) is not None:
            continue
        epoch = len(trial.history)
        kind: Kind = "evaluate" if trial.epoch_trained(config.partitions) else "train"
        if kind == "evaluate":
            given = trial.sums.keys() | trial.evaluations.keys()
        else:
            given = set(trial.visited(config.partitions))
        later = config.epochs - epoch - 1  # epochs after this one
        training, evaluating = seconds["train"][index], seconds["evaluate"][index]
        for partition, worker in enumerate(workers):
            to_train = later + (kind == "train" and partition not in given)
            load[worker] += to_train * training[partition]
            if config.evaluate:
                to_evaluate = later + (kind == "train" or partition not in given)
                load[worker] += to_evaluate * evaluating[partition]
        work = later * sum(training)
        work += sum(training[p] for p in everywhere if kind == "train" and p not in given)
        work += (later + 1) * max(evaluating) if config.evaluate else 0.0
        order = visit_order(config, index, epoch) if kind == "train" else tuple(everywhere)
        forecasts[index] = Forecast(
            epoch,
            kind,
            left=[p for p in order if p not in given],
            ready=max(
                (ends[a.number] for a in trial.pending_visits if a.number in ends), default=0.0
            ),
            work=work,
            evaluated=max((ends[a.number] for a in trial.evaluations.values()), default=0.0),
        )
    return Lookahead(state, workers, seconds, mean, forecasts, free, load)
