"""Defines what a metric is, which is measured on validation rows beside the loss."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_float
from dataclasses import dataclass
from functools import partial
from math import isfinite
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from cerebro_hydra.copies import deep_copy
from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.foreign_text import named_error_text
from cerebro_hydra.recipe.batch.loss_arguments import LossArguments

Direction = Literal["min", "max"]

SumOverRows = tuple[float, int]
"""A mean that can still be merged: a sum of values, mostly one per row, and how many there are."""


class BatchSum(NamedTuple):
    """Holds the sum of what a metric finds in a batch, a scalar, and over how many values.

    A sum of whole numbers is exact in float64, as long as it is below 2^53, so hits give the same
    share in batches and partitions of every size; a mean in float32 is rounded in each batch.
    """

    total: Tensor
    values: int | Tensor

    def over(self) -> SumOverRows:
        """Return both as numbers, by one read of a device."""
        if isinstance(self.values, int):
            return float(self.total), self.values
        total, values = torch.stack((self.total, self.values)).tolist()
        return float(total), int(values)


MetricFunction = Callable[..., Tensor | BatchSum]


def sum_over_rows(mean: Tensor | float, rows: int) -> SumOverRows:
    """Return the sum that a batch's mean stands for.

    A share of hits that a function gives is rounded to the precision of its tensor. It is taken for
    the whole number of hits that it is nearest to, within one unit of that precision: else two
    epochs of as many hits, in other batches, would differ by what was rounded. So is a percentage,
    `100 * accuracy`, and a share of errors, `1 - accuracy` or `100 - 100 * accuracy`, if it is just
    what that gives for some hits.
    """
    value = float(mean)
    total = value * rows
    if not isfinite(total):
        return total, rows
    whole = round(total)
    is_share = abs(total - whole) <= _rounding(mean, value) * abs(total)
    if is_share or _is_share(value, whole, rows) or _is_share(-value, -whole, rows):
        return float(whole), rows
    return total, rows


def _rounding(mean: Tensor | float, value: float) -> float:
    """Return what a number may be off by its own type, as a part of it."""
    if isinstance(mean, Tensor) and mean.dtype.is_floating_point:
        return torch.finfo(mean.dtype).eps
    # What `item()` gives of a float32 has no more digits than that has.
    is_single = _in_float32(value) == value
    return torch.finfo(torch.float32 if is_single else torch.float64).eps


def _is_share(value: float, whole: int, rows: int) -> bool:
    """Return whether a value is just what some hits give, or 1, or 100, less that for errors."""
    for scale in (1, 100):
        count = whole // scale
        if whole != count * scale or not 0 <= count < rows:
            continue
        hits, others = _shares(count, rows, scale), _shares(rows - count, rows, scale)
        errors = {scale - each for each in others}
        left = {1 - each for each in _shares(rows - count, rows, 1)}
        errors |= {scale * each for each in left | {_in_float32(each) for each in left}}
        if value in hits | errors | {_in_float32(each) for each in errors}:
            return True
    return False


def _shares(hits: int, rows: int, scale: int) -> set[float]:
    """Return what a share of hits may be as it is computed, in float64, in float32, or in both."""
    exact = hits / rows
    single = {_in_float32(exact), _in_float32(hits * _in_float32(1 / rows))}
    of_single = {scale * each for each in single}
    by_parts = {hits * (scale / rows), _in_float32(hits * _in_float32(scale / rows))}
    of_exact = {scale * exact, scale * hits / rows}
    return of_exact | of_single | {_in_float32(each) for each in of_single} | by_parts


def _in_float32(value: float) -> float:
    return c_float(value).value


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
        return deep_copy(function, {id(each): each for each in shared})
    except Exception:  # such as a lock; then evaluations look at what it holds, as of a function
        return function


def merge_metrics(
    metrics: Sequence[Metric], states: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Merge the states of all partitions, in their order, and compute each `StateMetric`.

    Raises:
        NoSingleNumber: a metric computes something else than one number.
        ConfigurationError: a metric failed; the message names it.
    """
    values: dict[str, float] = {}
    for metric in metrics:
        function = cast(StateMetric, metric.function)
        merged = states[0][metric.name]
        with told_with_metric(metric, "to merge its states"):
            for state in states[1:]:
                merged = function.merge(merged, state[metric.name])
        with told_with_metric(metric, "to compute its value"):
            values[metric.name] = _one_number(metric.name, function.compute(merged))
    return values


class NoSingleNumber(ConfigurationError):
    """A metric computes something of another kind than one number, such as a vector."""


def _one_number(name: str, value: Any) -> float:
    """Return what a metric computes as a number; of a complex one NumPy would take a part."""
    is_complex = value.is_complex() if isinstance(value, Tensor) else np.iscomplexobj(value)
    try:
        if not is_complex:
            return float(value)
    except OverflowError:  # an integer of 400 digits
        raise
    except Exception:
        pass
    form = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else ""
    said = f"metric {name!r} computes {_kind(value)}{form}; its compute must give one number"
    # Rows of one class alone may have no value, and more rows have one.
    raise ConfigurationError(said) if value is None else NoSingleNumber(said)


def _kind(value: Any) -> str:
    return "None" if value is None else kind_of(value)


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


def metric_arguments(metric: Metric, labels: Sequence[str], others: Sequence[str]) -> LossArguments:
    """Return what a metric is given beside the outputs.

    Raises:
        ConfigurationError: it takes what there is not.
    """
    if metric.label is not None:
        return LossArguments()
    keeps = isinstance(metric.function, StateMetric)
    called: Any = cast(Any, metric.function).update if keeps else metric.function
    told = f"metric {metric.name!r}"
    return LossArguments.find(called, told, labels, others, before=2 if keeps else 1)


@contextmanager
def told_with_metric(metric: Metric, what: str = "on a batch") -> Iterator[None]:
    """Turn what a metric raises into an error that names it, and at what it failed.

    Raises:
        ConfigurationError: the metric failed.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"metric {metric.name!r} failed {what}: {named_error_text(error)}"
        ) from error
