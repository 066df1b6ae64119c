"""Says which columns a run reads, and which rows it validates on; checks what callers give."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cerebro_hydra.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class DataSpec:
    """Holds the part of a search's arguments that decides its data.

    Args:
        feature_columns: what `forward` takes, in order.
        label_columns: what the loss takes, in order; empty without labels, or where that is not
            known yet.
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
        label_columns: Sequence[str] | None = None,
        sample_weight_column: str | None = None,
        validation: float | str | None = None,
        seed: int = 0,
    ) -> DataSpec:
        """Return the spec of what a user gave.

        Raises:
            ConfigurationError: an argument can't be used; names it, its value and what to give.
        """
        features = column_names("feature_columns", feature_columns)
        labels = () if label_columns is None else column_names("label_columns", label_columns)
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


def column_names(argument: str, value: Any) -> tuple[str, ...]:
    """Return the value of an argument that lists columns.

    Raises:
        ConfigurationError: it is no list of names, or names one twice.
    """
    if isinstance(value, str):
        raise ConfigurationError(f"{argument} is {value!r}; give a list: [{value!r}]")
    if not isinstance(value, Sequence) or not value:
        remedy = ", or None to train without labels" if argument == "label_columns" else ""
        raise ConfigurationError(f"{argument} is {value!r}; give a list of column names{remedy}")
    for name in value:
        if not isinstance(name, str):
            raise ConfigurationError(f"{argument} holds {name!r}; column names are strings")
        if list(value).count(name) > 1:
            raise ConfigurationError(f"{argument} names {name!r} more than once; name it once")
    return tuple(value)


def require_dataframe(caller: str, df: Any) -> None:
    """Refuse an argument that is not a DataFrame of Spark.

    Raises:
        ConfigurationError: it is something else; the message says what.
    """
    columns = getattr(df, "columns", None)
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise ConfigurationError(
            f"{caller} got a {type(df).__module__}.{type(df).__name__}; give a Spark DataFrame, "
            "such as spark.createDataFrame(...) makes"
        )


def matching_columns(df: DataFrame, name: str) -> list[str]:
    """Return the columns that Spark takes `name` for; it refuses a query if there are several."""
    if df.sparkSession.conf.get("spark.sql.caseSensitive") == "true":
        return [each for each in df.columns if each == name]
    return [each for each in df.columns if each.lower() == name.lower()]


def column_problem(df: DataFrame, name: str, what: str) -> str | None:
    """Say why a DataFrame does not have exactly one column of a name; None if it has.

    Args:
        df: the DataFrame.
        name: the column's name, in the case that the caller wrote.
        what: how the message calls the column, as in "feature column".
    """
    if name not in df.columns:
        return missing_column(what, name, "the DataFrame", df.columns)
    matching = matching_columns(df, name)
    if len(matching) > 1:
        return (
            f"{what} {name!r} is {len(matching)} times in the DataFrame, as {matching}: rename or "
            "drop all but one"
        )
    return None


def missing_column(what: str, name: str, where: str, columns: Sequence[str]) -> str:
    """Say that a column is not among those that there are, with the nearest of them."""
    near = difflib.get_close_matches(name, columns, n=1, cutoff=0.4)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{what} {name!r} is not in {where}{hint}, which has the columns {list(columns)}"
