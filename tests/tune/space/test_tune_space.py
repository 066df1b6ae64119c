from __future__ import annotations

import warnings
from random import Random

import numpy as np
import pytest

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.tune.searchers.space import (
    check_space,
    draws,
    grid,
    hp_choice,
    hp_int,
    hp_log,
    hp_loguniform,
    hp_qloguniform,
    hp_quniform,
    hp_uniform,
)


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


SPACE = {
    "a": hp_uniform(-1, 3), "b": hp_quniform(0, 10, 2.5), "c": hp_loguniform(-4, -1),
    "d": hp_qloguniform(0, 2, 5), "e": hp_choice(["x", "y"]), "f": hp_uniform(-1, 3),
}  # fmt: skip


def test_draws_lie_where_the_space_says() -> None:
    for drawn in draws(SPACE, 500, Random(1)):
        assert -1 <= drawn["a"] <= 3
        assert drawn["b"] in (0, 2.5, 5, 7.5, 10)
        assert 1e-4 <= drawn["c"] <= 0.1
        assert drawn["d"] % 5 == 0 and 0 <= drawn["d"] <= 100
        assert drawn["e"] in ("x", "y")


def test_exponents_are_uniform() -> None:
    below = sum(drawn["c"] < 10**-2.5 for drawn in draws(SPACE, 2000, Random(2)))
    assert 900 < below < 1100


def test_parameters_with_one_distribution_are_drawn_independently() -> None:
    drawn = draws(SPACE, 2000, Random(3))
    a, f = (np.array([each[name] for each in drawn]) for name in ("a", "f"))
    assert abs(np.corrcoef(a, f)[0, 1]) < 0.1


def test_the_same_seed_draws_the_same_and_more_draws_only_add() -> None:
    assert draws(SPACE, 9, Random(4)) == draws(SPACE, 20, Random(4))[:9]
    assert draws(SPACE, 9, Random(4)) != draws(SPACE, 9, Random(5))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: hp_uniform(1, 1), "hp_uniform got min=1 and max=1; min is below max"),
        (lambda: hp_loguniform(-1, -4), "min=-1 and max=-4; min is below max; they are exponents"),
        (lambda: hp_uniform("0", 1), "hp_uniform got min='0'; give a finite number"),
        (lambda: hp_uniform(0, float("inf")), "max=inf"),
        (lambda: hp_quniform(0, 1, 0), "q=0; it lies between 0 and 1"),
        (lambda: hp_quniform(0, 1, 2), "q=2; it lies between 0 and 1"),
        (lambda: hp_loguniform(16, 512), "min=16 and max=512; they are exponents of 10"),
        (lambda: hp_qloguniform(-400, 2, 1), "min=-400 and max=2; they are exponents of 10"),
        (lambda: hp_qloguniform(-2, 0, 1), "q=1; it lies between 0 and 1"),
        (lambda: hp_log(0, 1), r"hp_log got min=0; .* above 0, .*hp_loguniform takes exponents"),
        (lambda: hp_log(-4, -1), "hp_log got min=-4"),
        (lambda: hp_log(1, 0.1), "hp_log got min=1 and max=0.1; min is below max"),
        (lambda: hp_int(1, 2.5), "hp_int got high=2.5; give a whole number"),
        (lambda: hp_int(True, 4), "hp_int got low=True"),
        (lambda: hp_int(4, 4), "low=4 and high=4; low is below high"),
        (lambda: hp_int(1, 4, step=4), "step=4; it lies between 1 and 3"),
        (lambda: hp_int(1, 9, step=2, log=True), "log=True and step=2"),
        (lambda: hp_int(0, 9, log=True), "log=True and low=0"),
    ],
)
def test_unusable_bounds_are_refused(make: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()  # type: ignore[operator]


def test_a_grid_refuses_what_has_no_end_of_values() -> None:
    with pytest.raises(ConfigurationError, match=r"search_space\['lr'\].*use RandomSearch"):
        grid({"lr": hp_uniform(0, 1)})


def test_whole_steps_give_whole_numbers() -> None:
    space = {"a": hp_quniform(16, 128, 16), "b": hp_qloguniform(0, 3, 2.0), "c": hp_int(2, 9)}
    for drawn in draws(space, 200, Random(6)):
        assert [type(value) for value in drawn.values()] == [int, int, int]
        assert drawn["a"] % 16 == 0 and 16 <= drawn["a"] <= 128
        assert 2 <= drawn["c"] <= 9


def test_integers_reach_both_ends_in_steps() -> None:
    drawn = {each["n"] for each in draws({"n": hp_int(1, 10, step=3)}, 200, Random(7))}
    assert drawn == {1, 4, 7, 10}
    assert grid({"n": hp_int(1, 10, step=3)}) == [{"n": 1}, {"n": 4}, {"n": 7}, {"n": 10}]


def test_logarithms_of_integers_and_numbers_are_uniform() -> None:
    space = {"n": hp_int(1, 1000, log=True), "x": hp_log(1e-4, 1e-1)}
    drawn = draws(space, 2000, Random(8))
    assert {each["n"] for each in drawn} <= set(range(1, 1001))
    assert {hp_int(1, 9, log=True).sample(Random(i)) for i in range(200)} == set(range(1, 10))
    assert all(1e-4 <= each["x"] <= 1e-1 for each in drawn)
    assert 850 < sum(each["n"] < 32 for each in drawn) < 1150
    assert 900 < sum(each["x"] < 10**-2.5 for each in drawn) < 1100


def test_bounds_that_look_like_the_numbers_themselves_are_told_to_be_exponents() -> None:
    with pytest.warns(UserWarning, match=r"from 1\.002 to 1\.259; .* write hp_log\(0.001, 0.1\)"):
        hp_loguniform(0.001, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hp_loguniform(-4, -1)
        hp_loguniform(0, 1)
