"""What decides a search's data: checked once, whoever asks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.data.spec import DataSpec
from tests.golden import assert_golden, refusal

WRONG: dict[str, tuple[Any, ...]] = {
    "feature_columns": ("x", [], ["a", "a"]),
    "label_columns": ("y", [1], ["x"], []),
    "sample_weight_column": (3, "x"),
    "validation": (0.0, 1.0, 1.5, True, "", [0.2]),
}


def test_what_names_no_data_is_refused_by_name_value_and_remedy() -> None:
    given = {"feature_columns": ["x"], "label_columns": ["y"]}
    found = {
        f"{name} = {value!r}": refusal(partial(DataSpec.checked, **{**given, name: value}))
        for name, values in WRONG.items()
        for value in values
    }
    assert_golden(Path(__file__).with_name("golden") / "refused_data_specs.txt", found)


def test_stored_columns_are_features_then_labels_then_the_weight() -> None:
    spec = DataSpec.checked(["b", "a"], ["y"], "w", validation=0.25, seed=3)
    assert spec == DataSpec(("b", "a"), ("y",), "w", 0.25, 3)
    assert spec.columns == ("b", "a", "y", "w")
    assert DataSpec.checked(["x"], None).columns == ("x",)


@pytest.mark.parametrize(
    ("validation", "share", "column"), [(None, 0.0, None), (0.2, 0.2, None), ("held", 0.0, "held")]
)
def test_validation_is_a_share_or_a_column(validation: Any, share: float, column: Any) -> None:
    spec = DataSpec.checked(["x"], validation=validation)
    assert (spec.validation_share, spec.validation_column) == (share, column)
