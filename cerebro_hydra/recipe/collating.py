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


def collate_batch(
    collate: Collate | None,
    columns: Columns | None,
    features: tuple[Tensor, ...],
    targets: tuple[Tensor, ...],
    key: RandomKey | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return a batch's features and targets after `collate`; without a key, for evaluation."""
    if collate is None:
        return features, targets
    if columns is not None:
        names = [*columns.features, *columns.targets[: len(targets)]]
    else:
        names = [f"feature_{i}" for i in range(len(features))]
        names += [f"label_{i}" for i in range(len(targets))]
    if key is not None:
        key.reseed(_UNIT)
    given = dict(zip(names, (*features, *targets), strict=True))
    rows = next(iter(given.values())).shape[0]  # not len(), which a traced graph would fix
    made = collate(given, key is not None)
    tensors = [_column(made, name, rows) for name in names]
    return tuple(tensors[: len(features)]), tuple(tensors[len(features) :])


def _column(made: Any, name: str, rows: int) -> Tensor:
    if not isinstance(made, dict) or not isinstance(made.get(name), Tensor):
        what = sorted(made) if isinstance(made, dict) else type(made).__name__
        raise ConfigurationError(
            f"collate returned {what} without a tensor for column {name!r}; return the batch, a "
            "dict with every column that it was given"
        )
    tensor: Tensor = made[name]
    if tensor.dim() == 0 or tensor.shape[0] != rows:
        raise ConfigurationError(
            f"collate returned column {name!r} of shape {tuple(tensor.shape)} for a batch of "
            f"{rows} rows; rows come first, and none may be added or lost"
        )
    return tensor.contiguous()  # a slice has strides of its own, which a graph may not take
