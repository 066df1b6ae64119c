"""Applies the user's collate to batches, and tells what of the result is whose.

Its random numbers are seeded by key.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.recipe.batch.columns import Columns, ForwardCall

_UNIT = "collate"  # names of unit calls have an "@", so none is called this

_LABELS = "labels"  # as models of `transformers` call them, which compute their loss if given some

Collate = Callable[[dict[str, Any], bool], dict[str, Tensor]]

_threads = threading.local()  # of each, whether it runs a collate


@dataclass(frozen=True)
class BatchForm:
    """Says what forward takes of a batch, and what else there is in it.

    Args:
        inputs: what forward takes, in order.
        labels: what the loss takes after the outputs, in order.
        weight: the sample weight, if there is one.
        kept: feature columns that forward doesn't take, for a loss or metric that asks for them.
        by_name: whether forward takes all inputs by their names, because collate has made some.
    """

    inputs: tuple[str, ...]
    labels: tuple[str, ...]
    weight: str | None = None
    kept: tuple[str, ...] = ()
    by_name: bool = False

    @property
    def others(self) -> tuple[str, ...]:
        """Return what a loss or a metric may take by name beside the labels."""
        return (*self.inputs, *self.kept)

    @classmethod
    def given(cls, columns: Columns) -> BatchForm:
        """Return the form of batches as they are stored."""
        return cls(columns.features, columns.labels, columns.weight)

    @classmethod
    def of(
        cls, model: nn.Module, columns: Columns, made: Sequence[str], stored: Sequence[str]
    ) -> BatchForm:
        """Tell the form of a batch by the names that collate gave.

        If none is new, the batch has the form of stored ones. Else forward
        takes what is named like its arguments; what it doesn't take are labels, as are a label
        column and "labels" in any case.

        Args:
            made: the names of what collate returned.
            stored: the names of the columns that it was given.
        """
        if set(made) <= set(stored):  # a column that was lost is missed where it is taken
            return cls.given(columns)
        takes = {
            name
            for name, p in inspect.signature(model.forward).parameters.items()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        own = {*columns.labels, _LABELS}
        inputs = [name for name in made if name in takes and name not in own]
        kept = [name for name in made if name in columns.features and name not in takes]
        used = {*inputs, *kept, columns.weight}
        labels = tuple(name for name in made if name not in used)
        weight = columns.weight if columns.weight in made else None
        if columns.weight in stored and weight is None:
            raise ConfigurationError(
                f"collate returned {list(made)} without the sample weight {columns.weight!r}; "
                "return it with the batch"
            )
        lost = [name for name in columns.labels if name in stored and name not in made]
        if lost and not labels:
            raise ConfigurationError(
                f"collate returned {list(made)} without the label {lost[0]!r} or another one; "
                "return it, or leave it out of label_columns"
            )
        if not inputs:
            raise ConfigurationError(
                f"collate returned {list(made)}, and {type(model).__name__}.forward takes "
                f"{sorted(takes)}; return a dict by the names of its arguments"
            )
        return cls(tuple(inputs), labels, weight, tuple(kept), by_name=True)

    def call(self, model: nn.Module, columns: Columns, takes_labels: bool) -> ForwardCall:
        """Return how forward is called with the inputs, and with the labels if it takes them.

        Raises:
            ConfigurationError: forward doesn't take a column, or has an argument without one.
        """
        found = Columns(self.inputs, self.labels, self.weight) if self.by_name else columns
        call = ForwardCall.of(model, found, takes_labels)
        if not self.by_name:
            return call
        for name, p in inspect.signature(model.forward).parameters.items():
            needed = p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            if needed and name not in (call.names or ()):
                raise ConfigurationError(
                    f"collate returned {list((*self.inputs, *self.labels, *self.kept))}, and "
                    f"{type(model).__name__}.forward has an argument {name!r}; return a tensor for "
                    "it under this name"
                )
        return call


def check_not_in_collate() -> None:
    """Look whether it is a collate that enters a layer of a model which is cut into shards.

    Raises:
        ConfigurationError: it is.
    """
    if getattr(_threads, "collate", False):
        raise ConfigurationError(
            "collate calls the model, whose shards may be elsewhere while a batch is made; compute "
            "in the forward or in the loss what it computes there, such as pseudo labels"
        )


def collated_batch(
    collate: Collate,
    given: dict[str, Tensor | list[bytes] | list[Tensor]],
    reseed: Callable[[str], object] | None,
) -> Mapping[str, Tensor]:
    """Return a batch after `collate`, by name.

    Args:
        given: the columns; one of bytes or images is a list with an entry for each row.
        reseed: restarts the random numbers for what it is given by name; None is for evaluation.

    Raises:
        ConfigurationError: it gave something else than a dict of tensors with rows first.
    """
    first = next(iter(given.values()))
    # Not len() of a tensor, which a traced graph would fix.
    rows = first.shape[0] if isinstance(first, Tensor) else len(first)
    if reseed is not None:
        reseed(_UNIT)
    _threads.collate = True
    try:
        made: Any = collate(given, reseed is not None)
    finally:
        _threads.collate = False
    if not isinstance(made, dict) or not made:
        raise ConfigurationError(
            f"collate returned {kind_of(made)}; return a dict of name to tensor, with the "
            "columns of the batch or what forward takes in their place"
        )
    for name, tensor in made.items():
        if not isinstance(tensor, Tensor):
            raise ConfigurationError(
                f"collate returned {kind_of(tensor)} for {name!r}; return tensors, rows first"
            )
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise ConfigurationError(
                f"collate returned {name!r} of shape {tuple(tensor.shape)} for a batch of {rows} "
                "rows; rows come first, and none may be added or lost: two views of a row are two "
                "tensors, or a dimension behind the rows"
            )
    return made


def column_of(made: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a column of what collate returned.

    Raises:
        ConfigurationError: it is not there.
    """
    if name not in made:
        raise ConfigurationError(
            f"collate returned {sorted(made)} without a tensor for {name!r}; return the columns of "
            "the batch, or else the same names for each batch, in training and in evaluation"
        )
    return made[name].contiguous()  # a slice has strides of its own, which a graph may not take
