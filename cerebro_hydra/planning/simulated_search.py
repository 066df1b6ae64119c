"""Simulates a search on workers that nobody has yet: its time, its bytes, and a lower bound."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.plan.costs.model import CostModel, Kind
from cerebro_hydra.plan.hop.trials import TaskKind
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.actions import HOST
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.queues.pick import PICKS
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.schedules.trial_plan import TrialPlan
from cerebro_hydra.plan.simulate.fluid import Flow
from cerebro_hydra.plan.simulate.run import Overheads, SimulatedTimeline, Simulation
from cerebro_hydra.plan.simulate.worker import SimulatedDevices
from cerebro_hydra.planning.followed_search import Admit, FollowedSearch, Follower
from cerebro_hydra.planning.planned_trials import PlannedTrial

MOST_ACTIONS = 20_000
"""Tasks that are simulated one by one; visits of a search that has more flow."""

MOST_SUB_EPOCHS = 20_000
"""Sub-epochs and evaluations that are simulated; of a search that has more, a part is."""

Metric = Callable[[int, int], float]
"""What every metric of a trial is, by its number and its epoch."""


@dataclass(frozen=True)
class Place:
    """Describes workers that are all alike, and the rows that each of them holds."""

    workers: int
    resources: WorkerResources
    train_rows: tuple[int, ...]
    val_rows: tuple[int, ...]

    def rows(self, kind: Kind, partition: int) -> int:
        """Return the rows of a task."""
        return (self.train_rows if kind == "train" else self.val_rows)[partition]

    @property
    def devices(self) -> int:
        """Return how many devices all workers have."""
        return self.workers * self.resources.devices


WORTH_IT = 0.3
"""The share of a step's computing up to which its exchange of gradients is worth replicas."""


@dataclass(frozen=True)
class Exchange:
    """Says what replicas of a trial spend on their gradients.

    Args:
        replicas: the most that it has at once.
        nbytes: that each of them sends in a step.
        step: seconds in which the slowest computes a step.
        seconds: that the exchange adds to it.
    """

    replicas: int
    nbytes: int
    step: float
    seconds: float

    @property
    def share(self) -> float:
        """Return it as a share of the step's computing."""
        return self.seconds / max(self.step, 1e-12)


@dataclass(frozen=True)
class Outcome:
    """Holds what a simulated search took.

    Args:
        seconds: from its begin to its end.
        start: of these, until the first worker can train.
        bound: which no order of its tasks on these workers can beat.
        busy: the share of the devices' time in which they computed, since the first worker joined.
        hopped, copied, disk: bytes between workers, between DRAM and devices, and on disk.
        device_peak, host_peak: the most bytes that a device, and DRAM, of a worker had.
        part: how many of its trials and workers stand for one that was simulated; 1 if all were.
        timeline: the decisions.
        trials: those that were trained, by number.
        refused: why others were not.
        exchanges: of those that had replicas.
    """

    seconds: float
    start: float
    bound: float
    busy: float
    hopped: float
    copied: float
    disk: float
    device_peak: int
    host_peak: int
    part: int
    timeline: SimulatedTimeline
    trials: dict[int, PlannedTrial]
    refused: dict[int, str] = field(default_factory=dict)
    exchanges: dict[int, Exchange] = field(default_factory=dict)


def simulate(
    config: HopConfig,
    follower: Follower,
    admit: Admit,
    place: Place,
    costs: CostModel,
    metric: Metric,
    most_sub_epochs: int | None = None,
    most_actions: int | None = None,
) -> Outcome:
    """Simulate a search once.

    Args:
        config: of a run with a partition for each worker.
        follower: proposes its trials, and is used up.
        admit: admits them.
        metric: what they measure.
        most_sub_epochs: a part of a search that has more is simulated; None is `MOST_SUB_EPOCHS`.
        most_actions: visits of a search that has more flow; None is `MOST_ACTIONS`.
    """
    most = most_sub_epochs or MOST_SUB_EPOCHS
    proposed = follower.begin()
    budgets = [each.budget for each in proposed if isinstance(each, ev.TrialProposed)]
    closed = any(isinstance(each, ev.SearchClosed) for each in proposed)
    kinds = 1 + config.evaluate
    tasks = sum(budgets) * place.workers * kinds
    part = 1
    if closed and tasks > most:
        part = math.ceil(math.sqrt(tasks / most))
        part = min(part, place.workers, len(budgets))
    begun = _Begun(follower, proposed, admit, part)
    smaller = _part_of(place, part, len(budgets) / len(range(0, len(budgets), part)))
    run = _PlannedRun(begun, begun.admit, smaller, costs, part)
    config = replace(config, partitions=run.place.workers)
    return run.simulate(config, metric, tasks / part**2, most_actions or MOST_ACTIONS)


