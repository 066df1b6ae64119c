"""Finds out whether a factory makes the same trial each time that it is called.

Each worker builds a trial by itself, so that only parameters, buffers and optimizer state are those
that another worker has left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.recipe.attributes import kept_attributes
from cerebro_hydra.shards.admission.effects.after_steps import ExampleBatch, plain_trainer
from cerebro_hydra.shards.admission.effects.held_state import OF_SCHEDULER
from cerebro_hydra.shards.admission.effects.readings import Reading, changed, name_of
from cerebro_hydra.shards.admission.effects.value_texts import tensor_text
from cerebro_hydra.shards.admission.trial_code import read_trial
from cerebro_hydra.shards.cut.sample import Example
from cerebro_hydra.shards.engine.differences import contents
from cerebro_hydra.storage.trial_code import TrialCode, is_setting

_MOST_TOLD = 3
_MOST_BUILDS = 4
_OF_SCHEDULE = f"a value{OF_SCHEDULER}"


def read_build(recipe: Recipe) -> tuple[Reading, TrialCode] | None:
    """Return what a trial that was just built has beside what hops, and its code.

    It is None if its objects can't be read.
    """
    if (read := read_trial(recipe)) is None:
        return None
    reader, code = read
    rebuilt = {f"buffer {name!r}": tensor_text(each) for name, each in _rebuilt(recipe.model)}
    return {**reader.found, **code.parts, **rebuilt}, code


def check_same_builds(
    before: Reading, now: Reading, build: Callable[[], Recipe], example: Example, trial_seed: int
) -> None:
    """Check that two trials that were built alike train alike.

    Values may differ in them, such as a time stamp, if they change no bit of two steps and of an
    evaluation, which begin with the same parameters and buffers. Settings may not, nor what an LR
    schedule has, which may act later.

    Args:
        before: the reading of one of them.
        now: the reading of the other.
        build: builds one more.

    Raises:
        ConfigurationError: they don't; the message names what differs.
    """
    if not (names := changed(before, now)):
        return
    settings = {name for name in map(name_of, names) if is_setting(name) or name == _OF_SCHEDULE}
    if not settings and _train_alike(*_unlike(names, build), example, trial_seed):
        return
    differing = sorted(settings or set(map(name_of, names)))
    more = f" and {len(differing) - _MOST_TOLD} more" if len(differing) > _MOST_TOLD else ""
    raise ConfigurationError(
        "estimator_gen_fn makes another trial each time that it is called, and each worker calls "
        f"it: {', '.join(differing[:_MOST_TOLD])}{more} differ, and so does what a step computes. "
        "Draw random numbers from the global generators of torch, NumPy or Python, which are "
        "seeded before it is called; seed a generator of your own, as np.random.default_rng(0); "
        "or keep what was drawn in a persistent buffer, which hops"
    )


def _unlike(names: Collection[str], build: Callable[[], Recipe]) -> tuple[Recipe, Recipe]:
    """Return two builds in which something of these names differs, if a few builds have it."""
    first, second = build(), build()
    before = read_build(first)
    for _ in range(_MOST_BUILDS):
        now = read_build(second)
        if before is None or now is None or changed(before[0], now[0]) & set(names):
            break
        second = build()
    return first, second


def _rebuilt(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that each worker has from its own build."""
    for place, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            if (buffer := module._buffers.get(name)) is not None:
                yield f"{place}.{name}" if place else name, buffer


def _train_alike(first: Recipe, second: Recipe, example: Example, trial_seed: int) -> bool:
    """Return whether two builds, which may share modules, give the same from equal states on."""
    if not _have_equal_state(first.model, second.model):
        return False
    kept = {id(t): (t, t.clone()) for each in (first, second) for t in _tensors(each.model)}
    results = []
    for each in (first, second):
        with kept_attributes(first.model), kept_attributes(second.model):
            results.append(_trained(each, example, trial_seed))
        with torch.no_grad():
            for tensor, before in kept.values():
                tensor.copy_(before)
        each.model.zero_grad()
    return None in results or results[0] == results[1]


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return (each.detach() for each in itertools.chain(model.parameters(), model.buffers()))


def _have_equal_state(first: nn.Module, second: nn.Module) -> bool:
    """Give a model the parameters and buffers of another one; return whether it has such."""
    rebuilt = {name for name, _ in _rebuilt(first)}
    there = dict(first.named_parameters()) | dict(first.named_buffers())
    own = dict(second.named_parameters()) | dict(second.named_buffers())
    if there.keys() != own.keys() or any(there[n].shape != own[n].shape for n in there):
        return False
    with torch.no_grad():
        for name in own.keys() - rebuilt:
            own[name].copy_(there[name])
    return True


def _trained(recipe: Recipe, example: Example, trial_seed: int) -> object:
    """Return what a step and an evaluation give; None where they fail, which is told elsewhere."""
    window = [ExampleBatch.of(example)]
    try:
        recipe.take_form(example)
        trainer = plain_trainer(recipe, trial_seed)
        losses = [trainer.train([window]) for _ in range(2)]
        RandomKey(trial_seed, 0, 0).reseed("evaluation")
        return repr((losses, trainer.evaluate(window))), contents(trainer.tensors())
    except Exception:
        return None
