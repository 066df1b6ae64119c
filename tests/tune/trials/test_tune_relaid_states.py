"""A state in the shards of another cut has the same bits, and training goes on with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.engine.layout import TrialLayout
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.testing.model_case import assert_same_state
from cerebro_hydra.tune.admission import relaid_state, write_segments
from tests.shards import plain, zoo
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start
from tests.shards.trials import (
    first_layer_frozen,
    mlp_recipe,
    resnet_recipe,
)


def relaid(trial: Trial, other: Trial, path: Path) -> None:
    """Give another trial the state of a trial, by way of a run's folder."""
    folder = RunFolder(LocalStore(str(path)), "run-1")
    shards = []
    for content, cursor in trial.shards:
        arrays = {name: np.frombuffer(b, np.uint8) for name, b in content.items()}
        frozen, trainable = write_segments(folder, arrays)
        shards.append({"frozen": frozen, "trainable": trainable, "cursor": json.loads(cursor)})
    folder.write_state(0, 1, {"trial": 0, "state": 1, "shards": shards})
    found = relaid_state(folder, 0, 1, other.layout)
    other.shards = [
        (
            {"frozen": bytes(folder.read_object(f)), "trainable": bytes(folder.read_object(t))},
            json.dumps(found.cursor),
        )
        for f, t in found.digests
    ]


def lazy_momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose state is made in the first step, of some parameters alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "momentum": 0.9}]
    return torch.optim.SGD(groups, lr=0.01)


CASES = {
    "AdamW with averages": lambda shards: mlp_recipe(shards=shards, ema=0.9),
    "frozen layers and momentum": lambda shards: mlp_recipe(
        lazy_momentum, shards, model=first_layer_frozen
    ),
    "BatchNorm, clipping and a schedule": resnet_recipe,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("before", "after"), [(1, 4), (3, 2)])
def test_training_goes_on_with_the_bits_of_plain_training(
    tmp_path: Path, case: str, before: int, after: int
) -> None:
    batches = zoo.images if case.startswith("Batch") else zoo.vectors
    sub_epochs = [zoo.singly(batches(6, 4)), zoo.singly(batches(6, 5))]
    make = {number: CASES[case](number) for number in (before, after)}
    reference: Recipe = make[before]()
    _, training = plain.train(reference, sub_epochs, STEPS_PER_EPOCH)
    everything = [window for windows in sub_epochs for window in windows]
    trial, other = (start(make[number](), everything) for number in (before, after))
    assert len(trial.shards) != len(other.shards)
    trial.train(sub_epochs[0])
    relaid(trial, other, tmp_path)
    other.step = trial.step
    other.train(sub_epochs[1])
    assert_same_state(other.tensors(), training)


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    trial = start(mlp_recipe()(), zoo.singly(zoo.vectors(8)))
    other = start(resnet_recipe(2)(), zoo.singly(zoo.images(6)))
    assert isinstance(other.layout, TrialLayout)
    trial.train(zoo.singly(zoo.vectors(8)))
    with pytest.raises(ConfigurationError, match="the former shards have no"):
        relaid(trial, other, tmp_path)
