"""Makes the columns of a transform from a model's predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.spark import arrow_columns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType


class Outputs(Protocol):
    """Makes columns of predictions; it travels in the query's closure."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        ...

    def types(self, sample: Sequence[Tensor]) -> list[DataType]:
        """Return the types of the columns, for predictions of the form of `sample`.

        Raises:
            ConfigurationError: the columns can't be made of them.
        """
        ...

    def arrays(self, predictions: Sequence[Tensor]) -> list[pa.Array]:
        """Return the columns of one batch; predictions are on the CPU, rows first."""
        ...


@dataclass(frozen=True)
class RawOutputs:
    """Makes a column of each prediction as the network gives it: logits stay logits.

    One value per row becomes a double, more become an array, nested as the output is.
    """

    names: tuple[str, ...]

    def types(self, sample: Sequence[Tensor]) -> list[DataType]:
        """Return one type per prediction."""
        return [arrow_columns.output_type(tensor) for tensor in self._counted(sample)]

    def arrays(self, predictions: Sequence[Tensor]) -> list[pa.Array]:
        """Return one column per prediction."""
        return [arrow_columns.from_tensor(tensor) for tensor in self._counted(predictions)]

    def _counted(self, predictions: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(predictions) != len(self.names):
            raise ConfigurationError(
                f"forward gives {len(predictions)} tensors and there are {len(self.names)} output "
                "columns; name each with set_output_columns([...])"
            )
        return predictions
