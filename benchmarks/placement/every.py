"""Yields every plan, where there are few, and the plain one, which a worker follows without any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice, permutations, product

from benchmarks.placement.plan import JointPlan, TrialPlacement, UncutTrial, planned_visit
from cerebro_hydra.plan.queues.pick import PICKS
from cerebro_hydra.plan.schedules.registry import FLUSHED, is_pipelined
from cerebro_hydra.plan.sizing.bill import WorkerMemory
from cerebro_hydra.plan.sizing.cuts import auto_cut


def plain_plan(trials: Sequence[UncutTrial], memory: WorkerMemory) -> JointPlan:
    """Return what a worker does without a plan: each trial on whichever device is free.

    A trial has one shard where a device holds that, else the fewest that fit, whose activations are
    computed again.

    Raises:
        ConfigurationError: a unit of a trial does not fit a device.
    """
    placements = tuple(plain_placement(n, trial, memory) for n, trial in enumerate(trials))
    return JointPlan(placements, (*range(len(trials)),), memory.residents)


def plain_placement(number: int, trial: UncutTrial, memory: WorkerMemory) -> TrialPlacement:
    """Return how a trial trains without a plan.

    Raises:
        ConfigurationError: a unit does not fit a device.
    """
    budget = min((each for each in memory.devices if each is not None), default=None)
    whole = TrialPlacement()
    if trial.kept and (budget is None or planned_visit(number, trial, whole).device_need <= budget):
        return whole
    recompute = bool(trial.recomputed)
    units = trial.units(recompute)
    names = [f"trial {number}, unit {k}" for k in range(len(units))]
    parts = auto_cut(names, units, budget, by_modules=not trial.moves)
    return TrialPlacement(tuple(part.start for part in parts[1:]), recompute)


def are_few(trials: Sequence[UncutTrial], memory: WorkerMemory, limit: int) -> bool:
    """Return whether trials have at most so many placements together."""
    count = 1
    for trial in trials:
        count *= sum(1 for _ in islice(_placements(trial, len(memory.devices)), limit + 1))
        if count > limit:
            return False
    return True


def every_plan(trials: Sequence[UncutTrial], memory: WorkerMemory) -> Iterator[JointPlan]:
    """Yield every plan in which all trials are resident in their order.

    Of those that alike devices make equal it yields one.
    """
    places = [[*_placements(trial, len(memory.devices))] for trial in trials]
    numbers = (*range(len(trials)),)
    for placements in product(*places):
        named = [device for each in placements for device in each.devices]
        if _is_first_of_alike(named, memory.devices):
            for pick in PICKS:
                yield JointPlan(placements, numbers, len(trials), pick)


def _placements(trial: UncutTrial, devices: int) -> Iterator[TrialPlacement]:
    units = trial.graph.shards
    for shards, recompute in product(range(1, units + 1), (False, True)):
        if not trial.units(recompute):
            continue
        for cuts in combinations(range(1, units), shards - 1):
            for places in ((), *((device,) for device in range(devices))):
                yield TrialPlacement(cuts, recompute, "sequential", places)
            for schedule in filter(is_pipelined, FLUSHED) if trial.moves else ():
                for count in range(2, min(devices, shards) + 1):
                    for places in permutations(range(devices), count):
                        yield TrialPlacement(cuts, recompute, schedule, places)


def _is_first_of_alike(named: Sequence[int], budgets: Sequence[int | None]) -> bool:
    """Return whether devices of the same bytes are first named in their order."""
    by_budget: dict[int | None, list[int]] = {}
    for device in dict.fromkeys(named):
        by_budget.setdefault(budgets[device], []).append(device)
    return all(
        mine == [k for k, each in enumerate(budgets) if each == budget][: len(mine)]
        for budget, mine in by_budget.items()
    )
