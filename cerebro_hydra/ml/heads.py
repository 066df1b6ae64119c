"""What a prediction is, and the columns of Spark ML that are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.objective import CLASS_INDEX_LOSSES, is_likelihood, is_log_odds
from cerebro_hydra.spark import arrow_columns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType

RAW = "raw"
NUMBER = "number"
SOFTMAX = "softmax"
"""One score per class."""
SIGMOID = "sigmoid"
"""One score: of class 1 against class 0."""
PROBABILITY = "probability"
"""One number: how likely class 1 is."""
CLASS_HEADS = (SOFTMAX, SIGMOID, PROBABILITY)

_CLASSES = (F.cross_entropy, F.nll_loss, F.multi_margin_loss)


def choose_head(asked: str | None, loss: Any, shapes: Sequence[tuple[int, ...]]) -> str:
    """What a model's predictions are.

    Args:
        asked: "classification", "regression" or "raw"; None: what the loss says.
        loss: the recipe's.
        shapes: of the predictions, rows first.

    Raises:
        ConfigurationError: predictions of these shapes can't be what was asked for.
    """
    if asked == "raw":
        return RAW
    single = len(shapes) == 1
    one_number = single and shapes[0][1:] in ((), (1,))
    scores = single and len(shapes[0]) == 2 and shapes[0][1] > 1
    if asked == "regression":
        if not one_number:
            raise _unfit(asked, "one number per row", shapes)
        return NUMBER
    if asked == "classification":
        if scores:
            return SOFTMAX
        if not one_number:
            raise _unfit(asked, "a score per class, or one number per row", shapes)
        return PROBABILITY if is_likelihood(loss) else SIGMOID
    if scores and (isinstance(loss, CLASS_INDEX_LOSSES) or loss in _CLASSES):
        return SOFTMAX
    if one_number and is_log_odds(loss):
        return SIGMOID
    return PROBABILITY if one_number and is_likelihood(loss) else RAW


def _unfit(asked: str, needed: str, shapes: Sequence[tuple[int, ...]]) -> ConfigurationError:
    found = [tuple(shape[1:]) for shape in shapes]
    return ConfigurationError(
        f"output is {asked!r}, which needs {needed}, and forward gives {len(shapes)} tensors of "
        f"shape {found} per row; set output to None or 'raw'"
    )


@dataclass(frozen=True)
class NumberOutput:
    """One number per row, a double."""

    prediction: str

    @property
    def names(self) -> tuple[str, ...]:
        """The column's."""
        return (self.prediction,)

    def types(self, sample: Sequence[Tensor]) -> list[DataType]:
        """A double."""
        from pyspark.sql.types import DoubleType

        return [DoubleType()]

    def arrays(self, predictions: Sequence[Tensor]) -> list[pa.Array]:
        """The numbers."""
        (numbers,) = predictions
        return [arrow_columns.from_tensor(numbers.to(torch.float64))]


@dataclass(frozen=True)
class ClassOutputs:
    """Scores and probabilities of the classes, as vectors, and the most likely class, a double.

    Args:
        head: SOFTMAX, SIGMOID or PROBABILITY.
        raw: the column of scores; "" leaves it out, as for the others.
        probability: the column of probabilities.
        prediction: the column of classes.
    """

    head: str
    raw: str
    probability: str
    prediction: str

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns that are not left out."""
        return tuple(name for name in (self.raw, self.probability, self.prediction) if name)

    def types(self, sample: Sequence[Tensor]) -> list[DataType]:
        """Vector, vector, double."""
        from pyspark.sql.types import DoubleType

        vector = arrow_columns.vector_type()
        return self._kept([vector, vector, DoubleType()])

    def arrays(self, predictions: Sequence[Tensor]) -> list[pa.Array]:
        """In double precision, so that probabilities add up to 1."""
        (given,) = predictions
        scores, probabilities = class_scores(self.head, given.to(torch.float64))
        return self._kept(
            [
                arrow_columns.from_vectors(scores),
                arrow_columns.from_vectors(probabilities),
                arrow_columns.from_tensor(scores.argmax(1).to(torch.float64)),
            ]
        )

    def _kept(self, columns: list[Any]) -> list[Any]:
        names = (self.raw, self.probability, self.prediction)
        return [column for name, column in zip(names, columns, strict=True) if name]


def class_scores(head: str, given: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and probabilities, each of shape (rows, classes), of what a network gives."""
    if head == SOFTMAX:
        return given, given.softmax(1)
    one = given.reshape(-1)
    if head == SIGMOID:
        return torch.stack([-one, one], 1), torch.stack([(-one).sigmoid(), one.sigmoid()], 1)
    both = torch.stack([1 - one, one], 1)
    return both, both
