"""Passes the columns of a batch to a model's forward, and tells what of its output predicts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.func import functional_call

from cerebro_hydra.errors import ConfigurationError, kind_of

# A cache of keys and values serves generation only; in training it is output that nobody reads.
_SWITCHED_OFF = ("use_cache",)


class HasColumns(Protocol):
    """Describes an object that knows the columns of a run, such as its document."""

    @property
    def feature_columns(self) -> tuple[str, ...]: ...
    @property
    def label_columns(self) -> tuple[str, ...]: ...
    @property
    def sample_weight_column(self) -> str | None: ...


@dataclass(frozen=True)
class Columns:
    """Holds the column names of a batch; its targets are the labels, then the sample weight."""

    features: tuple[str, ...]
    labels: tuple[str, ...]
    weight: str | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """Return what a batch has beside its features: labels, then the sample weight."""
        return self.labels if self.weight is None else (*self.labels, self.weight)

    @classmethod
    def of(cls, document: HasColumns) -> Columns:
        """Take the columns that a run's document names."""
        return cls(document.feature_columns, document.label_columns, document.sample_weight_column)


@dataclass(frozen=True)
class ForwardCall:
    """Turns tensors into the arguments of a forward.

    Args:
        names: the keyword of each tensor, in order; None passes them by position.
        constants: further keywords and their plain values.
        by_position: how many tensors with names are passed by position all the same, from the
            first, where hooks look for them.
    """

    names: tuple[str, ...] | None = None
    constants: tuple[tuple[str, Any], ...] = ()
    by_position: int = 0

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return positional and keyword arguments."""
        if self.names is None:
            return tuple(tensors), dict(self.constants)
        # Without labels, as at inference, the last names stay unused.
        first = self.by_position
        named = zip(self.names[first:], tensors[first:], strict=False)
        return tuple(tensors[:first]), dict(named) | dict(self.constants)

    def __call__(self, model: Any, tensors: Sequence[Tensor]) -> Any:
        """Run a forward."""
        args, kwargs = self.arguments(tensors)
        return model(*args, **kwargs)

    def evaluate(self, model: nn.Module, tensors: Sequence[Tensor], scratch: dict[str, Any]) -> Any:
        """Run a forward that writes into copies of buffers, so that evaluation changes no trial.

        Args:
            scratch: the copies so far, at first empty; one for each partition.
        """
        if not scratch:
            scratch |= {name: buffer.clone() for name, buffer in model.named_buffers()}
        args, kwargs = self.arguments(tensors)
        return functional_call(model, scratch, args, kwargs)

    @classmethod
    def of(cls, model: nn.Module, columns: Columns | None, takes_labels: bool) -> ForwardCall:
        """Pass columns by name if forward has an argument for every feature, else by position.

        Raises:
            ConfigurationError: the model is to compute its loss, and a column has no argument.
        """
        parameters = inspect.signature(model.forward).parameters
        constants = tuple((name, False) for name in _SWITCHED_OFF if name in parameters)
        if columns is None:
            return cls(None, constants)
        named = [
            name
            for name, p in parameters.items()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        first = next(iter(parameters.values()), None)
        takes_first = first is not None and first.kind is first.POSITIONAL_OR_KEYWORD
        by_position = int(takes_first and named[:1] == [*columns.features[:1]])
        kinds = {p.kind for p in parameters.values()}
        takes_others = inspect.Parameter.VAR_KEYWORD in kinds
        if not takes_labels:
            # What position has no place for goes into **kwargs.
            too_many = len(columns.features) > sum(
                p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values()
            )
            others = takes_others and too_many and inspect.Parameter.VAR_POSITIONAL not in kinds
            if others or all(name in named for name in columns.features):
                return cls(columns.features, constants, by_position)
            for place, name in enumerate(columns.features):
                if name in named and named.index(name) != place:
                    raise ConfigurationError(
                        f"feature columns {list(columns.features)} go to {type(model).__name__}."
                        f"forward by position, as not all have its names {named}, but {name!r} is "
                        "another argument there: rename the columns, or list them in its order"
                    )
            if too_many and not takes_others and inspect.Parameter.VAR_POSITIONAL not in kinds:
                raise ConfigurationError(
                    f"there are {len(columns.features)} feature columns "
                    f"{list(columns.features)}, and {type(model).__name__}.forward takes {named}; "
                    "assemble the columns into one with Spark ML's VectorAssembler, or give "
                    "forward an argument for each"
                )
            return cls(None, constants)
        labels = columns.labels
        if len(labels) == 1 and labels[0] not in named and "labels" in named:
            labels = ("labels",)
        for name in (*columns.features, *labels):
            if name not in named and not takes_others:
                raise ConfigurationError(
                    f"loss is 'model', so columns are passed to {type(model).__name__}.forward by "
                    f"name, and it has no argument {name!r}; its arguments are {named}: rename "
                    "the column"
                )
        return cls((*columns.features, *labels), constants, by_position)


def predictions(outputs: Any, labels: Sequence[str] = ()) -> list[Tensor]:
    """Return the tensors of a forward's output that are predictions.

    A tensor is its own prediction, tuples and lists give all of theirs; of a mapping or dataclass
    (as models of `transformers` return) it is those named like the label columns, if all are there,
    else `logits` if there is one, else every tensor but the loss.

    Raises:
        ConfigurationError: there is no tensor in it.
    """
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, list | tuple):
        found = [each for each in outputs if isinstance(each, Tensor)]
    else:
        fields = dict(outputs) if isinstance(outputs, Mapping) else dict(vars(outputs))
        if labels and all(isinstance(fields.get(name), Tensor) for name in labels):
            return [fields[name] for name in labels]
        if isinstance(fields.get("logits"), Tensor):
            return [fields["logits"]]
        found = [v for k, v in fields.items() if k != "loss" and isinstance(v, Tensor)]
    if not found:
        raise ConfigurationError(f"forward gave {kind_of(outputs)} without any tensor")
    return found
