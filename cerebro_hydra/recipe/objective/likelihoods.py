"""Tells by the loss how likely each class is to a model, and how far that is from the truth."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.recipe.objective.metrics import StateMetric
from cerebro_hydra.recipe.objective.objective import (
    MODEL,
    class_numbers,
    indexes_classes,
    is_cross_entropy,
    is_likelihood,
    is_log_likelihood,
    is_log_odds,
)

_BINS = 15

_IGNORED = -100


def ignored_label(loss: Any) -> int:
    """Return the label that a loss leaves out, as metrics by name do: -100, as torch's losses."""
    if isinstance(loss, functools.partial):
        ignored = loss.keywords.get("ignore_index", _IGNORED)
    else:
        ignored = getattr(loss, "ignore_index", _IGNORED)
    return ignored if isinstance(ignored, int) else _IGNORED


def as_scores(outputs: Any) -> Tensor:
    """Return outputs for a metric: numbers in double precision.

    Raises:
        ConfigurationError: they are no tensor.
    """
    if not isinstance(outputs, Tensor):
        raise ConfigurationError(
            f"a named metric, or one of torchmetrics, takes a tensor, and forward gives "
            f"{kind_of(outputs)}; let forward give one tensor for each label column"
        )
    return outputs.double() if outputs.is_floating_point() else outputs


class Scale(Enum):
    """Says what a score of a class is."""

    LIKELIHOOD = "likelihood"
    LOG_LIKELIHOOD = "log-likelihood"
    LOGIT = "logit"

    @classmethod
    def of(cls, loss: Any) -> Scale | None:
        """Return what a loss takes; None if it is a function of the user, or unknown."""
        if is_likelihood(loss):
            return cls.LIKELIHOOD
        if is_log_likelihood(loss):
            return cls.LOG_LIKELIHOOD
        is_models_own = isinstance(loss, str) and loss == MODEL
        is_logit = is_cross_entropy(loss) or is_log_odds(loss) or is_models_own
        return cls.LOGIT if is_logit else None


def likelihoods(
    scores: Tensor, labels: Tensor, loss: Any, scale: Scale
) -> tuple[Tensor, Tensor, int]:
    """Return the likelihood of each class, (rows, classes, ...), labels, and how many classes.

    For scores of 0 or 1, it is the likelihood of 1, in the shape of the labels, and of 0 classes.

    Args:
        scores: what the model gives, in double precision; classes as integers stay as they are.
        labels: class numbers, perhaps as floats, or a share for each class.
        loss: that of the recipe for these outputs; None if it is unknown.
        scale: what the scores are.

    Raises:
        ConfigurationError: a label is no class number.
    """
    if is_cross_entropy(loss) and labels.shape == scores.shape and labels.dim() > 1:
        labels = labels.argmax(1)
    labels = class_numbers(labels)
    classes = 0
    if (dimension := class_dim(scores, labels, loss)) is None:
        scores = scores.reshape(labels.shape)
    else:
        scores = scores.movedim(dimension, 1)
        classes = scores.shape[1]
    if not scores.is_floating_point() or scale is Scale.LIKELIHOOD:
        return scores, labels, classes
    if scale is Scale.LOG_LIKELIHOOD:
        return scores.exp(), labels, classes
    return scores.softmax(1) if classes else scores.sigmoid(), labels, classes


def class_dim(outputs: Tensor, labels: Tensor, loss: Any) -> int | None:
    """Return the dimension of outputs that has one for each class; None if they are one per label.

    Where the loss is torch's it is the second one, also if the last one would fit the labels.
    """
    if outputs.dim() == labels.dim():
        return None
    if indexes_classes(loss) and outputs.dim() == labels.dim() + 1:
        return 1
    if outputs.shape[-1] == 1:
        return None
    if outputs.shape[:-1] == labels.shape:
        return -1
    return 1 if outputs.dim() == labels.dim() + 1 and labels.dim() > 1 else -1


