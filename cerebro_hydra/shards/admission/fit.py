"""Chooses shards for a device that has little memory, by measured bytes and times of tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.human_units import bytes_text, needed_text
from cerebro_hydra.plan.queues.visit_spec import ShardSpec
from cerebro_hydra.plan.sizing.cuts import auto_cut, cut_by_bytes
from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.shards.admission.task_profiler import TaskProfiler
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.cut.choice import (
    CutChoice,
    CutPoints,
    choose_by_time,
    choose_groups,
    choose_whole,
)
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.cut.sample import Example, copy_example
from cerebro_hydra.shards.cut.spec import CutSpec, module_of
from cerebro_hydra.shards.engine.graph_tasks import GraphPass, GraphTasks
from cerebro_hydra.shards.engine.layout import TrialLayout, initial_segments, on_host
from cerebro_hydra.shards.engine.microbatch import Microbatch
from cerebro_hydra.shards.engine.optimizer import clone_optimizer
from cerebro_hydra.shards.engine.state import ShardState

_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_SECONDS = 2, 6, 0.2


def choose_to_fit(
    recipe: Recipe,
    points: CutPoints,
    profiler: TaskProfiler,
    profiled: Callable[[CutSpec], TrialProfile],
    times: Callable[[CutPoints], Sequence[float]],
    least: int = 1,
) -> tuple[CutChoice, Sequence[float]]:
    """Return the choice, and the seconds between all places where the model can be cut.

    Every unit is measured once, the cut is computed from that, and is measured itself before it is
    chosen. Where a unit is too large for that, no device has room for the next shard beside the
    present one. Without a budget, where activations are kept, and where devices that compute at
    once have room for it, there are as few shards as may be, of equal times.

    Args:
        times: returns the seconds between all places.
        least: how many shards there are to be, if the model has so many units.

    Raises:
        ConfigurationError: a unit does not fit a device, or no cut does.
    """
    budget = profiler.budget

    def fewest() -> tuple[CutChoice, Sequence[float]]:
        if least == 1 or not points.allowed:
            return choose_whole(points), []
        seconds = times(points)
        return choose_by_time(points, seconds, least), seconds

    if budget is None or recipe.recompute is False or not points.allowed:
        return fewest()
    if least > 1:  # for devices that compute at once, so that times decide where memory allows it
        by_time, seconds = fewest()
        if profiler.fits(recipe, profiled(by_time.spec), buffers=2):
            return by_time, seconds
    units = _units(recipe, points, profiled)
    if units is None:
        return fewest()
    seconds = [unit.forward + unit.backward for unit in units]
    names = [module_of(unit) for unit in (*points.units[:1], *points.allowed)]

    def fitting(buffers: int) -> CutChoice:
        shards, needs = min(least, len(units)), dict[int, int]()
        while shards <= len(units):
            groups = auto_cut(
                names, units, budget,
                by_modules=points.mode == "modules", buffers=buffers, least=shards,
            )  # fmt: skip
            choice = choose_groups(points, seconds, groups)
            need = profiler.need(recipe, profiled(choice.spec), buffers)
            if need <= budget:
                return choice
            needs[need], shards = len(groups), len(groups) + 1
        need, shards = min(needs.items())
        raise ConfigurationError(
            f"cut into {shards} shards the model needs {needed_text(need)} of a device, other cuts "
            f"need no less, and device_memory is {bytes_text(budget)}; give the devices at least "
            f"{needed_text(need)}, use smaller microbatches, or make the modules smaller"
        )

    with suppress(ConfigurationError):
        return fitting(buffers=2), seconds
    return fitting(buffers=1), seconds


def choose_number_to_fit(
    recipe: Recipe,
    points: CutPoints,
    profiler: TaskProfiler,
    profiled: Callable[[CutSpec], TrialProfile],
    by_time: CutChoice,
) -> CutChoice:
    """Return a choice of as many shards as one that was made by time.

    It is that one if a device holds two of its shards beside the activations of one; else its
    largest shard is as small as can be.
    """
    if profiler.budget is None or recipe.recompute is False or not by_time.spec.at:
        return by_time
    if profiler.fits(recipe, profiled(by_time.spec), buffers=2):
        return by_time
    units = _units(recipe, points, profiled)
    if units is None:
        return by_time
    seconds = [unit.forward + unit.backward for unit in units]
    groups = cut_by_bytes(units, len(by_time.spec.at) + 1)
    return choose_groups(points, seconds, groups, by_time.note)


def _units(
    recipe: Recipe, points: CutPoints, profiled: Callable[[CutSpec], TrialProfile]
) -> Sequence[ShardSpec] | None:
    """Return what a device needs for each unit that could be a shard; None if nobody knows."""
    finest = profiled(points.spec(points.allowed))
    if finest.tasks is None or finest.tasks.recompute is None:
        return None
    visit = finest.training(0, recipe.accumulate, recipe.accumulate, recompute=True)
    return visit.device_shards


def measure_shards(
    recipe: Recipe, cut_model: CutModel, layout: TrialLayout, example: Example
) -> list[float]:
    """Return the seconds of a training step in each shard, the fastest of some rounds."""
    segments = list(map(on_host, initial_segments(recipe, layout)))
    states = {k: ShardState(shard, segments[k]) for k, shard in enumerate(layout.shards)}
    originals = {name: id(p) for name, p in recipe.model.named_parameters()}
    optimizers = [
        clone_optimizer(recipe.optimizer, {originals[n]: p for n, p in states[k].params.items()})
        for k in states
    ]
    tasks = GraphTasks(cut_model, states, recipe.precision, True, lambda loss: loss)
    fastest = [float("inf")] * len(states)
    begun = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and time.perf_counter() - begun > _ENOUGH_SECONDS:
            break
        key = RandomKey(0, number, 0)
        batch = GraphPass(Microbatch.collated(recipe, copy_example(example), key, weight=None))
        spent = [_seconds(partial(tasks.forward, k, batch)) for k in states]
        for k in reversed(states):
            spent[k] += _seconds(partial(tasks.backward, k, batch))
        for k, state in states.items():
            spent[k] += _seconds(optimizers[k].step)
            for parameter in state.params.values():
                parameter.grad = None
        fastest = [min(pair) for pair in zip(fastest, spent, strict=True)]
    return fastest


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
