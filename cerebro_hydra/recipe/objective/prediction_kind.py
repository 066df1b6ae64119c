"""Decides what a model's predictions are: numbers, scores or probabilities of classes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.objective.objective import indexes_classes, is_likelihood, is_log_odds


class PredictionKind(StrEnum):
    """Names what a network gives for a row."""

    RAW = "raw"  # anything
    NUMBER = "number"  # one number
    SOFTMAX = "softmax"  # one score per class
    SIGMOID = "sigmoid"  # one score: of class 1 against class 0
    PROBABILITY = "probability"  # one number: how likely class 1 is

    @property
    def has_classes(self) -> bool:
        """Return whether the prediction is about classes."""
        return self not in (PredictionKind.RAW, PredictionKind.NUMBER)

    @classmethod
    def choose(
        cls, output: str | None, loss: Any, shapes: Sequence[tuple[int, ...]]
    ) -> PredictionKind:
        """Decide what a model's predictions are.

        Args:
            output: "classification", "regression" or "raw"; None takes what the loss says.
            loss: the recipe's, or None if it isn't known.
            shapes: of the predictions, rows first.

        Raises:
            ConfigurationError: predictions of these shapes can't be what was asked for.
        """
        if output == "raw":
            return cls.RAW
        single = len(shapes) == 1
        one_number = single and shapes[0][1:] in ((), (1,))
        scores = single and len(shapes[0]) == 2 and shapes[0][1] > 1
        if output == "regression":
            if not one_number:
                raise _misfit(output, "one number per row", shapes)
            return cls.NUMBER
        if output == "classification":
            if scores:
                return cls.SOFTMAX
            if not one_number:
                raise _misfit(output, "a score per class, or one number per row", shapes)
            return cls.PROBABILITY if is_likelihood(loss) else cls.SIGMOID
        if scores and indexes_classes(loss):
            return cls.SOFTMAX
        if one_number and is_log_odds(loss):
            return cls.SIGMOID
        return cls.PROBABILITY if one_number and is_likelihood(loss) else cls.RAW

    def scores(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and probabilities, each of shape (rows, classes); only for classes."""
        if self == PredictionKind.SOFTMAX:
            return predictions, predictions.softmax(1)
        one = predictions.reshape(-1)
        if self == PredictionKind.SIGMOID:
            return torch.stack([-one, one], 1), torch.stack([(-one).sigmoid(), one.sigmoid()], 1)
        both = torch.stack([1 - one, one], 1)
        return both, both


def _misfit(output: str, needed: str, shapes: Sequence[tuple[int, ...]]) -> ConfigurationError:
    found = [tuple(shape[1:]) for shape in shapes]
    return ConfigurationError(
        f"output is {output!r}, which needs {needed}, and forward gives {len(shapes)} tensors of "
        f"shape {found} per row; set output to None or 'raw'"
    )
