"""Models of one process predict, and are archived, each with what its factory has set."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cerebro_hydra
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import GridSearch, SearchResult, hp_choice

CONFIG = SimpleNamespace(scale=1.0)


class Net(nn.Module):
    """Reads one setting that each factory sets, and one that some do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu() * CONFIG.scale
        return self.last(hidden.square() if getattr(CONFIG, "squares", False) else hidden)


def build(params: dict[str, Any]) -> Recipe:
    CONFIG.scale = params["scale"]
    if params["scale"] > 1:
        CONFIG.squares = True
    model = Net()
    return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())


def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    search = GridSearch(
        backend=LocalBackend(1),
        store=LocalStore(str(tmp_path_factory.mktemp("store"))),
        estimator_gen_fn=build,
        search_space={"scale": hp_choice([2.0, 0.5])},
        num_epochs=1,
        feature_columns=["x"],
        label_columns=["label"],
        verbose=0,
    )
    return search.fit(Arrays({"x": rows(), "label": np.arange(40) % 3}))


def plainly(state: dict[str, torch.Tensor], scale: float) -> np.ndarray:
    hidden = torch.from_numpy(rows()) @ state["first.weight"].T + state["first.bias"]
    hidden = hidden.relu() * scale
    hidden = hidden.square() if scale > 1 else hidden
    return (hidden @ state["last.weight"].T + state["last.bias"]).detach().numpy()


def test_each_model_has_its_own_settings_whatever_was_loaded_before(
    result: SearchResult, tmp_path: Path
) -> None:
    assert vars(CONFIG) == {"scale": 1.0}, "the search leaves none"
    trials = [(each.trial_id, each.params["scale"]) for each in result.trials]
    models = {trial_id: result.get_model(trial_id) for trial_id, _ in trials}
    for number, (trial_id, scale) in enumerate([*trials, *trials]):
        model = models[trial_id]
        wanted = plainly(model.state_dict(), scale)
        found = model.predict({"x": rows()})
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        of_module = result.torch(trial_id)(torch.from_numpy(rows())).detach().numpy()
        np.testing.assert_allclose(of_module, wanted, rtol=1e-4, atol=1e-5)
        model.save(path := str(tmp_path / str(number)))
        saved = cerebro_hydra.load_model(path).predict({"x": rows()})
        np.testing.assert_allclose(saved, wanted, rtol=1e-4, atol=1e-5)
    CONFIG.scale = 7.0  # which the user sets
    assert vars(CONFIG) == {"scale": 7.0}
