"""Defines the metrics, which are measured on validation rows beside the loss."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.objective import is_likelihood

Direction = Literal["min", "max"]

SumOverRows = tuple[float, int]
"""A mean that can still be merged: a sum of values, mostly one per row, and how many there are."""


class BatchSum(NamedTuple):
    """Holds the sum of what a metric finds in a batch, a scalar, and over how many values.

    A sum of whole numbers is exact in float64, as long as it is below 2^53, so hits give the same
    share in batches and partitions of every size; a mean in float32 is rounded in each batch.
    """

    total: Tensor
    values: int


MetricFunction = Callable[..., Tensor | BatchSum]


@runtime_checkable
class StateMetric(Protocol):
    """Computes a metric that no average over rows gives, such as an F1 score.

    A state is plain JSON: numbers, strings, lists, dicts. Each worker updates a state over the
    batches of a partition; the states of all partitions are merged, in partition order.
    """

    def start(self) -> Any:
        """Return the state before any batch."""

    def update(self, state: Any, outputs: Any, *labels: Tensor) -> Any:
        """Return the state after one more batch."""

    def merge(self, state: Any, other: Any) -> Any:
        """Merge two states into one."""

    def compute(self, state: Any) -> float:
        """Return the value that a state stands for."""


@dataclass(frozen=True)
class Metric:
    """Defines a measured value with its name and direction.

    `function(outputs, *labels)` gives the mean of a batch, to be averaged over rows, or a
    `BatchSum`; a `StateMetric` keeps a state instead. With `label`, it sees that prediction and
    label alone.
    """

    name: str
    function: MetricFunction | StateMetric
    direction: Direction
    label: int | None = None


def _accuracy(outputs: Tensor, labels: Tensor, loss: Any = None) -> BatchSum:
    """Count hits; `loss` tells what an output and a label stand for."""
    if isinstance(loss, nn.CrossEntropyLoss) and labels.shape == outputs.shape:
        hits = outputs.argmax(min(1, outputs.dim() - 1)) == labels.argmax(min(1, labels.dim() - 1))
    elif outputs.dim() == labels.dim() or outputs.shape[-1] == 1:
        least = 0.5 if is_likelihood(loss) else 0.0
        hits = (outputs.reshape(labels.shape) > least).to(labels.dtype) == labels
    else:
        class_dim = 1 if outputs.dim() == labels.dim() + 1 and labels.dim() > 1 else -1
        if outputs.shape[:-1] == labels.shape:
            class_dim = -1
        hits = outputs.argmax(class_dim) == labels
    return BatchSum(hits.sum(), hits.numel())


def _mse(outputs: Tensor, labels: Tensor) -> BatchSum:
    errors = _errors(outputs, labels)
    return BatchSum((errors * errors).sum(), errors.numel())


def _mae(outputs: Tensor, labels: Tensor) -> BatchSum:
    errors = _errors(outputs, labels)
    return BatchSum(errors.sum(), errors.numel())


def _errors(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.abs(outputs.reshape(labels.shape) - labels).to(torch.float64)


KNOWN_METRICS = {
    "accuracy": Metric("accuracy", _accuracy, "max", label=0),
    "acc": Metric("acc", _accuracy, "max", label=0),
    "mse": Metric("mse", _mse, "min", label=0),
    "mae": Metric("mae", _mae, "min", label=0),
}

Given = Sequence[str] | Mapping[str, tuple[MetricFunction | StateMetric, str]]


def resolve_metrics(
    metrics: Given, labels: Sequence[str] = ("label",), losses: Sequence[Any] = ()
) -> tuple[Metric, ...]:
    """Turn names, or `{name: (function, "min"|"max")}`, into metrics with a declared direction.

    Args:
        labels: names of the label columns; with several, a known metric is measured on each, as
            `<label>_<metric>`.
        losses: one per label column, which say what an output stands for; none if unknown.

    Raises:
        ConfigurationError: a metric is unknown, has no direction, or is called "loss".
    """
    if isinstance(metrics, str):
        metrics = [metrics]
    resolved: list[Metric] = []
    if isinstance(metrics, Mapping):
        for name, value in metrics.items():
            resolved.append(_given(name, value))
    elif not isinstance(metrics, Sequence):
        raise ConfigurationError(
            f"metrics is {metrics!r}; give a list of names, or {{name: (function, 'min'|'max')}}"
        )
    else:
        for name in metrics:
            if name not in KNOWN_METRICS:
                raise ConfigurationError(
                    f"unknown metric {name!r}; known are {sorted(KNOWN_METRICS)}, "
                    "any other is given as {name: (function, 'min'|'max')}"
                )
            known = KNOWN_METRICS[name]
            for number, label in enumerate(labels):
                named = name if len(labels) == 1 else f"{label}_{name}"
                function = known.function
                if function is _accuracy and len(losses) == len(labels):
                    function = partial(_accuracy, loss=losses[number])
                resolved.append(replace(known, name=named, label=number, function=function))
    for metric in resolved:
        if metric.name == "loss":
            raise ConfigurationError("'loss' is always measured; leave it out of metrics")
    return tuple(resolved)


def _given(name: str, value: Any) -> Metric:
    if not (isinstance(value, tuple) and len(value) == 2) or not (
        callable(value[0]) or isinstance(value[0], StateMetric)
    ):
        raise ConfigurationError(
            f"metric {name!r} is {value!r}; give (function, 'min') or (function, 'max'); in place "
            "of a function, an object with start, update, merge and compute may stand"
        )
    function, direction = value
    if direction not in ("min", "max"):
        raise ConfigurationError(
            f"metric {name!r} has direction {direction!r}; it is 'min' or 'max'"
        )
    return Metric(name, function, cast(Direction, direction))


def as_made(function: MetricFunction | StateMetric, model: nn.Module) -> Any:
    """Return a copy of a metric that is an object, or the metric itself if it is a function.

    An object whose copies alone are called keeps nothing of a batch, so what it measures does not
    depend on where and in which order batches were evaluated.

    Args:
        model: a copy refers to its modules and parameters, and to parameters of its own, as the
            object does.
    """
    if isinstance(function, FunctionType | BuiltinFunctionType | partial | type):
        return function
    own = function.parameters() if isinstance(function, nn.Module) else ()
    shared = itertools.chain(model.modules(), model.parameters(), own)
    try:
        return copy.deepcopy(function, {id(each): each for each in shared})
    except Exception:  # such as a lock; then evaluations look at what it holds, as of a function
        return function


def merge_metrics(
    metrics: Sequence[Metric], states: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Merge the states of all partitions, in their order, and compute each `StateMetric`."""
    values: dict[str, float] = {}
    for metric in metrics:
        function = cast(StateMetric, metric.function)
        merged = states[0][metric.name]
        for state in states[1:]:
            merged = function.merge(merged, state[metric.name])
        values[metric.name] = float(function.compute(merged))
    return values


def as_json(name: str, state: Any) -> Any:
    """Return a metric's state as it arrives on the driver.

    Raises:
        ConfigurationError: it is no plain JSON.
    """
    try:
        _check_keys(state)
        return json.loads(json.dumps(state))
    except TypeError as error:
        raise ConfigurationError(
            f"metric {name!r} keeps a state that is no plain JSON ({error}); keep numbers, "
            "strings, lists and dicts by string: .item() and .tolist() turn tensors into them"
        ) from error


def _check_keys(state: Any) -> None:
    """Refuse keys that JSON would turn into strings, where the next update would miss them."""
    if isinstance(state, dict):
        for key in state:
            if not isinstance(key, str):
                raise TypeError(f"{key!r} is a key of a dict, and keys are strings")
    if isinstance(state, dict | list | tuple):
        for each in state.values() if isinstance(state, dict) else state:
            _check_keys(each)
