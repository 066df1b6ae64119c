from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

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
from tests.golden import assert_golden, refusal, without_addresses


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
    assert hp_choice(np.linspace(0, 1, 3)).options == (0.0, 0.5, 1.0)


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


OPTIONS: tuple[Any, ...] = ([], "adam", 0.1, {1}, {"a": 1}, [np.sin], [object()])
SPACES: tuple[Any, ...] = (
    {}, [("lr", 1)], None, {"lr": 0.1}, {"lr": [0.1, 1.0]}, {1: hp_choice([1])}
)  # fmt: skip
BOUNDS: dict[Callable[..., Any], tuple[tuple[Any, ...], ...]] = {
    hp_uniform: ((1, 1), ("0", 1), (0, float("inf"))),
    hp_loguniform: ((-1, -4), (16, 512)),
    hp_quniform: ((0, 1, 0), (0, 1, 2)),
    hp_qloguniform: ((-400, 2, 1), (-2, 0, 1)),
    hp_log: ((0, 1), (-4, -1), (1, 0.1)),
    hp_int: ((1, 2.5), (True, 4), (4, 4), (1, 4, 4), (1, 9, 2, True), (0, 9, 1, True)),
}


def test_unusable_spaces_options_and_bounds_are_refused_by_name_value_and_remedy() -> None:
    uses: dict[str, Callable[[], object]] = {
        **{f"options {given}": partial(hp_choice, given) for given in OPTIONS},
        **{f"space {given}": partial(check_space, given) for given in SPACES},
        **{
            f"{make.__name__}{given}": partial(make, *given)
            for make, all_given in BOUNDS.items()
            for given in all_given
        },
        "a grid of what has no end of values": lambda: grid({"lr": hp_uniform(0, 1)}),
    }
    found = {without_addresses(what): refusal(use) for what, use in uses.items()}
    assert_golden(Path(__file__).with_name("golden") / "refused_spaces.txt", found)


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


NESTED = {
    "optimizer": hp_choice(
        [
            {"name": "adam"},
            {"name": "sgd", "momentum": hp_choice([0, 0.9]), "deep": {"n": hp_int(1, 2)}},
        ]
    ),
    "width": hp_int(1, 2),
}


def test_a_grid_goes_through_what_an_option_has() -> None:
    adam = {"name": "adam"}
    found = [params["optimizer"] for params in grid(NESTED) if params["width"] == 1]
    assert found == [
        adam,
        *({"name": "sgd", "momentum": m, "deep": {"n": n}} for m in (0, 0.9) for n in (1, 2)),
    ]
    assert len(grid(NESTED)) == 10


def test_draws_take_an_option_with_what_it_has() -> None:
    taken = [params["optimizer"] for params in draws(NESTED, 200, Random(1))]
    assert all(each in [params["optimizer"] for params in grid(NESTED)] for each in taken)
    adam = sum(each == {"name": "adam"} for each in taken)
    assert 70 < adam < 130, "options are as likely as one another, whatever they have"
    assert len({str(each) for each in taken}) == 5
