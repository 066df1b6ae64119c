"""Says which columns a run reads, and which rows it validates on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cerebro_hydra.data.arguments import column_names
from cerebro_hydra.errors import ConfigurationError


@dataclass(frozen=True)
class DataSpec:
    """Holds the part of a search's arguments that decides its data.

    Args:
        feature_columns: what `forward` takes, in order.
        label_columns: what the loss takes, in order; empty where that is not known yet.
        sample_weight_column: weighs the loss of each row, or None.
        validation: the share of rows to hold out, the name of a column that marks them, or None to
            validate on nothing.
        seed: draws the rows that are held out, and the order in which rows are stored.
    """

    feature_columns: tuple[str, ...]
    label_columns: tuple[str, ...] = ()
    sample_weight_column: str | None = None
    validation: float | str | None = None
    seed: int = 0

    @classmethod
    def checked(
        cls,
        feature_columns: Sequence[str],
        label_columns: Sequence[str] = (),
        sample_weight_column: str | None = None,
        validation: float | str | None = None,
        seed: int = 0,
    ) -> DataSpec:
        """Return the spec of what a user gave.

        Raises:
            ConfigurationError: an argument can't be used; names it, its value and what to give.
        """
        features = column_names("feature_columns", feature_columns)
        labels = column_names("label_columns", label_columns) if label_columns else ()
        if both := set(features) & set(labels):
            raise ConfigurationError(
                f"{sorted(both)[0]!r} is in feature_columns and in label_columns; leave it in one"
            )
        if sample_weight_column is not None:
            (weight,) = column_names("sample_weight_column", [sample_weight_column])
            if weight in (*features, *labels):
                raise ConfigurationError(
                    f"sample_weight_column is {weight!r}, which is a feature or label column too; "
                    "give a column of its own"
                )
        return cls(features, labels, sample_weight_column, _checked_validation(validation), seed)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return all columns that are stored: features, labels, then the sample weight."""
        weight = () if self.sample_weight_column is None else (self.sample_weight_column,)
        return (*self.feature_columns, *self.label_columns, *weight)

    @property
    def validation_column(self) -> str | None:
        """Return the column that marks validation rows, if one does."""
        return self.validation if isinstance(self.validation, str) else None

    @property
    def validation_share(self) -> float:
        """Return the share of rows to hold out; 0 if a column marks them, or there are none."""
        return self.validation if isinstance(self.validation, float) else 0.0


def _checked_validation(validation: object) -> float | str | None:
    if validation is None or (isinstance(validation, str) and validation):
        return validation
    if isinstance(validation, bool) or not isinstance(validation, int | float):
        raise ConfigurationError(
            f"validation is {validation!r}; give a share such as 0.2, a column's name, or None"
        )
    if not 0 < validation < 1:
        raise ConfigurationError(
            f"validation is {validation!r}; a share lies between 0 and 1, None is for no validation"
        )
    return float(validation)
