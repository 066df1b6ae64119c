"""Measures metrics of torchmetrics: the states of all partitions are merged by their own rules."""

from __future__ import annotations

import base64
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from cerebro_hydra.copies import deep_copy
from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.recipe.objective.doubles import Doubles, widened
from cerebro_hydra.recipe.objective.likelihoods import (
    OfEitherScale,
    Scale,
    as_scores,
    ignored_label,
    likelihoods,
    on_scale_of,
)
from cerebro_hydra.recipe.objective.metrics import Direction, StateMetric

NAMED: Mapping[str, tuple[str, Direction]] = {
    "auroc": ("AUROC", "max"),
    "average_precision": ("AveragePrecision", "max"),
    "cohen_kappa": ("CohenKappa", "max"),
    "explained_variance": ("ExplainedVariance", "max"),
    "f1": ("F1Score", "max"),
    "mape": ("MeanAbsolutePercentageError", "min"),
    "matthews": ("MatthewsCorrCoef", "max"),
    "pearson": ("PearsonCorrCoef", "max"),
    "precision": ("Precision", "max"),
    "r2": ("R2Score", "max"),
    "recall": ("Recall", "max"),
    "rmse": ("MeanSquaredError", "min"),
    "specificity": ("Specificity", "max"),
}
"""The class in torchmetrics that a name stands for, and whether it shall rise or fall."""

_OPTIONS: Mapping[str, dict[str, Any]] = {
    "auroc": {"thresholds": 200},
    "average_precision": {"thresholds": 200},
    "rmse": {"squared": False},
}
_OF_ALL_CLASSES = ("cohen_kappa", "matthews")
_OF_NUMBERS = ("explained_variance", "mape", "pearson", "r2", "rmse")


class NoNumber(ConfigurationError):
    """A metric gives several values, such as one for each class."""


class TorchMetric:
    """Keeps what a metric of torchmetrics has seen as JSON.

    A state has a part for each partition. As torchmetrics does with those of processes, they are
    stacked, in partition order, and reduced by the function that the metric has for each. A metric
    of torchmetrics itself computes in double precision, in which equal counts of other classes are
    equal figures. One whose code is the user's computes in the types that it has, with outputs and
    labels in theirs.

    Args:
        metric: one of torchmetrics, or a function that makes it for a number of classes, of which
            0 stands for scores of 0 or 1.
        loss: says how its outputs are laid out; None if that is unknown.
        scale: what a score of a class is.
    """

    def __init__(self, metric: Any, loss: Any, scale: Scale) -> None:
        self._metric, self._loss, self._scale = metric, loss, scale

    @classmethod
    def of(cls, metric: Any, loss: Any) -> StateMetric:
        """Return the metric for outputs that a loss takes."""
        if _is_of(metric, "classification"):
            return on_scale_of(loss, functools.partial(cls, metric, loss))
        return cls(metric, loss, Scale.LIKELIHOOD)

    def __deepcopy__(self, memo: object) -> TorchMetric:
        return self  # it computes with copies of its metric alone

    def start(self) -> Any:
        """Return the state before any batch."""
        return {"classes": 0, "parts": []}

    def update(self, state: Any, outputs: Any, *labels: Tensor) -> Any:
        """Return the state after one more batch."""
        scores, (target,) = as_scores(outputs), labels
        classes = 0
        if _is_of(self._metric, "classification"):
            scores, target, classes = likelihoods(scores, target, self._loss, self._scale)
            if classes == 2 and self._takes_one_score():
                scores, classes = scores[:, 1], 0
        else:
            if scores.numel() == target.numel():
                scores = scores.reshape(target.shape)
            if target.is_floating_point() or _is_of(self._metric, "regression"):
                target = target.double()
        metric = self._made(classes)
        if state["parts"]:
            _set_states(metric, state["parts"])
        if _is_of_library(metric):
            with Doubles():
                metric.update(widened(scores), widened(target))
        else:
            reals = labels[0] if labels[0].is_floating_point() else outputs
            metric.update(_as(outputs, scores), _as(reals, target))
            if not state["parts"]:
                self._check_states(metric, classes)
        return {"classes": classes, "parts": [_states(metric)]}

    def _check_states(self, metric: Any, classes: int) -> None:
        """Refuse a metric of which something else than its states acts, as they alone are kept.

        Raises:
            ConfigurationError: its states give another value than it gives itself.
        """
        again = self._made(classes)
        _set_states(again, [_states(metric)])
        again._update_count = metric._update_count
        try:
            value, other = metric.compute(), again.compute()
        except Exception:  # such as of rows of one class
            return
        exact = (repr(v.tolist() if isinstance(v, Tensor) else v) for v in (value, other))
        if len(set(exact)) > 1:
            raise ConfigurationError(
                f"{type(metric).__name__} gives {value} of a batch, and {other} of what its states "
                "keep of it; let add_state make whatever its update changes"
            )

    def merge(self, state: Any, other: Any) -> Any:
        """Put the parts of one state behind those of another."""
        classes = max(state["classes"], other["classes"])
        return {"classes": classes, "parts": [*state["parts"], *other["parts"]]}

    def compute(self, state: Any) -> float:
        """Return the value of all partitions at once, NaN without any batch.

        Raises:
            NoNumber: the metric gives something else than one number.
        """
        if not state["parts"]:
            return math.nan
        metric = self._made(state["classes"])
        _set_states(metric, state["parts"])
        metric._update_count = len(state["parts"])  # else it warns that nothing was measured
        with Doubles() if _is_of_library(metric) else nullcontext():
            value = metric.compute()
        if not isinstance(value, Tensor) or value.numel() != 1:
            form = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
            raise NoNumber(
                f"{type(metric).__name__} gives {form}, and a metric is one number; give it an "
                "average over the classes or outputs, such as average='macro'"
            )
        return float(value)

    def _takes_one_score(self) -> bool:
        """Return whether the metric is of two classes, and takes the likelihood of the second."""
        return not is_torchmetric(self._metric) or type(self._metric).__name__.startswith("Binary")

    def _made(self, classes: int) -> Any:
        """Return the metric before any batch, in double precision if it computes in it."""
        made = self._metric if is_torchmetric(self._metric) else self._metric(classes)
        metric = deep_copy(made)
        metric.reset()
        held = {**vars(metric), **metric._buffers} if _is_of_library(metric) else {}
        for name, value in held.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(metric, name, value.double())
        return metric


