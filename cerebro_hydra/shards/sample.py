"""One batch as a model's forward takes it: what a model is traced and tried with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cerebro_hydra.recipe import Call, RandomKey, Recipe

Example = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Features and targets of one batch, as the data gives them."""

_ANY_KEY = RandomKey(0, 0, 0)


@dataclass(frozen=True)
class Sample:
    """Inputs of one forward.

    Args:
        inputs: tensors, rows first.
        call: how they become arguments.
        autocast: the recipe's.
        precision: the context that it runs in.
        free_shapes: whether other batches may differ in more than rows: the recipe collates.
    """

    inputs: tuple[Tensor, ...]
    call: Call
    autocast: str | None
    precision: Callable[[], AbstractContextManager[Any]]
    free_shapes: bool

    @classmethod
    def of(cls, recipe: Recipe, example: Example) -> Sample:
        """A batch of training as the recipe's model takes it."""
        features, targets = recipe.collated(*fresh(example), _ANY_KEY)
        return cls(
            recipe.inputs(features, targets),
            recipe.call,
            recipe.autocast,
            recipe.precision,
            recipe.collate is not None,
        )


def fresh(example: Example) -> Example:
    """Copies: a model may write into its batch, and admission uses a batch more than once."""
    features, targets = example
    return tuple(t.clone() for t in features), tuple(t.clone() for t in targets)
