"""What factories have set tells trials apart, and keeps nothing of them."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.effects.as_built import AsBuilt
from cerebro_hydra.shards.admission.effects.isolated_factory import IsolatedFactory
from cerebro_hydra.shards.admission.effects.readings import KnownChanges
from tests.shards import zoo

SETTINGS = SimpleNamespace(value=None)


def reads_a_setting(value: Any) -> Recipe:
    SETTINGS.value = value
    model = nn.Linear(4, 2)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels) * (1 if SETTINGS.value else 2)

    return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch_size=4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.relu, torch.sigmoid),
        (nn.functional.relu, nn.functional.gelu),
        (nn.ReLU, nn.GELU),
        (partial(nn.functional.gelu, approximate="tanh"), partial(nn.functional.gelu)),
        ((0.5, 1.0), (2.0, 1.0)),
        (np.float32(1), np.float32(2)),
        (torch.ones(3), torch.zeros(3)),
        (torch.ones(3000), torch.zeros(3000)),
        (np.ones(3000), np.zeros(3000)),
        ({"a": [1]}, {"a": [2]}),
    ],
)
def test_what_a_factory_has_set_tells_trials_apart(one: Any, other: Any) -> None:
    factory = IsolatedFactory(reads_a_setting)
    found = [AsBuilt.settings_of(factory(copy.copy(value))) for value in (one, other, one)]
    assert found[0] == found[2] != found[1]


def test_a_model_that_a_factory_keeps_tells_none_apart_and_is_not_kept() -> None:
    factory = IsolatedFactory(reads_a_setting)
    first, second = (AsBuilt.settings_of(factory(nn.Linear(2, 2))) for _ in range(2))
    assert first == second
    kept = weakref.ref(SETTINGS.value)
    factory.give_back()
    gc.collect()
    assert kept() is None


ARRAY = np.zeros(3)


def reads_a_module_and_an_array(value: Any) -> Recipe:
    made = reads_a_setting(value)
    zoo.OF_A_TEST = ARRAY  # type: ignore[attr-defined]
    return made


def test_an_array_beside_a_module_of_the_users_hides_no_setting() -> None:
    before = SETTINGS.value
    with IsolatedFactory(reads_a_module_and_an_array) as factory:
        found = [AsBuilt.settings_of(factory(value)) for value in (1, 2)]
        assert found[0] != found[1]
    assert SETTINGS.value is before and not hasattr(zoo, "OF_A_TEST")


@functools.cache
def of_a_name(name: str) -> dict[str, Any]:
    return {"name": name, "gain": 1.0, "inner": SimpleNamespace(act=torch.relu, sizes=[1])}


class Accessor:
    def __init__(self) -> None:
        self.gain = 1.0

    @classmethod
    @functools.lru_cache(maxsize=1)
    def get(cls) -> Accessor:
        return cls()


def set_of_a_name(gain: float) -> None:
    of_a_name("a")["gain"] = gain


def set_within(gain: float) -> None:
    of_a_name("a")["inner"].sizes = [gain]


def set_by_an_accessor(gain: float) -> None:
    Accessor.get().gain = gain


@pytest.mark.parametrize("sets", [set_of_a_name, set_within, set_by_an_accessor])
def test_each_trial_has_its_own_of_what_cached_functions_keep(
    sets: Callable[[float], None],
) -> None:
    def gains() -> list[Any]:
        return [of_a_name("a")["gain"], of_a_name("a")["inner"].sizes, Accessor.get().gain]

    def factory(gain: float | None) -> Recipe:
        if gain is not None:
            sets(gain)
        model = nn.Linear(4, 2)

        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            return outputs.sum() * len(gains())

        return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch_size=4)

    def built(gain: float | None) -> AsBuilt:
        with AsBuilt.building():
            return AsBuilt.now(isolated(gain), factory=factory)

    before = gains()
    of_a_name.cache_clear()
    Accessor.get.cache_clear()
    with IsolatedFactory(factory) as isolated:
        trials = {gain: built(gain) for gain in (None, 2.0, 3.0)}  # the first one sets nothing
        for gain in (2.0, None, 3.0, None, 2.0):
            for found in trials[gain].of_others(KnownChanges(()), ()).values():
                found.give_back()
            now = gains()
            assert now == before if gain is None else now != before and str(gain) in str(now)
    assert gains() == before
