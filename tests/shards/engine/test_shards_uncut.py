"""A trial trained uncut has the bits of its shards, and one plain step shows where they differ."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from torch.optim import lr_scheduler as lrs

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut.model import CutModelCache
from cerebro_hydra.shards.engine.differences import first_difference
from cerebro_hydra.shards.engine.layout import in_place, on_host
from cerebro_hydra.shards.engine.uncut import uncut_training
from tests.shards import zoo
from tests.shards.engine.test_shards_equivalence import (
    first_layer_frozen,
    language_recipe,
    mlp_recipe,
    resnet_recipe,
    two_sub_epochs,
)
from tests.shards.hopping import Trial, start

VECTORS = two_sub_epochs()
IMAGES = [zoo.singly(zoo.images(6, 6, 4)), zoo.singly(zoo.images(6, 6, 4, seed=1))]
TEXT = [zoo.singly(zoo.tokens(4, 4)), zoo.singly(zoo.tokens(4, 4, seed=1))]
PAIRS = [[zoo.vectors(8, 8), zoo.vectors(8, 5, seed=s)] for s in range(2)]


def cosine(optimizer):
    return lrs.CosineAnnealingLR(optimizer, T_max=9)


CASES: dict[str, tuple[Callable[[], Recipe], list]] = {
    "dropout": (mlp_recipe(), VECTORS),
    "moving average, frozen layer": (mlp_recipe(ema=0.9, model=first_layer_frozen), VECTORS),
    "accumulation, clipping, schedule": (
        mlp_recipe(accumulate=2, clip_grad_norm=0.1, lr_scheduler=cosine),
        PAIRS,
    ),
    "norms of batches": (resnet_recipe(3), IMAGES),
    "tied weights": (language_recipe(), TEXT),
}


def trained(
    make: Callable[[], Recipe],
    sub_epochs: list,
    cut: str,
    uncut: tuple[bool, ...],
    cache: CutModelCache | None = None,
) -> Trial:
    """Train sub-epochs as one model or in shards, each on what the one before left."""
    recipe = make()
    recipe.cut = cut
    trial = start(recipe, [w for windows in sub_epochs for w in windows], cache=cache)
    for windows, whole in zip(sub_epochs, uncut, strict=True):
        (train_uncut if whole else Trial.train)(trial, windows)
    return trial


def train_uncut(trial: Trial, windows: list, recipe: Recipe | None = None) -> None:
    """Train a sub-epoch of a trial as one model, its own or another."""
    numbers = range(trial.cut_model.num_shards)
    given, cursors = zip(*map(trial.need, numbers), strict=True)
    segments = [in_place(each) for each in given]
    with uncut_training(
        trial.runtime(recipe), [*map(on_host, segments)], cursors[0], trial.step
    ) as training:
        for window in windows:
            losses = training.step(window)
            rows = [batch.rows for batch in window]
            total = sum(loss * n for loss, n in zip(losses, rows, strict=True))
            trial.losses.append(total / sum(rows))
        training.check_unwritten()
        trial.step += len(windows)
        for k in numbers:
            trial.publish(k, segments[k], training.cursor())


@pytest.mark.parametrize(
    ("case", "cut"),
    [*((case, "modules") for case in CASES), ("dropout", "export"), ("norms of batches", "export")],
)
def test_segments_cursors_and_measures_are_those_of_the_shards(case: str, cut: str) -> None:
    make, sub_epochs = CASES[case]
    cache = CutModelCache()  # measures once, so that all cuts are the same
    cutting = trained(make, sub_epochs, cut, (False, False), cache)
    assert cutting.cut_model.num_shards > 1
    for uncut in [(True, True), (False, True)]:
        other = trained(make, sub_epochs, cut, uncut, cache)
        assert other.shards == cutting.shards
        assert other.losses == cutting.losses


def plain_difference(
    make: Callable[[], Recipe], sub_epochs: list, change: Callable[[Trial], None] = lambda t: None
) -> str | None:
    """Train a sub-epoch, then one more step in shards, and compare that with a plain one."""
    trial = trained(make, sub_epochs[:1], "modules", (False,))
    (window, *_) = sub_epochs[1]
    uncut = copy.copy(trial)
    uncut.shards, uncut.losses = list(trial.shards), []
    train_uncut(uncut, [window], make())
    trial.train([window])
    change(trial)
    assert trial.losses[-1] == uncut.losses[-1]
    after = [trial.need(k)[0] for k in range(trial.cut_model.num_shards)]
    return first_difference(trial.layout, after, uncut.tensors())


@pytest.mark.parametrize("case", CASES)
def test_a_plain_step_from_the_middle_of_training_has_the_same_bits(case: str) -> None:
    assert plain_difference(*CASES[case]) is None


def flipped(trial: Trial, shard: int, name: str) -> None:
    """Change the lowest bit of a tensor in a segment."""
    layout = trial.layout.shards[shard].trainable
    (entry,) = [e for e in layout.entries if e.name == name]
    content, cursor = trial.shards[shard]
    changed = bytearray(content["trainable"])
    changed[entry.offset] ^= 1
    trial.shards[shard] = {**content, "trainable": bytes(changed)}, cursor


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("param:0.weight", "parameter '0.weight'"),
        ("ema:0.weight", "moving average of '0.weight'"),
        ("optim:0.weight:exp_avg", "optimizer state 'exp_avg' of '0.weight'"),
    ],
)
def test_one_wrong_bit_is_named(name: str, told: str) -> None:
    make = mlp_recipe(ema=0.9)
    assert plain_difference(make, VECTORS, lambda trial: flipped(trial, 0, name)) == told
