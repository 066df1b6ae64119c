"""A joint plan says how each trial of a worker trains, among the choices that change no bit.

They are the cut, the devices of shards, the synchronous schedule, whether activations are computed
again, how many visits a worker holds, and in which order. Which tier a shard is in follows from
these by the ledger (``plan/queues/ledger.py``), so no plan names it. How many microbatches a step
has, how many rows those, and how exactly numbers are stored is the user's, and no plan's.

`planned_visits` makes the visits of a plan, and `simulated_plan` lets the queues of a worker do
them on a virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.queues.events import VisitAdded, VisitEnded
from cerebro_hydra.plan.queues.pick import DEFAULT_PICK, PICKS
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.registry import FLUSHED, is_pipelined
from cerebro_hydra.plan.simulate.worker import WorkerSimulation, WorkerTimeline
from cerebro_hydra.plan.sizing.bill import WorkerMemory


@dataclass(frozen=True, slots=True)
class UncutTrial:
    """Describes a trial before it is cut.

    Args:
        graph: of its sub-epoch, as if every unit were a shard.
        recomputed: its units in their order, each as if it were a shard whose activations are
            computed again; none where that is impossible.
        kept: the same for activations that are kept.
        moves: whether a microbatch may go on on another device, as where a model is cut by export.

    Raises:
        ValueError: there are no units, or not as many as the graph has.
    """

    graph: TaskGraph
    recomputed: tuple[ShardSpec, ...] = ()
    kept: tuple[ShardSpec, ...] = ()
    moves: bool = True

    def __post_init__(self) -> None:
        """Refuse units that are not those of the graph."""
        given = {len(units) for units in (self.recomputed, self.kept) if units}
        if given != {self.graph.shards}:
            raise ValueError(f"a trial has {given or 'no'} units, and {self.graph.shards} in its "
                             "graph; describe each unit once")  # fmt: skip

    def units(self, recompute: bool) -> tuple[ShardSpec, ...]:
        """Return the units by one of the ways to train, none where that is impossible."""
        return self.recomputed if recompute else self.kept


@dataclass(frozen=True, slots=True)
class TrialPlacement:
    """Says how one trial trains.

    Args:
        cuts: the unit at which each shard but the first begins.
        recompute: whether activations are computed again.
        schedule: a synchronous one.
        devices: the device of each list of the schedule. None is named where a sequential trial
            takes whichever is free.
    """

    cuts: tuple[int, ...] = ()
    recompute: bool = False
    schedule: str = "sequential"
    devices: tuple[int, ...] = ()

    def shards(self, units: int) -> list[range]:
        """Return the units of each shard."""
        return [range(begin, end) for begin, end in pairwise((0, *self.cuts, units))]


@dataclass(frozen=True, slots=True)
class JointPlan:
    """Says how all trials of a worker train.

    Args:
        placements: of each trial.
        order: the trials as the worker is given them.
        residents: how many it holds at once.
        pick: how a free device chooses among them, a name of `PICKS`.
    """

    placements: tuple[TrialPlacement, ...]
    order: tuple[int, ...]
    residents: int
    pick: str = DEFAULT_PICK


def planned_visit(number: int, trial: UncutTrial, placement: TrialPlacement) -> VisitSpec:
    """Return the visit that a placement makes of a trial.

    Raises:
        ConfigurationError: the trial can't be placed so; the message names the trial and says why.
    """
    if reason := _unfit(trial, placement):
        raise ConfigurationError(f"trial {number} can't train by its plan: {reason}")
    parts = placement.shards(trial.graph.shards)
    shards = tuple(_joined(trial, placement, part, last=part is parts[-1]) for part in parts)
    shard_of = {unit: k for k, part in enumerate(parts) for unit in part}
    tied = (tuple(dict.fromkeys(shard_of[unit] for unit in group)) for group in trial.graph.tied)
    graph = replace(
        trial.graph,
        shards=len(parts),
        tied=tuple(group for group in tied if len(group) > 1),
        stage_sizes=(),
    )
    return VisitSpec(
        number,
        graph,
        shards,
        by_modules=not trial.moves,
        recompute=placement.recompute,
        schedule=placement.schedule,
        devices=max(1, len(placement.devices)),
        places=placement.devices,
    )


def planned_visits(plan: JointPlan, trials: Sequence[UncutTrial]) -> tuple[VisitSpec, ...]:
    """Return the visit of each trial, which has the trial's number.

    Raises:
        ConfigurationError: a trial can't be placed as the plan says.
    """
    pairs = zip(trials, plan.placements, strict=True)
    return tuple(planned_visit(number, *pair) for number, pair in enumerate(pairs))


def check_plan(plan: JointPlan, trials: Sequence[UncutTrial], memory: WorkerMemory) -> None:
    """Check that a worker can do what a plan says.

    Raises:
        ConfigurationError: it can't; the message says why.
    """
    if len(plan.placements) != len(trials) or sorted(plan.order) != [*range(len(trials))]:
        raise ConfigurationError(
            f"the plan places {len(plan.placements)} trials in the order {plan.order}, and there "
            f"are {len(trials)}; place each once"
        )
    if plan.residents < 1 or plan.pick not in PICKS:
        raise ConfigurationError(
            f"the plan has residents={plan.residents} and pick={plan.pick!r}; take at least one "
            f"resident, and one of {list(PICKS)}"
        )
    for visit in planned_visits(plan, trials):
        _check_visit(visit, memory)


def _check_visit(visit: VisitSpec, memory: WorkerMemory) -> None:
    budgets = [math.inf if each is None else each for each in memory.devices]
    host = math.inf if memory.host is None else memory.host
    if reason := visit.lacking(budgets, host):
        raise ConfigurationError(f"trial {visit.visit} can't train by its plan: {reason}")


def simulated_plan(
    plan: JointPlan, trials: Sequence[UncutTrial], memory: WorkerMemory
) -> WorkerTimeline:
    """Return what the queues of a worker do by a plan, each trial for one sub-epoch.

    Raises:
        ConfigurationError: the worker can't do what the plan says.
    """
    check_plan(plan, trials, memory)
    visits = planned_visits(plan, trials)
    ordered = [visits[number] for number in plan.order]
    return simulated_visits(ordered, memory, plan.residents, plan.pick)


def simulated_visits(
    visits: Sequence[VisitSpec], memory: WorkerMemory, residents: int, pick: str
) -> WorkerTimeline:
    """Return what the queues of a worker do with visits, of which it holds so many at once.

    Raises:
        ConfigurationError: the worker can't hold one of them.
    """
    shards = {visit.visit: visit.shards for visit in visits}

    def seconds(action: Action) -> float:
        return memory.rates.seconds(action, shards[action.trial][action.shard])

    simulation = WorkerSimulation([], memory.devices, memory.host, PICKS[pick], seconds)
    for visit in visits:
        _check_visit(visit, memory)
    waiting = [VisitAdded(visit) for visit in reversed(visits)]
    for _ in range(min(residents, len(waiting))):
        simulation.add(0.0, waiting.pop())
    while (now := simulation.next_moment) < math.inf:
        ended = sum(isinstance(each, VisitEnded) for each in simulation.step())
        for _ in range(min(ended, len(waiting))):
            simulation.add(now, waiting.pop())
    return simulation.run()


def seconds_of(timeline: WorkerTimeline) -> float:
    """Return when everything was done and written back."""
    return max(each.end for each in timeline.done)


def _unfit(trial: UncutTrial, placement: TrialPlacement) -> str:
    """Return why a trial can't train so; "" if it can."""
    units = trial.graph.shards
    if any(not a < b for a, b in pairwise((0, *placement.cuts, units))):
        return f"cuts are {placement.cuts}; they rise from 1 to at most {units - 1}"
    if not trial.units(placement.recompute):
        way = "computed again" if placement.recompute else "kept"
        return f"its activations can't be {way}"
    if placement.schedule not in FLUSHED:
        return f"its schedule is {placement.schedule!r}; those that change no bit are {[*FLUSHED]}"
    lists = min(max(1, len(placement.devices)), len(placement.cuts) + 1)
    if not is_pipelined(placement.schedule):
        lists = 1
    elif not trial.moves:
        return f"its microbatches stay on one device, which {placement.schedule!r} does not"
    if len({*placement.devices}) not in (0, lists) or len(placement.devices) not in (0, lists):
        return f"devices are {placement.devices}; name each of {lists} once"
    return ""


def _joined(trial: UncutTrial, placement: TrialPlacement, part: range, last: bool) -> ShardSpec:
    """Return the shard that units make together.

    Where the last shard's backward follows its forward at once, nothing is computed again.
    """
    units = [trial.units(placement.recompute)[k] for k in part]
    follows = last and trial.kept and placement.schedule in ("sequential", "1f1b")
    backward = trial.kept if placement.recompute and follows else trial.units(placement.recompute)
    return ShardSpec.joined(units, not trial.moves, sum(backward[k].backward for k in part))
