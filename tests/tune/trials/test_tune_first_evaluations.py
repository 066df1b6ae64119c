"""Admission looks at first evaluations as such, and leaves what trials share as it was."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.shards.admission.compare import evaluate_once
from tests.tune.trials.test_tune_admission import admit_with


def keeps_its_first_batch(params: dict[str, Any]) -> Any:
    kept: dict[str, Tensor] = {}

    def metric(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - kept.setdefault("mean", outputs.mean(0))).square().mean()

    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), metrics={"spread": (metric, "min")})


def test_a_metric_that_keeps_its_first_batch_is_refused(tmp_path: Path) -> None:
    found = admit_with(keeps_its_first_batch, tmp_path, [{"lr": 0.1}])
    assert "evaluations depend on a value of metric 'spread'" in found.refused[0]


def test_the_first_look_of_a_search_keeps_nothing_for_admission() -> None:
    recipe = keeps_its_first_batch({"lr": 0.1}).bind(Columns(("features",), ("label",)))
    kept = inspect.getclosurevars(recipe.metric_list[0].function).nonlocals["kept"]
    example = (torch.randn(6, 16),), (torch.arange(6) % 4,)
    evaluate_once(recipe, example, 0)
    assert kept == {}


CONFIG = SimpleNamespace(kind=None)


class Decides(nn.Module):
    """Decides in its first forward on something for good, as configs of Hugging Face do."""

    def __init__(self, config: SimpleNamespace, dropout: float) -> None:
        super().__init__()
        self.config, self.drop, self.last = config, nn.Dropout(dropout), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.kind is None:
            self.config.kind = "classes"
        return self.last(self.drop(x))


def of_one_config(params: dict[str, Any]) -> Any:
    model = Decides(CONFIG, params["p"])
    return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())


def test_each_trial_decides_anew_on_what_is_in_a_config_of_all(tmp_path: Path) -> None:
    found = admit_with(of_one_config, tmp_path, [{"p": 0.1}, {"p": 0.2}])
    first, second = (spec.attributes for spec in found.specs)
    assert first == second and any("kind" in mark for mark in first)
    assert CONFIG.kind is None
