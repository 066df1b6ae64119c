"""What decides a search's data: checked once, whoever asks."""

from __future__ import annotations

from typing import Any

import pytest

from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.errors import ConfigurationError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"feature_columns": "x"}, r"feature_columns is 'x'; give a list: \['x'\]"),
        ({"feature_columns": []}, r"feature_columns is \[\]; give a list of column names"),
        ({"feature_columns": ["a", "a"]}, "feature_columns names 'a' more than once"),
        ({"label_columns": "y"}, r"label_columns is 'y'; give a list: \['y'\]"),
        ({"label_columns": [1]}, "label_columns holds 1; column names are strings"),
        ({"label_columns": ["x"]}, "'x' is in feature_columns and in label_columns; leave it in"),
        ({"sample_weight_column": 3}, "sample_weight_column holds 3"),
        ({"sample_weight_column": "x"}, "sample_weight_column is 'x', which is a feature or label"),
        ({"validation": 0.0}, r"validation is 0\.0; a share .* None is for no validation"),
        ({"validation": 1.0}, r"validation is 1\.0; a share lies between 0 and 1"),
        ({"validation": 1.5}, r"validation is 1\.5; a share lies between 0 and 1"),
        ({"validation": True}, "validation is True; give a share"),
        ({"validation": ""}, "validation is ''; give a share"),
        ({"validation": [0.2]}, r"validation is \[0.2\]; give a share"),
    ],
)
def test_what_names_no_data_is_refused_by_name_value_and_remedy(
    arguments: dict[str, Any], said: str
) -> None:
    given = {"feature_columns": ["x"], "label_columns": ["y"], **arguments}
    with pytest.raises(ConfigurationError, match=said):
        DataSpec.checked(**given)


def test_stored_columns_are_features_then_labels_then_the_weight() -> None:
    spec = DataSpec.checked(["b", "a"], ["y"], "w", validation=0.25, seed=3)
    assert spec == DataSpec(("b", "a"), ("y",), "w", 0.25, 3)
    assert spec.columns == ("b", "a", "y", "w")
    assert DataSpec.checked(["x"], []).columns == ("x",)


@pytest.mark.parametrize(
    ("validation", "share", "column"), [(None, 0.0, None), (0.2, 0.2, None), ("held", 0.0, "held")]
)
def test_validation_is_a_share_or_a_column(validation: Any, share: float, column: Any) -> None:
    spec = DataSpec.checked(["x"], validation=validation)
    assert (spec.validation_share, spec.validation_column) == (share, column)
