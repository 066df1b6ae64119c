"""States of custom metrics, as a recipe keeps them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe, merge_metrics, resolve_metrics
from tests.recipe.small_recipes import recipe_of


class Counts:
    """Counts labels in a dict that `start` gives out again and again."""

    def __init__(self, key: Any) -> None:
        self.first: dict[Any, int] = {}
        self.key = key

    def start(self) -> Any:
        return self.first

    def update(self, state: Any, outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        for label in labels.tolist():
            state[self.key(label)] = state.get(self.key(label), 0) + 1
        return state

    def merge(self, state: Any, other: Any) -> Any:
        return state | other

    def compute(self, state: Any) -> float:
        return float(len(state))


def counting(metric: Any) -> Recipe:
    return recipe_of(nn.Linear(3, 2), nn.CrossEntropyLoss(), metrics={"m": (metric, "max")})


def test_what_start_gives_is_not_written_into():
    recipe = counting(metric := Counts(str))
    for _ in range(2):
        states: dict[str, Any] = {}
        recipe.update_states(states, torch.zeros(2, 2), (torch.tensor([0, 1]),))
        recipe.update_states(states, torch.zeros(1, 2), (torch.tensor([1]),))
        assert states == {"m": {"0": 1, "1": 2}}
    assert metric.first == {}


def test_a_key_that_is_no_string_is_refused():
    with pytest.raises(ConfigurationError, match=r"metric 'm' .*0 is a key .*keys are strings"):
        counting(Counts(int)).update_states({}, torch.zeros(1, 2), (torch.tensor([0]),))


def test_a_dict_of_outputs_is_matched_by_the_names_of_the_label_columns() -> None:
    recipe = recipe_of(loss=[nn.L1Loss(), nn.MSELoss()], metrics=["mae"])
    recipe.bind(Columns(("x",), ("kind", "size")))
    kind, size = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 7.0])
    outputs = {"size": size + 3, "logits": size, "kind": kind + 1}
    assert recipe.compute_loss(outputs, (kind, size)).item() == 1 + 9
    sums = recipe.compute_metrics(outputs, (kind, size), 2)
    assert sums == {"kind_mae": (2, 2), "size_mae": (6, 2)}
    assert [t.tolist() for t in recipe.predictions(outputs)] == [[2, 3], [8, 10]]


def test_attentions_fast_path_is_off_only_while_a_recipe_runs() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    with recipe_of().precision():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled() == before


class Words:
    """A state in which every partition, and their order, can be seen."""

    def start(self) -> str:
        return ""

    def update(self, state: str, outputs: Any, *labels: Any) -> str:
        return state + "x"

    def merge(self, state: str, other: str) -> str:
        return f"{state}+{other}"

    def compute(self, state: str) -> float:
        return float(state.split("+") == ["1", "2", "3"])


def test_the_states_of_all_partitions_are_merged_in_their_order() -> None:
    (metric,) = resolve_metrics({"words": (Words(), "max")})
    states = [{"words": "1"}, {"words": "2"}, {"words": "3"}]
    assert merge_metrics([metric], states) == {"words": 1.0}
    assert merge_metrics([metric], states[::-1]) == {"words": 0.0}
    assert merge_metrics([metric], states[:2]) == {"words": 0.0}


class Given(Words):
    """It computes, merges and starts with what it is given, or raises that."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def _give(self, where: str, otherwise: Any) -> Any:
        value = self.given.get(where, otherwise)
        if isinstance(value, Exception):
            raise value
        return value

    def start(self) -> Any:
        return self._give("start", "")

    def merge(self, state: str, other: str) -> Any:
        return self._give("merge", state)

    def compute(self, state: str) -> Any:
        return self._give("compute", 1.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"compute": None}, "'m' computes None; its compute must give one number"),
        ({"compute": torch.ones(2)}, r"'m' computes a Tensor of shape \(2,\);"),
        ({"compute": np.ones(2)}, r"'m' computes a ndarray of shape \(2,\);"),
        ({"compute": torch.tensor(1j)}, r"'m' computes a Tensor of shape \(\);"),
        ({"compute": 1j}, "'m' computes a complex;"),
        ({"compute": np.complex64(1)}, "'m' computes a complex64;"),
        ({"compute": [0.5]}, "'m' computes a list;"),
        ({"compute": 10**400}, "'m' failed to compute its value: OverflowError: int too large"),
        ({"compute": ZeroDivisionError("0/0")}, "'m' failed to compute its value: ZeroDiv.*0/0"),
        ({"merge": KeyError("n")}, "'m' failed to merge its states: KeyError: 'n'"),
    ],
)
def test_what_is_no_number_is_told_with_its_metric(given: dict[str, Any], said: str) -> None:
    (metric,) = resolve_metrics({"m": (Given(**given), "max")})
    with pytest.raises(ConfigurationError, match=said):
        merge_metrics([metric], [{"m": "1"}, {"m": "2"}])


def test_a_start_that_fails_is_told_with_its_metric() -> None:
    recipe = recipe_of(metrics={"m": (Given(start=ValueError("no")), "max")})
    recipe.bind(Columns(("features",), ("label",)))
    with pytest.raises(ConfigurationError, match=r"metric 'm' failed .*ValueError: no"):
        recipe.update_states({}, torch.ones(2, 4), (torch.tensor([0, 1]),))


def accuracy(loss: Any, outputs: list[Any], labels: list[Any], name: str = "accuracy") -> float:
    recipe = recipe_of(loss=loss, metrics=[name])
    recipe.bind(Columns(("features",), ("label",)))
    targets = (torch.tensor(labels),)
    hits, count = recipe.compute_metrics(torch.tensor(outputs), targets, len(labels))[name]
    return hits / count


@pytest.mark.parametrize("loss", [nn.BCELoss(), torch.nn.functional.binary_cross_entropy])
def test_accuracy_of_probabilities_asks_for_more_than_a_half(loss: Any) -> None:
    assert accuracy(loss, [[0.1], [0.4], [0.6], [0.7]], [0.0, 0.0, 1.0, 0.0]) == 0.75
    assert accuracy(nn.BCEWithLogitsLoss(), [0.4, -0.1], [1.0, 0.0]) == 1.0


def test_accuracy_of_a_share_per_class_compares_the_likeliest() -> None:
    outputs = [[-1.0, -2.0, -3.0], [-3.0, -2.0, -1.0]]
    labels = [[0.8, 0.1, 0.1], [0.0, 1.0, 0.0]]
    assert accuracy(nn.CrossEntropyLoss(), outputs, labels) == 0.5
    assert accuracy(nn.CrossEntropyLoss(), outputs, [0, 1]) == 0.5


def test_acc_is_accuracy_by_keras_name() -> None:
    assert accuracy(nn.CrossEntropyLoss(), [[1.0, 0.0], [0.0, 1.0]], [0, 1], "acc") == 1.0


def test_each_label_column_has_the_accuracy_of_its_loss() -> None:
    recipe = recipe_of(loss=[nn.BCELoss(), nn.BCEWithLogitsLoss()], metrics=["accuracy"])
    recipe.bind(Columns(("features",), ("a", "b")))
    outputs = (torch.tensor([0.4]), torch.tensor([0.4]))
    found = recipe.compute_metrics(outputs, (torch.tensor([0.0]), torch.tensor([0.0])), 1)
    assert found == {"a_accuracy": (1, 1), "b_accuracy": (0, 1)}
