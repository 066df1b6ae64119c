"""Measures the times of each shard's tasks, on the machine that asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.graph_tasks import GraphPass, GraphTasks
from cerebro_hydra.shards.layout import TrialLayout, initial_segments, on_host
from cerebro_hydra.shards.microbatch import Microbatch
from cerebro_hydra.shards.optimizer_clone import clone_optimizer
from cerebro_hydra.shards.sample import Example, copy_example
from cerebro_hydra.shards.state import ShardState

_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_SECONDS = 2, 6, 0.2


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
    tasks = GraphTasks(cut_model, states, recipe.precision, keep=True)
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
