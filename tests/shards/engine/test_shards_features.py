"""What features of training do to a cut; their bits are proved with every executor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, PlainTrainer, Recipe
from cerebro_hydra.shards.engine import barrier
from cerebro_hydra.shards.engine.differences import contents, first_difference
from tests.shards import zoo
from tests.shards.executors.executor_case import Proof, assert_equal_to_plain, proof
from tests.shards.hopping import start
from tests.shards.trials import (
    TRIALS,
    VECTORS,
    bound,
    by_groups,
    mlp_recipe,
    two_sub_epochs,
)


class WarmsUp(lrs.LRScheduler):
    """Steps another scheduler after its first steps, as GradualWarmupScheduler does."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: lrs.LRScheduler) -> None:
        self.after, self.is_over = after, False
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.is_over = self.last_epoch >= 3
        return [base * (1 + self.last_epoch) / 4 for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        self.after.step() if self.is_over else super().step()


SCHEDULERS = {
    "another": lambda o: WarmsUp(
        o,
        lrs.SequentialLR(
            o, [lrs.CosineAnnealingLR(o, 5), lrs.ExponentialLR(o, 0.9)], milestones=[2]
        ),
    ),
    "step": lambda o: lrs.StepLR(o, 2, gamma=0.5),
    "multi step": lambda o: lrs.MultiStepLR(o, [1, 3], gamma=0.3),
    "one cycle": lambda o, steps: lrs.OneCycleLR(o, max_lr=0.1, total_steps=3 * steps),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 5),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=2), lrs.ExponentialLR(o, 0.9)], milestones=[2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_one_scheduler_per_shard_is_one_scheduler(name):
    make = mlp_recipe(by_groups, lr_scheduler=SCHEDULERS[name])
    assert_equal_to_plain(make, two_sub_epochs(), "modules")


def cut_of(name: str):
    return proof(name, "export").trial.cut_model


def segments_of(name: str, cut: str = "modules", which: str = "trainable") -> list[list[str]]:
    """Return the names of what a segment of each shard has."""
    shards = proof(name, cut).trial.layout.shards
    return [[entry.name for entry in getattr(shard, which).entries] for shard in shards]


def test_what_crosses_a_cut():
    for name, shards in (("resnet", 3), ("resnet, in five", 5)):
        assert cut_of(name).num_shards == shards
        crossing = [len(graph.live_in) for graph in cut_of(name).graphs.train]
        assert max(crossing) >= 2, "long skips pass through shards"
    (crossing,) = cut_of("mlp, bfloat16").graphs.train[1].crossing
    assert crossing.dtype == "bfloat16", "what crosses has half the bytes"
    shapes = proof("mlp, of lengths", "export").trial.admission.report.shards[1].receives[0].shape
    assert shapes[:2] == (None, None)


def test_a_tied_weight_lies_in_one_shard_and_a_frozen_one_in_no_trainable_segment():
    embeddings = "gpt.transformer.wte.weight"
    assert cut_of("gpt2, accumulated, clipped").tied == {embeddings: (0, 2)}
    held = [name for names in segments_of("gpt2, accumulated, clipped") for name in names]
    assert held.count(f"param:{embeddings}") == 1
    assert "param:gpt.lm_head.weight" not in held
    assert all(cut_of(f"layer thrice{more}").tied for more in ("", ", in three", ", in all"))
    frozen = segments_of("mlp, frozen first, clipped", which="frozen")
    assert frozen == [["param:0.weight", "param:0.bias"], [], []]
    held = [name for names in segments_of("mlp, frozen first, clipped") for name in names]
    assert not any("optim:0." in name for name in held)


@pytest.mark.parametrize("name", ["bfloat16", "augmented"])
def test_a_feature_has_an_effect(name):
    assert (
        proof(f"mlp, {name}", "modules").left[0][0] != proof("mlp, dropout", "modules").left[0][0]
    )


def test_evaluation_uses_the_moving_averages():
    each = proof("mlp, frozen first, average", "modules")
    batches = zoo.vectors(8, 5, seed=9)
    live = TRIALS["mlp, frozen first, average"].recipe()
    live.model.load_state_dict(each.reference.recipe.model.state_dict())
    assert each.reference.evaluate(batches) != PlainTrainer(live, 0, 4).evaluate(batches)


def test_a_length_that_the_graph_can_not_take_is_refused():
    make = bound(mlp_recipe(collate=lambda batch, training: batch, cut="export"))
    trial = start(make(), VECTORS[0])
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
    (batch,) = zoo.vectors(8)
    (features,), (labels,), weights = batch.features, batch.labels, torch.rand(8)
    recipe = mlp_recipe()().bind(Columns(("x",), ("y",), "w"))
    outputs = recipe.model.eval()(features)
    rows = nn.functional.cross_entropy(outputs, labels, reduction="none")
    assert torch.equal(recipe.compute_loss(outputs, (labels, weights)), (rows * weights).mean())
    ones = recipe.compute_loss(outputs, (labels, torch.ones(8)))
    assert torch.allclose(ones, nn.CrossEntropyLoss()(outputs, labels))
    own = Recipe(recipe.model, recipe.optimizer, lambda out, y: out.mean())
    with pytest.raises(ConfigurationError, match="one value per row"):
        own.bind(Columns(("x",), ("y",), "w")).compute_loss(outputs, (labels, weights))


@pytest.mark.parametrize("shape", [(8, 1), (8, 8)])
def test_a_sample_weight_that_would_be_paired_with_every_row_is_refused(shape):
    (batch,) = zoo.vectors(8)
    recipe = mlp_recipe()().bind(Columns(("x",), ("y",), "w"))
    outputs = recipe.model.eval()(*batch.features)
    with pytest.raises(ConfigurationError, match=r"has shape \(8, [18]\); give one number per row"):
        recipe.compute_loss(outputs, (*batch.labels, torch.rand(shape)))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("param:0.weight", "parameter '0.weight'"),
        ("ema:0.weight", "moving average of '0.weight'"),
        ("optim:0.weight:exp_avg", "optimizer state 'exp_avg' of '0.weight'"),
        (None, None),
    ],
)
def test_one_wrong_bit_is_named(name: str | None, told: str | None) -> None:
    """The control of all comparisons: one bit of one tensor differs, or none."""
    each = Proof(mlp_recipe(ema=0.9), two_sub_epochs(), "modules")
    trial = each.trial
    for windows in each.sub_epochs:
        trial.train(windows)
    if name is not None:
        (entry,) = [e for e in trial.layout.shards[0].trainable.entries if e.name == name]
        content, cursor = trial.shards[0]
        changed = bytearray(content["trainable"])
        changed[entry.offset] ^= 1
        trial.shards[0] = {**content, "trainable": bytes(changed)}, cursor
        with pytest.raises(AssertionError, match="other bits than plain training"):
            each.check(each.sums)
    after = [trial.need(k)[0] for k in range(trial.cut_model.num_shards)]
    assert first_difference(trial.layout, after, contents(each.reference.tensors())) == told