class _Begun:
    """Is a follower that has begun; every `part`-th of its candidates stands for so many."""

    def __init__(
        self, follower: Follower, proposed: Sequence[ev.Event], admit: Admit, part: int
    ) -> None:
        self._follower, self._proposed, self._admit = follower, proposed, admit
        self._stand_ins: list[ev.TrialProposed] = []
        if part > 1:
            candidates = [each for each in proposed if isinstance(each, ev.TrialProposed)]
            self._stand_ins = candidates[::part]
            taken = (replace(each, trial=at) for at, each in enumerate(self._stand_ins))
            self._proposed = [*taken, ev.SearchClosed()]

    def admit(self, candidate: ev.TrialProposed) -> PlannedTrial | str:
        """Admit a candidate, or the one that stands in its place."""
        if not self._stand_ins:
            return self._admit(candidate)
        found = self._admit(self._stand_ins[candidate.trial])
        return found if isinstance(found, str) else found.numbered(candidate.trial)

    def begin(self) -> list[ev.Event]:
        """Return what was proposed."""
        return list(self._proposed)

    def follow(self, event: ev.Event, instructions: Sequence[ins.Instruction]) -> list[ev.Event]:
        """Return what is decided; a part of a search decides nothing."""
        return [] if self._stand_ins else self._follower.follow(event, instructions)


