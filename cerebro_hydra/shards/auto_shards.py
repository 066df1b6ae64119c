"""Chooses the fewest shards that fit a device (``shards="auto"``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.auto_cut import auto_cut
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut_choice import CutChoice, CutPoints, choose_groups, choose_whole
from cerebro_hydra.shards.cut_spec import CutSpec, module_of
from cerebro_hydra.shards.task_profiler import TaskProfiler
from cerebro_hydra.shards.trial_profile import TrialProfile


def choose_to_fit(
    recipe: Recipe,
    points: CutPoints,
    profiler: TaskProfiler,
    profiled: Callable[[CutSpec], TrialProfile],
    least: int = 1,
) -> tuple[CutChoice, list[float]]:
    """Return the choice, and the seconds between all places where the model can be cut.

    Every unit is measured once, the cut is computed from that, and is measured itself before it is
    chosen. Where a unit is too large for that, no device has room for the next shard beside the
    present one. Without a budget, and where activations are kept, the model stays whole.

    Args:
        least: how many shards there are to be, if the model has so many units.

    Raises:
        ConfigurationError: a unit does not fit a device.
    """
    whole, budget = choose_whole(points), profiler.budget
    if budget is None or recipe.recompute is False or not points.allowed:
        return whole, []
    finest = profiled(points.spec(points.allowed))
    if finest.tasks is None or finest.tasks.recompute is None:
        return whole, []
    units = finest.training(0, recipe.accumulate, recipe.accumulate, recompute=True).shards
    seconds = [unit.forward + unit.backward for unit in units]
    names = [module_of(unit) for unit in (*points.units[:1], *points.allowed)]

    def fitting(buffers: int) -> CutChoice:
        shards = min(least, len(units))
        while True:
            groups = auto_cut(
                names, units, budget,
                by_modules=points.mode == "modules", buffers=buffers, least=shards,
            )  # fmt: skip
            choice = choose_groups(points, seconds, groups)
            if profiler.fits(recipe, profiled(choice.spec), buffers):
                return choice
            shards = len(groups) + 1

    with suppress(ConfigurationError):
        return fitting(buffers=2), seconds
    return fitting(buffers=1), seconds
