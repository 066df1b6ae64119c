"""Training features give the same bits in shards as in a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, PlainTrainer, Recipe
from tests.shards import plain, zoo
from tests.shards.engine.test_shards_equivalence import (
    MODES,
    first_layer_frozen,
    mlp_recipe,
    resnet_recipe,
    two_sub_epochs,
)
from tests.shards.hopping import assert_equal_to_plain, start


@pytest.mark.parametrize("mode", MODES)
def test_clipping_by_value(mode):
    assert_equal_to_plain(mlp_recipe(clip_grad_value=0.01), two_sub_epochs(), mode)


@pytest.mark.parametrize("mode", MODES)
def test_mixed_precision(mode):
    make = mlp_recipe(autocast="bfloat16")
    trial = assert_equal_to_plain(make, two_sub_epochs(), mode)
    full = assert_equal_to_plain(mlp_recipe(), two_sub_epochs(), mode)
    assert trial.shards[0][0] != full.shards[0][0], "it computes in another precision"
    (crossing,) = trial.cut_model.graphs.train[1].crossing
    assert crossing.dtype == "bfloat16", "what crosses has half the bytes"


def test_mixed_precision_with_batch_norm_and_long_skips():
    def make() -> Recipe:
        recipe = resnet_recipe(3)()
        return Recipe(recipe.model, recipe.optimizer, recipe.loss, shards=3, autocast="bfloat16")

    assert_equal_to_plain(make, [zoo.singly(zoo.images(6, 6, 4))] * 2)


@pytest.mark.parametrize("model", [None, first_layer_frozen], ids=["all", "frozen"])
def test_moving_averages_are_torchs_own_and_hop(model):
    assert_equal_to_plain(mlp_recipe(ema=0.9, model=model), two_sub_epochs())


def test_evaluation_uses_the_moving_averages():
    recipe = mlp_recipe(ema=0.5)()
    windows = two_sub_epochs()[0]
    _, training = plain.train(recipe, [windows])
    trial = start(mlp_recipe(ema=0.5)(), windows)
    trial.train(windows)
    batches = zoo.vectors(8, 5, seed=9)
    found = trial.evaluate(batches)
    assert found == training.evaluate(batches)
    live = mlp_recipe()()
    live.model.load_state_dict(recipe.model.state_dict())
    assert found != PlainTrainer(live, 0, 4).evaluate(batches)


def flips(batch, training):
    if training:
        signs = torch.randint(2, (len(batch["x"]), 1)) * 2.0 - 1.0
        batch["x"] = batch["x"] * signs
    return batch


COLUMNS = Columns(("x",), ("y",))


@pytest.mark.parametrize("mode", MODES)
def test_augmentation_is_seeded_by_key(mode):
    def make(**rules) -> Recipe:
        return mlp_recipe(**rules)().bind(COLUMNS)

    trial = assert_equal_to_plain(lambda: make(collate=flips), two_sub_epochs(), mode)
    without = assert_equal_to_plain(make, two_sub_epochs(), mode)
    assert trial.shards[0][0] != without.shards[0][0]


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda batch, training: {"x": batch["x"]}, "without a tensor for column 'y'"),
        (lambda batch, training: batch["x"], "collate returned Tensor without"),
        (lambda batch, training: {k: v[1:] for k, v in batch.items()}, r"for a batch of 8 rows"),
    ],
)
def test_a_collate_that_loses_something_is_refused(collate, message):
    with pytest.raises(ConfigurationError, match=message):
        start(mlp_recipe(collate=collate)().bind(COLUMNS), two_sub_epochs()[0])


class Mean(nn.Module):
    """Takes sequences of any length from two on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        y = torch.tanh(self.a(x.unsqueeze(-1)))
        return self.c(torch.tanh(self.b(y)).mean(1))


def shortened(batch, training):
    return batch | {"x": batch["x"][:, : 2 + len(batch["x"]) % 4]}


