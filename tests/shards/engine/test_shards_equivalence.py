"""Cut training equals plain training in every bit, with a hop through bytes at every sub-epoch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from cerebro_hydra.recipe import Recipe
from tests.shards import plain, zoo
from tests.shards.hopping import assert_equal_to_plain

MODES = ["keep", "recompute"]


def mlp_recipe(optimizer=None, shards=3, model=None, **rules):
    """Return a factory of equal recipes over the MLP; `optimizer` is a function of the model."""

    def make() -> Recipe:
        torch.manual_seed(3)
        built = (model or zoo.mlp)()
        chosen = optimizer(built) if optimizer else torch.optim.AdamW(built.parameters(), lr=1e-2)
        return Recipe(built, chosen, nn.CrossEntropyLoss(), shards=shards, **rules)

    return make


def two_sub_epochs():
    return [zoo.singly(zoo.vectors(8, 8, 5)), zoo.singly(zoo.vectors(8, 5, seed=1))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 99])
def test_any_number_of_shards_gives_the_same_bits(shards, mode):
    trial = assert_equal_to_plain(
        mlp_recipe(shards=shards),
        two_sub_epochs(),
        mode,
        cut="modules" if shards == 1 else "export",
    )
    assert trial.cut_model.num_shards == (shards if shards < 99 else 4)


def by_groups(model, cls=torch.optim.AdamW, **options):
    early = [p for n, p in model.named_parameters() if n.startswith("0")]
    late = [p for n, p in model.named_parameters() if not n.startswith("0")]
    return cls(
        [{"params": late, "lr": 0.03, "weight_decay": 0.1}, {"params": early, "lr": 0.001}],
        lr=0.01, **options,
    )  # fmt: skip


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.01),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "sgd fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
    "groups": by_groups,
    "groups sgd": lambda m: by_groups(m, torch.optim.SGD, momentum=0.5),
    "named": lambda m: torch.optim.AdamW(m.named_parameters(), lr=0.01),
    "some": lambda m: torch.optim.SGD(m[3].parameters(), lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_hops_without_losing_a_bit(name):
    assert_equal_to_plain(mlp_recipe(OPTIMIZERS[name]), two_sub_epochs())


SCHEDULERS = {
    "step": lambda o: lrs.StepLR(o, 2, gamma=0.5),
    "multi step": lambda o: lrs.MultiStepLR(o, [1, 3], gamma=0.3),
    "one cycle": lambda o, steps: lrs.OneCycleLR(o, max_lr=0.1, total_steps=3 * steps),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 5),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=2), lrs.ExponentialLR(o, 0.9)], milestones=[2]
    ),
}


@pytest.mark.parametrize("optimizer", [None, by_groups], ids=["adamw", "groups"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_one_scheduler_per_shard_is_one_scheduler(name, optimizer):
    assert_equal_to_plain(mlp_recipe(optimizer, lr_scheduler=SCHEDULERS[name]), two_sub_epochs())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [0.05, 1e6])
def test_clipping_sees_the_norm_of_the_whole_model(limit, mode):
    assert_equal_to_plain(mlp_recipe(clip_grad_norm=limit), two_sub_epochs(), mode)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("mode", MODES)
def test_accumulation_weighs_by_rows_and_flushes_an_uneven_window(mode, clip):
    a, b = zoo.vectors(8, 8, 5, 8), zoo.vectors(8, 5, 8, seed=1)
    sub_epochs = [[a[:3], a[3:]], [b[:2], b[2:]]]
    make = mlp_recipe(accumulate=3, clip_grad_norm=clip)
    assert_equal_to_plain(make, sub_epochs, mode)


def resnet_recipe(shards, accumulate=1):
    def make() -> Recipe:
        torch.manual_seed(4)
        model = zoo.LongSkips()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return Recipe(
            model, optimizer, nn.CrossEntropyLoss(), shards=shards, clip_grad_norm=1.0,
            lr_scheduler=lambda o: lrs.StepLR(o, 2), metrics=["accuracy"], accumulate=accumulate,
        )  # fmt: skip

    return make


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shards", [2, 3, 5])
def test_batch_norm_and_long_skips(shards, mode):
    sub_epochs = [zoo.singly(zoo.images(6, 6, 4)), zoo.singly(zoo.images(6, 4, seed=1))]
    trial = assert_equal_to_plain(resnet_recipe(shards), sub_epochs, mode)
    assert trial.cut_model.num_shards == shards
    crossing = [len(shard_graph.live_in) for shard_graph in trial.cut_model.graphs.train]
    assert max(crossing) >= 2, "long skips pass through shards"


@pytest.mark.parametrize("mode", MODES)
def test_batch_norm_moves_once_per_microbatch_when_accumulating(mode):
    images = zoo.images(6, 6, 4)
    assert_equal_to_plain(resnet_recipe(3, accumulate=3), [[images], [images[1:]]], mode)


def language_recipe(shards=3, **rules):
    def make() -> Recipe:
        torch.manual_seed(5)
        model = zoo.Language()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return Recipe(model, optimizer, zoo.language_loss, shards=shards, **rules)

    return make


@pytest.mark.parametrize("mode", MODES)
def test_tied_embeddings_with_accumulation_and_clipping(mode):
    a, b = zoo.tokens(4, 4, 3), zoo.tokens(4, 3, seed=1)
    make = language_recipe(accumulate=2, clip_grad_norm=0.5)
    trial = assert_equal_to_plain(make, [[a[:2], a[2:]], [b]], mode)
    name = "gpt.transformer.wte.weight"
    assert trial.cut_model.tied == {name: (0, 2)}
    held = [e.name for s in trial.layout.shards for e in s.trainable.entries]
    assert held.count(f"param:{name}") == 1
    assert "param:gpt.lm_head.weight" not in held


def test_tied_embeddings_without_accumulation():
    assert_equal_to_plain(language_recipe(4), [zoo.singly(zoo.tokens(4, 3))] * 2)


def first_layer_frozen():
    model = zoo.mlp()
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_layer_keeps_its_bytes_and_has_no_optimizer_state(mode):
    make = mlp_recipe(model=first_layer_frozen, clip_grad_norm=0.5)
    trial = assert_equal_to_plain(make, two_sub_epochs(), mode)
    frozen = [[e.name for e in s.frozen.entries] for s in trial.layout.shards]
    assert frozen[0] == ["param:0.weight", "param:0.bias"]
    assert not any(frozen[1:])
    assert not any("optim:0." in e.name for s in trial.layout.shards for e in s.trainable.entries)


def middle_frozen():
    model = zoo.mlp()
    model[3].requires_grad_(False)
    return model


def test_a_frozen_layer_in_the_middle_passes_gradients_on():
    assert_equal_to_plain(mlp_recipe(model=middle_frozen), two_sub_epochs(), "recompute")


class SharedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.drop(self.first(x))
        if self.training:
            x = x + torch.rand_like(x)  # between units, goes on with drop's
        x = self.drop(self.first(x)).tanh()
        return self.last(self.drop(self.first(x)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shards", [["drop"], ["drop", "last"], 4, 7])
def test_a_layer_that_is_called_again_is_reseeded_by_its_call(shards, mode):
    def make() -> Recipe:
        torch.manual_seed(6)
        model = SharedLayer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=shards, accumulate=2)

    a = zoo.vectors(8, 5)
    trial = assert_equal_to_plain(make, [[a], zoo.singly(a)], mode)
    assert trial.cut_model.tied


def test_evaluation_equals_plain_evaluation_and_leaves_the_state_alone():
    make = resnet_recipe(3)
    batches = zoo.images(6, 4)
    reference = make()
    _, training = plain.train(reference, [zoo.singly(batches)])
    trial = assert_equal_to_plain(make, [zoo.singly(batches)])
    before = [content for content, _ in trial.shards]
    trial.events.clear()
    found = trial.evaluate(batches)
    assert found == training.evaluate(batches)
    assert set(found.sums) == {"loss", "accuracy"}
    assert trial.events == ["need0", "need1", "need2"]
    assert before == [content for content, _ in trial.shards]
