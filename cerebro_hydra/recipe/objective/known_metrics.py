"""The metrics that have a name, and how what a user gives becomes metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.recipe.objective.likelihoods import (
    CalibrationError,
    Scale,
    class_dim,
    ignored_label,
)
from cerebro_hydra.recipe.objective.metrics import (
    BatchSum,
    Direction,
    Metric,
    MetricFunction,
    StateMetric,
)
from cerebro_hydra.recipe.objective.objective import (
    indexes_classes,
    is_cross_entropy,
    is_likelihood,
)
from cerebro_hydra.recipe.objective.step_module import logged_value
from cerebro_hydra.recipe.objective.torch_metrics import (
    NAMED,
    TorchMetric,
    checked_torch_metric,
    is_of_torchmetrics,
    named_metric,
)


def _accuracy(outputs: Tensor, labels: Tensor, loss: Any = None) -> BatchSum:
    """Count hits; `loss` tells what an output and a label stand for, and which label is none."""
    if is_cross_entropy(loss) and labels.shape == outputs.shape:
        hits = outputs.argmax(min(1, outputs.dim() - 1)) == labels.argmax(min(1, labels.dim() - 1))
        return BatchSum(hits.sum(), hits.numel())
    if (dimension := class_dim(outputs, labels, loss)) is None:
        least = 0.5 if is_likelihood(loss) else 0.0
        hits = (outputs.reshape(labels.shape) > least).to(labels.dtype) == labels
    else:
        hits = outputs.argmax(dimension) == labels
    counted = labels != ignored_label(loss)
    return BatchSum((hits & counted).sum(), counted.sum())


def _looks_like_likelihoods(outputs: Tensor, labels: Tensor, loss: Any = None) -> BatchSum:
    one_number = outputs.is_floating_point() and class_dim(outputs, labels, loss) is None
    within = one_number and ((outputs >= 0) & (outputs <= 1)).all()
    return BatchSum(torch.as_tensor(within, dtype=torch.float64), 1)


def _has_other_labels(outputs: Tensor, labels: Tensor, loss: Any = None) -> BatchSum:
    one_number = class_dim(outputs, labels, loss) is None
    met = (labels == 0) | (labels == 1) | (labels == ignored_label(loss))
    return BatchSum(torch.as_tensor(one_number and not met.all(), dtype=torch.float64), 1)


_LIKELIHOODS = (
    "metric {!r} takes an output above 0 for class 1, and all outputs of a batch are between 0 "
    "and 1; if they are likelihoods, take BCELoss or binary_cross_entropy itself as the loss, or "
    "give {{name: (function, 'max')}} in place of the metric"
)
_OTHER_LABELS = (
    "metric {!r} takes an output that is one number for class 0 or 1, and a batch has labels that "
    "are neither, which are never hit; give labels of 0 and 1, a metric for numbers such as 'mae', "
    "or {{name: (function, 'max')}}"
)


def doubts_of_accuracy(metric: Metric) -> list[tuple[Metric, str]]:
    """Return metrics that are 1 where accuracy may not be what it seems, with what to say then.

    None of them for any other metric.
    """
    function = metric.function
    if not isinstance(function, partial) or function.func is not _accuracy:
        return []
    loss = function.keywords["loss"]
    doubts = []
    if not is_cross_entropy(loss) and not indexes_classes(loss):  # else it refuses such labels
        doubts.append((_has_other_labels, _OTHER_LABELS))
    if Scale.of(loss) is None:  # else the loss tells what an output is
        doubts.append((_looks_like_likelihoods, _LIKELIHOODS))
    return [
        (replace(metric, function=partial(looks, loss=loss)), told.format(metric.name))
        for looks, told in doubts
    ]


def _mse(outputs: Tensor, labels: Tensor) -> BatchSum:
    errors = _errors(outputs, labels)
    return BatchSum((errors * errors).sum(), errors.numel())


def _mae(outputs: Tensor, labels: Tensor) -> BatchSum:
    errors = _errors(outputs, labels)
    return BatchSum(errors.sum(), errors.numel())


def _errors(outputs: Tensor, labels: Tensor) -> Tensor:
    if labels.dtype == torch.bool:  # torch subtracts no booleans
        labels = labels.to(outputs.dtype)
    return torch.abs(outputs.reshape(labels.shape) - labels).to(torch.float64)


Make = Callable[[Any], MetricFunction | StateMetric]

KNOWN_METRICS: Mapping[str, tuple[Make, Direction]] = {
    "accuracy": (lambda loss: partial(_accuracy, loss=loss), "max"),
    "acc": (lambda loss: partial(_accuracy, loss=loss), "max"),
    "calibration_error": (CalibrationError.of, "min"),
    "mae": (lambda loss: _mae, "min"),
    "mse": (lambda loss: _mse, "min"),
    **{name: (partial(named_metric, name), direction) for name, (_, direction) in NAMED.items()},
}
"""Makes the metric that a name stands for, given the loss, and whether it shall rise or fall."""

Given = Sequence[str] | Mapping[str, Any]


def resolve_metrics(
    metrics: Given, labels: Sequence[str] = ("label",), losses: Sequence[Any] = ()
) -> tuple[Metric, ...]:
    """Turn what a user gives into metrics with a declared direction.

    Args:
        metrics: names; or a metric of torchmetrics, which mostly has a direction, or (function,
            "min"|"max"), by name.
        labels: names of the label columns; with several, a known metric and one of torchmetrics is
            measured on each, as `<label>_<metric>`.
        losses: one per label column, which say what an output stands for; one for all of them, of
            which that is known by one column alone; none if unknown.

    Raises:
        ConfigurationError: a metric is unknown, has no direction, or is called "loss".
    """
    if isinstance(metrics, str):
        metrics = [metrics]
    if not isinstance(metrics, Mapping | Sequence):
        raise ConfigurationError(
            f"metrics is {metrics!r}; give a list of names, or {{name: (function, 'min'|'max')}}"
        )
    resolved: list[Metric] = []
    for name in metrics:
        given = metrics[name] if isinstance(metrics, Mapping) else name
        function, direction, of_one = _given(name, given)
        if not of_one:
            resolved.append(Metric(name, function, direction))
            continue
        if not labels:
            raise ConfigurationError(
                f"metric {name!r} compares outputs with labels, and there are none; give "
                "{name: (function, 'min'|'max')} with a function(outputs), whose further "
                "parameters are named like feature columns"
            )
        for number, label in enumerate(labels):
            named = name if len(labels) == 1 else f"{label}_{name}"
            loss = losses[number] if len(losses) == len(labels) else None
            resolved.append(Metric(named, function(loss), direction, label=number))
    for metric in resolved:
        if metric.name == "loss":
            raise ConfigurationError("'loss' is always measured; leave it out of metrics")
    return tuple(resolved)


def _given(name: str, value: Any) -> tuple[Any, Direction, bool]:
    """Return a metric, its direction, and whether it sees one output and label.

    One that does is a function of the loss, which makes it.
    """
    if isinstance(value, str):
        if value in ("min", "max"):
            return logged_value(name), cast(Direction, value), False
        if value not in KNOWN_METRICS:
            raise ConfigurationError(
                f"unknown metric {value!r}; known are {sorted(KNOWN_METRICS)}, any other is given "
                "as {name: (function, 'min'|'max')}"
            )
        return *KNOWN_METRICS[value], True
    given, direction = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    function, of_one = given, is_of_torchmetrics(given)
    if of_one:
        function, own = partial(TorchMetric.of, given), checked_torch_metric(name, given)
        direction = direction if isinstance(value, tuple) else own
        if direction is None:
            kind = type(given).__name__
            raise ConfigurationError(
                f"metric {name!r} is {kind_of(given)}, whose higher_is_better is None; say what is "
                f"better: {{{name!r}: ({kind}(...), 'max')}}, or 'min'"
            )
    elif not isinstance(value, tuple) or not (callable(given) or isinstance(given, StateMetric)):
        raise ConfigurationError(
            f"metric {name!r} is {value!r}; give (function, 'min') or (function, 'max'), or a "
            "metric of torchmetrics; in place of a function, an object with start, update, merge "
            "and compute may stand"
        )
    if direction not in ("min", "max"):
        raise ConfigurationError(
            f"metric {name!r} has direction {direction!r}; it is 'min' or 'max'"
        )
    return function, cast(Direction, direction), of_one
