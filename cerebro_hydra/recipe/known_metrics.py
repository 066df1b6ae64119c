"""The metrics that have a name, and how what a user gives becomes metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.metrics import BatchSum, Direction, Metric, MetricFunction, StateMetric
from cerebro_hydra.recipe.objective import is_likelihood


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
