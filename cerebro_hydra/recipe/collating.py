"""Applies the user's collate to batches, with random numbers seeded by key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.columns import Columns
from cerebro_hydra.recipe.randomness import RandomKey

Collate = Callable[[dict[str, Tensor], bool], dict[str, Tensor]]

_UNIT = "collate"  # names of unit calls have an "@", so none is called this


class Collator:
    """Applies `collate(batch, training)` to batches of named columns.

    Raises:
        ConfigurationError: collate is no function.
    """

    def __init__(self, collate: Any) -> None:
        if collate is not None and not callable(collate):
            raise ConfigurationError(
                f"collate is {collate!r}; give a function (batch, training) -> batch, where a "
                "batch is a dict of column to tensor"
            )
        self._collate: Collate | None = collate
        self._columns: Columns | None = None

    def bind(self, columns: Columns) -> None:
        """Take the names of the columns."""
        self._columns = columns

    def apply(
        self, features: tuple[Tensor, ...], targets: tuple[Tensor, ...], key: RandomKey | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return a batch's features and targets after collating; without a key, for evaluation."""
        if self._collate is None:
            return features, targets
        names = self._names(len(features), len(targets))
        if key is not None:
            key.reseed(_UNIT)
        given = dict(zip(names, (*features, *targets), strict=True))
        rows = len(next(iter(given.values())))
        made = self._collate(given, key is not None)
        tensors = [_column(made, name, rows) for name in names]
        return tuple(tensors[: len(features)]), tuple(tensors[len(features) :])

    def _names(self, features: int, targets: int) -> list[str]:
        if self._columns is not None:
            return [*self._columns.features, *self._columns.targets[:targets]]
        return [*(f"feature_{i}" for i in range(features)), *(f"label_{i}" for i in range(targets))]


def _column(made: Any, name: str, rows: int) -> Tensor:
    if not isinstance(made, dict) or not isinstance(made.get(name), Tensor):
        what = sorted(made) if isinstance(made, dict) else type(made).__name__
        raise ConfigurationError(
            f"collate returned {what} without a tensor for column {name!r}; return the batch, a "
            "dict with every column that it was given"
        )
    tensor: Tensor = made[name]
    if tensor.dim() == 0 or len(tensor) != rows:
        raise ConfigurationError(
            f"collate returned column {name!r} of shape {tuple(tensor.shape)} for a batch of "
            f"{rows} rows; rows come first, and none may be added or lost"
        )
    return tensor.contiguous()  # a slice has strides of its own, which a graph may not take