class OfEitherScale:
    """Measures scores of which the loss does not tell what they are.

    They are likelihoods if all of them are between 0 and 1, those of each batch and partition, else
    logits. So it measures both, until one is outside.

    Args:
        make: makes the metric for a scale.
    """

    def __init__(self, make: Callable[[Scale], StateMetric]) -> None:
        self.of_logits, self._of_likelihoods = make(Scale.LOGIT), make(Scale.LIKELIHOOD)

    def __deepcopy__(self, memo: object) -> OfEitherScale:
        return self  # neither metric changes

    def start(self) -> Any:
        """Return the states before any batch."""
        return {"logits": self.of_logits.start(), "likelihoods": self._of_likelihoods.start()}

    def update(self, state: Any, outputs: Any, *labels: Tensor) -> Any:
        """Return the states after one more batch; None for likelihoods if it holds others."""
        scores, within = as_scores(outputs), state["likelihoods"]
        if within is not None:
            is_outside = scores.is_floating_point() and ((scores < 0) | (scores > 1)).any()
            own = self._of_likelihoods
            within = None if is_outside else own.update(within, outputs, *labels)
        logits = self.of_logits.update(state["logits"], outputs, *labels)
        return {"logits": logits, "likelihoods": within}

    def merge(self, state: Any, other: Any) -> Any:
        """Merge both."""
        ones, others = state["likelihoods"], other["likelihoods"]
        within = None
        if ones is not None and others is not None:
            within = self._of_likelihoods.merge(ones, others)
        logits = self.of_logits.merge(state["logits"], other["logits"])
        return {"logits": logits, "likelihoods": within}

    def compute(self, state: Any) -> float:
        """Return the value of what the scores are."""
        if state["likelihoods"] is None:
            return self.of_logits.compute(state["logits"])
        return self._of_likelihoods.compute(state["likelihoods"])


def on_scale_of(loss: Any, make: Callable[[Scale], StateMetric]) -> StateMetric:
    """Return a metric of likelihoods, for outputs that a loss takes."""
    scale = Scale.of(loss)
    return OfEitherScale(make) if scale is None else make(scale)


class CalibrationError:
    """Sums up, for each bin of likelihoods, how likely rows were held to be and how many were hit.

    Its value is the expected calibration error of Guo et al., "On Calibration of Modern Neural
    Networks", section 2: between 0 and 1, over the likeliest class, or over class 1 of 0 and 1.

    Args:
        loss: says which labels are left out.
        scale: what an output is.
    """

    def __init__(self, loss: Any, scale: Scale) -> None:
        self._loss, self._scale = loss, scale

    @classmethod
    def of(cls, loss: Any) -> StateMetric:
        """Return the metric for outputs that a loss takes."""
        return on_scale_of(loss, functools.partial(cls, loss))

    def start(self) -> Any:
        """Return the state before any batch: rows, likelihoods and hits of each bin."""
        return [[0.0] * (_BINS + 1)] * 3  # a likelihood of 1 has a bin to itself

    def update(self, state: Any, outputs: Any, *labels: Tensor) -> Any:
        """Return the state after one more batch."""
        (target,) = labels
        scores, target, classes = likelihoods(as_scores(outputs), target, self._loss, self._scale)
        if classes:
            scores, likeliest = scores.max(1)
            hits = (likeliest == target).double()
        else:
            hits = target.double()
        counted = target != ignored_label(self._loss)
        scores, hits = scores[counted], hits[counted]
        bounds = torch.linspace(0, 1, _BINS + 1).double()
        bins = torch.bucketize(scores, bounds, right=True) - 1
        sums = _sums(state)
        for number, added in enumerate((torch.ones_like(scores), scores, hits)):
            sums[number].index_add_(0, bins, added)
        return sums.tolist()

    def merge(self, state: Any, other: Any) -> Any:
        """Add the sums of two states."""
        return (_sums(state) + _sums(other)).tolist()

    def compute(self, state: Any) -> float:
        """Return the mean distance over all rows, NaN without any."""
        rows, held, hit = _sums(state)
        return ((held - hit).abs().sum() / rows.sum()).item()


def _sums(state: Any) -> Tensor:
    return torch.tensor(state, dtype=torch.float64)