def _is_of(metric: Any, family: str) -> bool:
    if not is_torchmetric(metric):
        return family == "classification"  # what has to know the number of classes
    kinds = (each.__module__ for each in type(metric).__mro__)
    return any(module.startswith(f"torchmetrics.{family}") for module in kinds)


def is_of_torch_metric(function: Any) -> bool:
    """Tell whether a metric of a recipe measures by one of torchmetrics."""
    own = function.of_logits if isinstance(function, OfEitherScale) else function
    return isinstance(own, TorchMetric)


def is_torchmetric(value: Any) -> bool:
    """Tell whether an object is a metric of torchmetrics, without importing it."""
    package = sys.modules.get("torchmetrics")
    return package is not None and isinstance(value, package.Metric)


def is_of_torchmetrics(value: Any) -> bool:
    """Tell whether a class or an object comes from torchmetrics or is derived from it."""
    kind = value if isinstance(value, type) else type(value)
    return any(each.__module__.partition(".")[0] == "torchmetrics" for each in kind.__mro__)


def named_metric(name: str, loss: Any) -> StateMetric:
    """Return the metric that a name of `NAMED` stands for.

    Raises:
        ConfigurationError: torchmetrics is not installed.
    """
    try:
        import torchmetrics  # seconds, where transformers is installed, which it imports
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"metric {name!r} is computed by torchmetrics, which is not installed; install it, "
            "such as by pip install 'cerebro-hydra[torchmetrics]', on the workers too"
        ) from error
    kind, options = getattr(torchmetrics, NAMED[name][0]), _OPTIONS.get(name, {})
    if name in _OF_NUMBERS:
        return TorchMetric.of(kind(**options), loss)

    def made(classes: int) -> Any:
        task: dict[str, Any] = {"task": "binary"}
        if classes:
            task = {"task": "multiclass", "num_classes": classes}
            if name not in _OF_ALL_CLASSES:
                task["average"] = "macro"
        return kind(**task, **options, ignore_index=ignored_label(loss))

    return TorchMetric.of(made, loss)


def checked_torch_metric(name: str, given: Any) -> Direction | None:
    """Return the direction that a metric of torchmetrics itself has, if it has one.

    Raises:
        ConfigurationError: its states can't be merged from the partitions.
    """
    kind = kind_of(given)
    if not is_torchmetric(given):
        what = f"the class {given.__name__}" if isinstance(given, type) else kind
        raise ConfigurationError(
            f"metric {name!r} is {what}; give one metric of torchmetrics that is made, such as "
            "torchmetrics.F1Score(task='binary'), for each name"
        )
    if any(is_torchmetric(each) for each in given.modules() if each is not given):
        raise ConfigurationError(
            f"metric {name!r} is {kind}, which wraps other metrics; give these by themselves"
        )
    if lists := [state for state, first in given._defaults.items() if isinstance(first, list)]:
        if hasattr(given, "thresholds"):
            instead = "give it thresholds=200, with which it counts"
        elif "CalibrationError" in kind:
            instead = "metrics=['calibration_error'] has the same value from sums"
        else:
            instead = "give an object with start, update, merge and compute whose state is small"
        raise ConfigurationError(
            f"metric {name!r} is {kind} that keeps every row that it sees, in {lists}, and rows "
            f"don't leave their worker; {instead}"
        )
    if given.higher_is_better is None:
        return None
    return "max" if given.higher_is_better else "min"


def _states(metric: Any) -> dict[str, Any]:
    """Return each state of a metric by its bytes, which JSON keeps exactly, NaN too."""
    states = {}
    for name in metric._defaults:
        tensor = getattr(metric, name).detach()
        array = tensor.reshape(-1).contiguous().view(torch.uint8).numpy()
        states[name] = {
            "type": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "bytes": base64.b64encode(array.tobytes()).decode("ascii"),
        }
    return states


def _is_of_library(metric: Any) -> bool:
    """Return whether a metric computes by code of torchmetrics alone."""
    code = (getattr(type(metric), name).__module__ for name in ("update", "compute"))
    return all(module.partition(".")[0] == "torchmetrics" for module in code)


def _as(other: Tensor, value: Tensor) -> Tensor:
    """Return a value in the type of another tensor, if both are of real numbers."""
    of_reals = other.is_floating_point() and value.is_floating_point()
    return value.to(other.dtype) if of_reals else value


def _set_states(metric: Any, parts: Sequence[Mapping[str, Any]]) -> None:
    for name, reduction in metric._reductions.items():
        values = [_tensor(part[name]) for part in parts]
        merged = values[0]
        if len(values) > 1:
            merged = torch.stack(values)
            merged = merged if reduction is None else cast(Tensor, reduction(merged))
        setattr(metric, name, merged)


def _tensor(state: Mapping[str, Any]) -> Tensor:
    array = np.frombuffer(base64.b64decode(state["bytes"]), np.uint8).copy()
    return torch.from_numpy(array).view(getattr(torch, state["type"])).reshape(state["shape"])
