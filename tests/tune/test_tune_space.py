from __future__ import annotations

import numpy as np
import pytest

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.tune.space import check_space, grid, hp_choice


def test_grid_is_every_combination_with_the_last_parameter_changing_fastest() -> None:
    space = {"b": hp_choice([1, 2]), "a": hp_choice(["x", "y", "z"])}
    assert grid(space) == [
        {"b": 1, "a": "x"},
        {"b": 1, "a": "y"},
        {"b": 1, "a": "z"},
        {"b": 2, "a": "x"},
        {"b": 2, "a": "y"},
        {"b": 2, "a": "z"},
    ]
    assert [list(params) for params in grid(space)] == [["b", "a"]] * 6


def test_options_are_what_a_worker_reads_from_json() -> None:
    options = hp_choice([(64, 32), np.float32(0.5), *np.arange(2), None, True, {"k": (1,)}]).options
    assert options == ([64, 32], 0.5, 0, 1, None, True, {"k": [1]})
    assert [type(o) for o in options[1:4]] == [float, int, int]


def test_options_may_be_a_numpy_array() -> None:
    assert hp_choice(np.linspace(0, 1, 3)).options == (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no options"),
        ("adam", "hp_choice got 'adam', a str"),
        (0.1, "hp_choice got 0.1, a float"),
        ({1, 2}, "a set"),
        ({"a": 1}, "a dict"),
        ([np.sin], "give its name as a string"),
        ([object()], "JSON can't"),
    ],
)
def test_unusable_options_are_refused(options: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        hp_choice(options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, "search_space is empty"),
        ([("lr", 1)], "search_space is .*, a list"),
        (None, "search_space is None"),
        ({"lr": 0.1}, r"search_space\['lr'\] is 0.1; write hp_choice\(\[0.1\]\)"),
        ({"lr": [0.1, 1.0]}, r"write hp_choice\(\[0.1, 1.0\]\)"),
        ({1: hp_choice([1])}, "the key 1, a int"),
    ],
)
def test_unusable_space_is_refused_by_name_value_and_remedy(space: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_space(space)
