"""Trials whose code only logs what it keeps train like any other."""

from __future__ import annotations

import pytest

from cerebro_hydra.shards.admission.held_state import HeldState
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain, zoo
from tests.shards.code.logging_recipes import LARGE, RECIPES, made
from tests.shards.hopping import start

QUIET = zoo.vectors(8, 8, 8, 8)
for batch in QUIET:
    batch.features[0].clamp_(max=LARGE)
LATE = zoo.vectors(8, 8, 8, 8, seed=1)
LATE[2].features[0].mul_(9)


@pytest.mark.filterwarnings("ignore:large values")
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("what", RECIPES)
def test_what_is_only_logged_fails_no_trial(what: str, shards: int) -> None:
    sub_epochs = [[[batch] for batch in each] for each in (QUIET, LATE)]
    trial = start(made(shards=shards, **RECIPES[what]), sub_epochs[0])
    for windows in sub_epochs:
        trial.train(windows)
    trainer = plain.train(made(shards=shards, **RECIPES[what]), sub_epochs)[1]
    assert_same_state(trial.tensors(), trainer)


def test_nothing_is_only_logged_where_no_source_is_known() -> None:
    assert HeldState(made(**RECIPES["a layer that counts"])).only_logged()
    layer = type(made().model[2])
    scope = {"__name__": "hidden", "layer": layer}
    exec("class Hidden(layer):\n    def forward(self, x):\n        return x * self.calls", scope)
    assert not HeldState(made(middle=scope["Hidden"])).only_logged()
