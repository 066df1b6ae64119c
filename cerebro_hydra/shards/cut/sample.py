"""A sample is one batch as a model's forward takes it, to trace and try the model with."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from cerebro_hydra.recipe import ForwardCall, RandomKey, Recipe

Example = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""The features and targets of one batch, as a reader gives them."""

_ANY_KEY = RandomKey(0, 0, 0)


@dataclass(frozen=True)
class Sample:
    """Holds the inputs of one forward.

    Args:
        inputs: tensors with rows first.
        call: turns the inputs into the arguments of forward.
        autocast: the recipe's autocast.
        compiles: whether its blocks run compiled, which takes other times.
        precision: the recipe's context for a forward.
        dynamic_shapes: whether other batches may differ in more than rows, because the recipe
            collates.
        settings: the numbers and texts that the model's code may name outside of it; graphs have
            them as constants.
    """

    inputs: tuple[Tensor, ...]
    call: ForwardCall
    autocast: str | None
    compiles: bool
    precision: Callable[[], AbstractContextManager[Any]]
    dynamic_shapes: bool
    settings: Hashable = ()

    @classmethod
    def of(cls, recipe: Recipe, example: Example, settings: Hashable = ()) -> Sample:
        """Return a training batch as the recipe's model takes it."""
        features, targets = recipe.collated(*copy_example(example), _ANY_KEY)
        return cls(
            recipe.inputs(features, targets),
            recipe.call,
            recipe.autocast,
            recipe.compile,
            recipe.precision,
            recipe.collate is not None,
            settings,
        )

    def of_rows(self, rows: int) -> Self:
        """Return a sample with this number of rows, made of this one's."""
        return replace(self, inputs=_of_rows(self.inputs, rows))


def example_of_rows(example: Example, rows: int) -> Example:
    """Return a batch of at least this number of rows, those of an example over and over again."""
    features, targets = example
    have = len((targets or features)[0])
    if rows <= have:
        return example
    return _of_rows(features, rows), _of_rows(targets, rows)


def _of_rows(tensors: tuple[Tensor, ...], rows: int) -> tuple[Tensor, ...]:
    return tuple(x[torch.arange(rows) % len(x)] if x.dim() else x for x in tensors)


def copy_example(example: Example) -> Example:
    """Copy a batch, because a model may write into it and admission uses it more than once."""
    features, targets = example
    return tuple(t.clone() for t in features), tuple(t.clone() for t in targets)