DTYPES = (torch.float32, torch.complex64, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("seed", range(40))
def test_shards_clip_by_the_norm_that_torch_finds_whatever_the_types_of_gradients(seed):
    """A sum in another order differs in its last bit for some values only, so many are tried."""
    generator = torch.Generator().manual_seed(seed)
    layers: dict[str, nn.Parameter] = {}
    for number in range(8):
        dtype = DTYPES[int(torch.randint(4, (), generator=generator))]
        layers[str(number)] = nn.Parameter(torch.zeros(5, 7, dtype=dtype))
        gradient = torch.randn(5, 7, dtype=torch.complex64, generator=generator)
        layers[str(number)].grad = (
            gradient if dtype.is_complex else gradient.real.contiguous()
        ).to(dtype)
    gradients = {name: p.grad.clone() for name, p in layers.items()}
    nn.utils.clip_grad_norm_(layers.values(), 0.3)
    expected = {name: p.grad for name, p in layers.items()}

    norms: dict[str, torch.Tensor] = {}
    for name, p in layers.items():  # a shard each
        p.grad = gradients[name]
        norms |= barrier.grad_norms({name: p})
    dtypes = {name: p.dtype for name, p in layers.items()}
    barrier.scale_grads(layers, barrier.clip_coefficient(norms, dtypes, 0.3))
    for name, p in layers.items():
        assert p.grad is not None
        assert torch.equal(p.grad, expected[name]), name


@pytest.mark.parametrize("clip", [None, 1.0])
def test_replicas_take_norms_only_where_one_clips(clip: float | None) -> None:
    recipe = mlp_recipe(replicas=2, shards=1, clip_grad_norm=clip)()
    trial = start(recipe, zoo.singly(zoo.vectors(8, 5)))
    params = dict(recipe.model.named_parameters())
    for each in params.values():
        each.grad = torch.ones_like(each)
    norms = barrier.Barrier(recipe, trial.cut_model).facts(params, None).norms
    assert norms.keys() == (params.keys() if clip else set())
