"""Makes the columns of Spark ML of a model's predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cerebro_hydra.spark import arrow_columns
from cerebro_hydra.tune.prediction_kind import PredictionKind

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType


@dataclass(frozen=True)
class EvaluatorOutputs:
    """Makes the columns that Spark's evaluators read: vectors of scores, and a double.

    Args:
        kind: any but RAW; of NUMBER there are no vectors.
        prediction: the column of the most likely class, or of the number.
        probability: the column of probabilities; "" leaves it out.
        raw: the column of scores; "" leaves it out.
    """

    kind: PredictionKind
    prediction: str
    probability: str = ""
    raw: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        return tuple(name for name in (self.raw, self.probability, self.prediction) if name)

    def types(self, sample: Sequence[Tensor]) -> list[DataType]:
        """Return two vectors and a double, without those that are left out."""
        from pyspark.sql.types import DoubleType

        vector = arrow_columns.vector_type()
        return [*([vector] * (len(self.names) - 1)), DoubleType()]

    def arrays(self, predictions: Sequence[Tensor]) -> list[pa.Array]:
        """Return the columns, computed in double precision, so that probabilities add up to 1."""
        (given,) = predictions
        given = given.to(torch.float64)
        if self.kind == PredictionKind.NUMBER:
            return [arrow_columns.from_tensor(given)]
        scores, probabilities = self.kind.scores(given)
        vectors = [(self.raw, scores), (self.probability, probabilities)]
        return [
            *(arrow_columns.from_vectors(values) for name, values in vectors if name),
            arrow_columns.from_tensor(scores.argmax(1).to(torch.float64)),
        ]
