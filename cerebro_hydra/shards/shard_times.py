"""Measures the times of each shard's tasks, on the machine that asks."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.layout import TrialLayout, initial_segments
from cerebro_hydra.shards.optimizer_clone import clone_optimizer
from cerebro_hydra.shards.sample import Example, Sample, copy_example
from cerebro_hydra.shards.state import ShardState
from cerebro_hydra.shards.tasks import Microbatch, ShardTasks

_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_SECONDS = 2, 6, 0.2


def measure_shards(
    recipe: Recipe, cut_model: CutModel, layout: TrialLayout, example: Example
) -> list[float]:
    """Return the seconds of a training step in each shard, the fastest of some rounds."""
    segments = initial_segments(recipe, layout)
    states = {k: ShardState(shard, **segments[k]) for k, shard in enumerate(layout.shards)}
    originals = {name: id(p) for name, p in recipe.model.named_parameters()}
    optimizers = [
        clone_optimizer(recipe.optimizer, {originals[n]: p for n, p in states[k].params.items()})
        for k in states
    ]
    tasks = ShardTasks(cut_model, states, recipe.precision, keep=True)
    fastest = [float("inf")] * len(states)
    begun = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and time.perf_counter() - begun > _ENOUGH_SECONDS:
            break
        key = RandomKey(0, number, 0)
        batch = Microbatch.collated(recipe, copy_example(example), key, weight=None)
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


def measure_layers(recipe: Recipe, starts: Sequence[str], sample: Sample) -> list[float]:
    """Return the seconds of forward between a `Sequential`'s starts, the fastest of some rounds.

    The layers run in one forward, because a layer may write into the output of the one before.
    """
    model = copy.deepcopy(recipe.model).train()
    heads = {unit.split("@")[0].split(".")[0] for unit in starts}
    fastest: list[float] = []
    marks: list[float] = []
    for name, child in model.named_children():
        if name in heads:
            child.register_forward_pre_hook(lambda *_: marks.append(time.perf_counter()))
    for _ in range(_LEAST_ROUNDS):
        marks[:] = [time.perf_counter()]
        with recipe.precision():
            sample.call(model, [tensor.clone() for tensor in sample.inputs])
        marks.append(time.perf_counter())
        spent = [after - before for before, after in itertools.pairwise(marks)]
        fastest = [min(pair) for pair in zip(fastest or spent, spent, strict=True)]
    return fastest