def test_batches_may_differ_in_length():
    def make() -> Recipe:
        torch.manual_seed(0)
        model = Mean()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        recipe = Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=3, collate=shortened)
        return recipe.bind(COLUMNS)

    trial = assert_equal_to_plain(
        make, [zoo.singly(zoo.vectors(8, 7, 6)), zoo.singly(zoo.vectors(5))]
    )
    shapes = trial.admission.report.shards[1].receives[0].shape
    assert shapes[:2] == (None, None)


def test_a_length_that_the_graph_can_not_take_is_refused():
    recipe = mlp_recipe(collate=lambda batch, training: batch, cut="export")().bind(COLUMNS)
    trial = start(recipe, two_sub_epochs()[0])
    with pytest.raises(ConfigurationError, match=r"can't take: input.shape\[1\] == 6"):
        trial.train(zoo.singly(zoo.vectors(8, features=7)))


def epochs(recipe: Recipe, metrics: list[dict[str, float]]) -> list[float]:
    """Return the learning rate after each epoch, which is one sub-epoch here."""
    windows = zoo.singly(zoo.vectors(8, 8))
    trial = start(recipe, windows)
    rates = []
    for before in [None, *metrics]:
        engine = trial.engine()
        totals = engine.train(windows, trial.step, trial.need, trial.publish, epoch_metrics=before)
        trial.step += totals.steps
        rates.append(trial.cursor(1)["groups"][0]["lr"])
    return rates


def test_a_scheduler_per_epoch_steps_when_an_epoch_begins():
    recipe = mlp_recipe(lr_scheduler=lambda o: lrs.StepLR(o, 1, gamma=0.5), lr_interval="epoch")()
    assert epochs(recipe, [{"val_loss": 1.0}] * 3) == [0.01, 0.005, 0.0025, 0.00125]


def test_a_scheduler_on_a_metric_sees_it():
    def plateau(optimizer):
        return lrs.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)

    measured = [{"val_loss": 1.0}, {"val_loss": 0.5}, {"val_loss": 0.6}, {"val_loss": 0.4}]
    rates = epochs(mlp_recipe(lr_scheduler=plateau)(), measured)
    assert all(map(math.isclose, rates, [0.01, 0.01, 0.01, 0.001, 0.001]))
    rates = epochs(mlp_recipe(lr_scheduler=plateau)(), [{"train_loss": 1.0}] * 2)
    assert all(map(math.isclose, rates, [0.01, 0.01, 0.001]))


def test_sample_weights_weigh_the_loss_of_each_row():
    g = torch.Generator().manual_seed(0)
    features, labels, weights = (
        torch.randn(8, 6, generator=g), torch.randint(3, (8,), generator=g),
        torch.rand(8, generator=g),
    )  # fmt: skip
    recipe = mlp_recipe()().bind(Columns(("x",), ("y",), "w"))
    outputs = recipe.model.eval()(features)
    rows = nn.functional.cross_entropy(outputs, labels, reduction="none")
    assert torch.equal(recipe.compute_loss(outputs, (labels, weights)), (rows * weights).mean())
    ones = recipe.compute_loss(outputs, (labels, torch.ones(8)))
    assert torch.allclose(ones, nn.CrossEntropyLoss()(outputs, labels))
    own = Recipe(recipe.model, recipe.optimizer, lambda out, y: out.mean())
    with pytest.raises(ConfigurationError, match="one value per row"):
        own.bind(Columns(("x",), ("y",), "w")).compute_loss(outputs, (labels, weights))


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.2, weight=torch.tensor([0.2, 1.0, 3.0])),
        nn.MultiMarginLoss(),
        lambda outputs, labels: nn.functional.cross_entropy(outputs * 2, labels),
    ],
    ids=["smoothed and weighed by class", "margin", "function"],
)
def test_any_loss(loss):
    def make() -> Recipe:
        recipe = mlp_recipe()()
        return Recipe(recipe.model, recipe.optimizer, loss, shards=3)

    assert_equal_to_plain(make, two_sub_epochs())