def _part_of(place: Place, part: int, times: float) -> Place:
    """Return a part of the workers, each with so many times its rows, as it has fewer trials."""
    if part == 1:
        return place
    workers = max(1, place.workers // part)
    train, val = (
        round(times * sum(rows) / place.workers) for rows in (place.train_rows, place.val_rows)
    )
    return Place(workers, place.resources, (train,) * workers, (val,) * workers)


class _PlannedRun:
    """Is one simulation, whose tasks, hops and waits cost what the model says."""

    def __init__(
        self, follower: Follower, admit: Admit, place: Place, costs: CostModel, part: int
    ) -> None:
        self._follower, self._admit = follower, admit
        self.place, self._costs, self._part = place, costs, part
        self._flows: dict[tuple[Kind, str, TrialPlan | None, int], Flow] = {}
        self._start = costs.start.mean + costs.devices.mean
        self._search: FollowedSearch

    def simulate(
        self, config: HopConfig, metric: Metric, tasks: float, most_actions: int
    ) -> Outcome:
        """Run it, and sum up."""
        costs, place = self._costs, self.place
        self._search = FollowedSearch(config, self._follower, self._admit, costs)
        overheads = Overheads(
            self._hop,
            lambda first: self._part * costs.waits(first),
            lambda worker: self._start + (costs.later.mean if worker else 0.0),
            self._exchange,
        )
        workers = [(worker,) for worker in range(place.workers)]
        devices = None
        if not place.resources.computes_in_place:
            devices = self._devices(fluid=True)
            first = self._first_flow()
            if first is not None:
                each = first.spec.graph.microbatches * len(first.spec.shards)
                devices = replace(devices, fluid=tasks * each > most_actions)
        simulation = Simulation(
            self._search,
            workers,
            lambda kind, trial, partition: self._flow(kind, trial, partition).seconds,
            overheads=overheads,
            metric=metric,
            devices=devices,
        )
        timeline = simulation.run()
        return self._outcome(timeline)

    def _first_flow(self) -> Flow | None:
        """Return the first task, by which the number of actions is estimated."""
        for event in self._follower.begin():
            if isinstance(event, ev.TrialProposed):
                found = self._admit(event)
                if not isinstance(found, str):
                    return self._flow_of("train", found, 0)
        return None

    def _devices(self, fluid: bool) -> SimulatedDevices:
        resources = self.place.resources
        return SimulatedDevices(
            (resources.device_memory,) * resources.devices,
            resources.most_residents,
            self._visit,
            resources.queued_memory,
            self._costs.rates,
            PICKS[resources.pick],
            fluid,
        )

    def _visit(self, kind: TaskKind, trial: int, partition: int, number: int) -> VisitSpec:
        return replace(self._flow(kind, trial, partition).spec, visit=number)

    def _flow(self, kind: Kind, trial: int, partition: int) -> Flow:
        return self._flow_of(kind, self._search.trials[trial], partition)

    def _flow_of(self, kind: Kind, trial: PlannedTrial, partition: int) -> Flow:
        rows = self.place.rows(kind, partition)
        key = kind, trial.structure, trial.spec.plan, rows
        if key not in self._flows:
            pace = self._costs.pace_of(trial.structure, kind)
            self._flows[key] = Flow(trial.visit(kind, rows, self.place.resources, pace))
        return self._flows[key]

    def _hop(self, trial: int, first: bool) -> ev.Hop:
        planned = self._search.trials[trial]
        saved = 0 if first else planned.frozen
        moved = planned.spec.nbytes - saved
        return ev.Hop(moved, saved, self._part * self._costs.rates.hop_seconds(moved))

    def _exchange(self, trial: int, partitions: Sequence[int]) -> float:
        """Return what a sub-epoch spends on gradients, step by step of its longest partition."""
        graphs = [self._flow("train", trial, each).spec.graph for each in partitions]
        return max(each.windows for each in graphs) * self._exchanged(trial, partitions).seconds

    def _exchanged(self, trial: int, partitions: Sequence[int]) -> Exchange:
        nbytes, count = self._search.trials[trial].gradients, len(partitions)
        step = max(self._flow("train", trial, each).grain for each in partitions)
        return Exchange(count, nbytes, step, self._costs.rates.exchange_seconds(nbytes, count))

    # ------------------------------------------------------------------ what it took

    def _outcome(self, timeline: SimulatedTimeline) -> Outcome:
        place, trials = self.place, self._search.trials
        start, work = self._start, 0.0
        by_trial: defaultdict[int, float] = defaultdict(float)
        by_worker: defaultdict[int, float] = defaultdict(float)
        tasks: dict[tuple[int, str], ins.StartSubEpoch | ins.Evaluate] = {}
        exchanges: dict[int, Exchange] = {}
        evaluated: defaultdict[tuple[int, int], float] = defaultdict(float)
        for event, told in timeline.records:
            for each in told:
                if isinstance(each, ins.StartSubEpoch | ins.Evaluate):
                    tasks[each.attempt, each.incarnation] = each
            if not isinstance(event, ev.SubEpochDone | ev.EvaluationDone):
                continue
            task = tasks[event.attempt, event.incarnation]
            seconds, partition = event.work_seconds, task.partition
            work += seconds
            by_worker[partition] += seconds
            if isinstance(task, ins.StartSubEpoch):
                at_once = self._flow("train", task.trial, partition).spec.devices
                if task.rank == 0:
                    by_trial[task.trial] += seconds / at_once
                if task.replicas:
                    found = self._exchanged(task.trial, task.partitions)
                    known = exchanges.setdefault(task.trial, found)
                    exchanges[task.trial] = max(known, found, key=lambda each: each.replicas)
            else:
                key = task.trial, task.epoch
                evaluated[key] = max(evaluated[key], seconds)
        for (trial, _), seconds in evaluated.items():
            by_trial[trial] += seconds
        devices = place.resources.devices
        fullest = max(by_worker.values(), default=0.0) / devices
        bound = start + max(fullest, max(by_trial.values(), default=0.0))
        lasted = max(timeline.makespan - start, 1e-12)
        peaks = timeline.tiers.peak
        device_peak = max((p for place, p in peaks.items() if place != HOST), default=0)
        if place.resources.computes_in_place:
            device_peak = max((flow.spec.whole_need for flow in self._flows.values()), default=0)
        scale = self._part**2
        return Outcome(
            timeline.makespan,
            start,
            bound,
            work / (lasted * place.devices),
            timeline.hopped * scale,
            timeline.tiers.copied * self._part,
            timeline.tiers.disk * self._part,
            device_peak,
            peaks.get(HOST, 0),
            self._part,
            timeline,
            trials,
            self._search.refused,
            exchanges,
        )
