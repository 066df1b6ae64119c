"""On a CUDA device, training in shards has the bits of plain PyTorch there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, PlainTrainer, Recipe
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.run_in_process import run_in_process
from tests.gpu.device_trial import DeviceTrial, everything
from tests.shards import plain, zoo
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start
from tests.shards.trials import ACCELERATED as MODELS

pytestmark = pytest.mark.gpu


@cache
def admitted(model: str, cut: str) -> Trial:
    case = MODELS[model]
    recipe = case.recipe()
    recipe.cut = cut
    trial = start(recipe, case.windows)
    assert trial.admission.spec.mode == cut, trial.admission.report.text()
    assert trial.cut_model.num_shards == 3
    return trial


@cache
def plainly_trained(model: str, device: torch.device) -> tuple[PlainTrainer, Any, list[float]]:
    case = MODELS[model]
    trainer = PlainTrainer(case.recipe().to(device), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    losses = [loss for _ in range(2) for window in case.windows for loss in trainer.step(window)]
    return trainer, everything(trainer.tensors()), losses


@pytest.mark.parametrize("alone", [False, True], ids=["resident", "alone"])
@pytest.mark.parametrize("cut", ["modules", "export"])
@pytest.mark.parametrize("model", list(MODELS))
def test_shards_have_the_bits_of_plain_training(
    device: torch.device, model: str, cut: str, alone: bool
) -> None:
    case = MODELS[model]
    trainer, expected, losses = plainly_trained(model, device)
    trial = DeviceTrial(admitted(model, cut), case.recipe, device, alone)
    for _ in range(2):  # with a hop between them
        trial.train(case.windows)
    assert trial.losses == losses
    found = everything(trial.tensors())
    persistent = {n for n in expected if not n.startswith("buffer:") or n in found}
    assert found == {name: expected[name] for name in persistent}
    assert len(persistent) > 4
    assert trial.evaluate(case.windows[0]) == trainer.evaluate(case.windows[0])


def test_the_plain_model_trains_in_the_memory_of_shards(device: torch.device) -> None:
    case = MODELS["norms"]
    _, expected, losses = plainly_trained("norms", device)
    trial = DeviceTrial(admitted("norms", "modules"), case.recipe, device, alone=False)
    assert trial.train_uncut([*case.windows, *case.windows]) == losses
    found = everything(trial.tensors())
    assert found == {name: expected[name] for name in found}
    assert len(found) > 4


def test_plain_training_is_the_same_each_time(device: torch.device) -> None:
    _, expected, _ = plainly_trained("bert", device)
    plainly_trained.cache_clear()
    assert plainly_trained("bert", device)[1] == expected


class NoDevice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + torch.arange(6))


def test_a_forward_that_makes_tensors_on_the_cpu_is_told_what_to_write(
    device: torch.device,
) -> None:
    if device.type == "cpu":
        pytest.skip("the CPU is the only device")
    model = NoDevice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = Recipe(model, optimizer, torch.nn.CrossEntropyLoss()).to(device)
    with pytest.raises(ConfigurationError, match=r"as in torch.arange\(n, device=x.device\)"):
        PlainTrainer(recipe, 0, 1).step(zoo.vectors(8))


def build(params: Mapping[str, Any]) -> Recipe:
    return MODELS["norms"].recipe()


@pytest.mark.parametrize("cut", ["modules", "export"])
def test_a_run_is_found_identical(device: torch.device, tmp_path: Path, cut: str) -> None:
    (batch,) = zoo.vectors(72)
    arrays = {"x": batch.features[0].numpy(), "y": batch.labels[0].numpy()}
    columns = Columns(("x",), ("y",))

    def make() -> Recipe:
        recipe = build({})
        recipe.cut = cut
        return recipe.bind(columns)

    trial = DeviceTrial(admitted("norms", cut), make, device, alone=True)
    store = LocalStore(str(tmp_path))
    folder = run_in_process(store, arrays, columns, trial, {}, device.type)
    report = cerebro_hydra.replay(folder.path, "trial-000", build)
    assert report.identical, str(report)
    assert report.visits == 2
