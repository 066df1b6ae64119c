"""Refuses training that changes what hops with no shard: attributes, and other random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.recipe.randomness import unit_hooks
from cerebro_hydra.shards.attribute_reader import extends, read_attributes
from cerebro_hydra.shards.attribute_values import AttributeValues
from cerebro_hydra.shards.bound_model import bound_model
from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.shards.microbatch import Microbatch
from cerebro_hydra.shards.parameter_values import ParameterValues
from cerebro_hydra.shards.sample import Example, copy_example

_Attributes = dict[str, Any]


@contextmanager
def refused_random_numbers() -> Iterator[None]:
    """Refuse what draws from the generators of Python or NumPy, even if it has no effect yet.

    Raises:
        ConfigurationError: one of them has moved.
    """
    before = _global_generators()
    yield
    for name, state in _global_generators().items():
        if state != before[name]:
            raise ConfigurationError(
                f"forward, loss, metrics or collate draw random numbers from {name}, which don't "
                "restart at a shard's key; draw them from torch, as by torch.rand(())"
            )


def _global_generators() -> dict[str, Any]:
    numpy = np.random.get_state(legacy=False)["state"]
    plain = {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in numpy.items()}
    return {"Python's random": random.getstate(), "numpy.random": plain}


@contextmanager
def refused_writes(model: nn.Module) -> Iterator[None]:
    """Refuse an evaluation that changes parameters.

    Raises:
        ConfigurationError: it has changed one.
    """
    before = {name: tensor_digest(p) for name, p in model.named_parameters()}
    yield
    for name, parameter in model.named_parameters():
        if tensor_digest(parameter) != before[name]:
            raise ConfigurationError(
                f"the forward writes to parameter {name!r} in evaluation, which must leave the "
                "state as it is; write to it `if self.training` only, or use another tensor, such "
                "as weight * mask"
            )


def check_averaged(recipe: Recipe, written: Sequence[str]) -> None:
    """Refuse a moving average of frozen parameters to which the forward writes.

    Raises:
        ConfigurationError: the recipe keeps averages, and there is such a parameter.
    """
    frozen = {name for name, _ in recipe.model.named_parameters()}
    if recipe.ema is not None and (names := [name for name in written if name in frozen]):
        raise ConfigurationError(
            f"ema is {recipe.ema!r}, and the forward writes to frozen parameter {names[0]!r}, "
            "which it would average too; leave ema out, or make that parameter a buffer"
        )


class OptimizerCounts:
    """Watches the integers that an optimizer keeps as its own attributes.

    A clone of the optimizer steps on each shard after each hop, and begins with the factory's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before = self._read()

    def check(self) -> None:
        """Refuse an optimizer that counts in an attribute.

        Raises:
            ConfigurationError: steps have changed one.
        """
        for name, value in self._read().items():
            if value != self._before.get(name):
                kind = type(self._optimizer).__name__
                raise ConfigurationError(
                    f"each step changes attribute {name!r} of optimizer {kind}, which is no part "
                    f"of the state that hops; keep it in every param group, as group[{name!r}]"
                )

    def _read(self) -> dict[str, int]:
        return {name: v for name, v in vars(self._optimizer).items() if type(v) is int}


class SideEffects:
    """Watches the attributes of a model in training, and what the functions of its recipe hold.

    What a step leaves there is gone after a hop. That is no harm if each forward sets it anew, so
    it must be the same after a step of a model with a history and of one without.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._buffers = {name for name, _ in recipe.model.named_buffers()}
        self._seen: list[_Attributes] = []

    def after_step(self) -> None:
        """Look at the attributes after one of the first two steps, both on the same example."""
        if len(self._seen) < 2:
            self._seen.append(self._read())

    def check(
        self,
        trained: Mapping[str, Tensor],
        history: AttributeValues,
        example: Example,
        key: RandomKey,
    ) -> None:
        """Take a step with a history and one without, if these steps left different values.

        Args:
            trained: the state to take them from, named as a checkpoint names it.
            history: the attributes that training has left; the model has its own.
            example: the batch of the first two steps.

        Raises:
            ConfigurationError: an attribute depends on the history; the message names it.
        """
        first, second = self._seen
        changed = [where for where in second if first.get(where) != second[where]]
        if not changed:
            return
        fresh = AttributeValues(self._recipe.model)
        # Twice with a history, because what comes back every other step is the same once.
        states = [self._after_pass(trained, a, example, key) for a in (fresh, history, history)]
        for where in changed:
            without, *with_history = (state.get(where) for state in states)
            if not all(extends(state, without) for state in with_history):
                raise ConfigurationError(
                    f"each step changes {where}, which is no part of the state that hops; "
                    "register it as a buffer, or let every forward set it anew"
                )

    def _after_pass(
        self,
        trained: Mapping[str, Tensor],
        attributes: AttributeValues,
        example: Example,
        key: RandomKey,
    ) -> _Attributes:
        """Return the attributes after a forward and a backward, which change nothing else."""
        recipe, model = self._recipe, self._recipe.model
        with (
            ParameterValues(model, lambda name, _: trained[f"param:{name}"].clone()).in_use(),
            attributes.in_use(),
            bound_model(model.train()) as bound,
            unit_hooks(model, key.reseed),
        ):
            buffers = model.named_buffers()
            bound.lend_buffers({name: trained[f"buffer:{name}"].clone() for name, _ in buffers})
            batch = Microbatch.collated(recipe, copy_example(example), key, weight=None)
            with recipe.precision():
                loss = batch.loss_of(recipe.call(model, batch.inputs))
            loss.backward()  # type: ignore[no-untyped-call]
            return self._read()

    def _read(self) -> _Attributes:
        functions = {"loss": self._recipe.losses, "collate": self._recipe.collate}
        return read_attributes(self._recipe.model, functions, self._buffers)
