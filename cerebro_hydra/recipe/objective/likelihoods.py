"""Tells by the loss how likely each class is to a model, and how far that is from the truth."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.recipe.objective.objective import (
    MODEL,
    class_numbers,
    is_likelihood,
    is_log_odds,
)

_BINS = 15

_IGNORED = -100


def ignored_label(loss: Any) -> int:
    """Return the label that a loss leaves out, as metrics by name do: -100, as torch's losses."""
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


def likelihoods(scores: Tensor, labels: Tensor, loss: Any) -> tuple[Tensor, Tensor, int]:
    """Return the likelihood of each class, (rows, classes, ...), labels, and how many classes.

    For scores of 0 or 1, it is the likelihood of 1, in the shape of the labels, and of 0 classes.
    Where the loss does not tell, scores that are not all between 0 and 1 are taken for logits.

    Args:
        scores: what the model gives, in double precision; classes as integers stay as they are.
        labels: class numbers, perhaps as floats, or a share for each class.
        loss: that of the recipe for these outputs; None if it is unknown.

    Raises:
        ConfigurationError: a label is no class number.
    """
    indexes = isinstance(loss, nn.CrossEntropyLoss) or loss is F.cross_entropy
    if indexes and labels.shape == scores.shape and labels.dim() > 1:
        labels = labels.argmax(1)
    labels = class_numbers(labels)
    classes = 0
    if scores.dim() == labels.dim() or scores.shape[-1] == 1:
        scores = scores.reshape(labels.shape)
    else:
        scores = scores.movedim(class_dim(scores, labels), 1)
        classes = scores.shape[1]
    if not scores.is_floating_point() or is_likelihood(loss):
        return scores, labels, classes
    if isinstance(loss, nn.NLLLoss) or loss is F.nll_loss:
        return scores.exp(), labels, classes
    are_logits = indexes or is_log_odds(loss) or (isinstance(loss, str) and loss == MODEL)
    if are_logits or bool(((scores < 0) | (scores > 1)).any()):
        scores = scores.softmax(1) if classes else scores.sigmoid()
    return scores, labels, classes


def class_dim(outputs: Tensor, labels: Tensor) -> int:
    """Return the dimension of outputs that has one for each class."""
    if outputs.shape[:-1] == labels.shape:
        return -1
    return 1 if outputs.dim() == labels.dim() + 1 and labels.dim() > 1 else -1


class CalibrationError:
    """Sums up, for each bin of likelihoods, how likely rows were held to be and how many were hit.

    Its value is the expected calibration error of Guo et al., "On Calibration of Modern Neural
    Networks", section 2: between 0 and 1, over the likeliest class, or over class 1 of 0 and 1.

    Args:
        loss: says what an output stands for; None if that is unknown.
    """

    def __init__(self, loss: Any = None) -> None:
        self._loss = loss

    def start(self) -> Any:
        """Return the state before any batch: rows, likelihoods and hits of each bin."""
        return [[0.0] * (_BINS + 1)] * 3  # a likelihood of 1 has a bin to itself

    def update(self, state: Any, outputs: Any, *labels: Tensor) -> Any:
        """Return the state after one more batch."""
        (target,) = labels
        scores, target, classes = likelihoods(as_scores(outputs), target, self._loss)
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
