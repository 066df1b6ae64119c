"""Replicas have the bits of one process that trains over their batches by turns."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cerebro_hydra.data.batches import replica_windows
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.replicas.gradient_chain import GradientChain
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import trials, zoo
from tests.shards.replicas.ranks import LateLinks, train_plainly, train_ranks


class Notebook(nn.Module):
    """Reads in its forward what forwards before it have written, and assigns a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x)) * self.seen
        if self.training:
            self.seen = 0.9 * self.seen + h.detach().mean(0)
        return self.last(h)


class Opens(nn.Module):
    """Has a layer with buffers to which the forward before it writes in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None)
        self.last = nn.Linear(8, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            if self.steps in (3, 4):  # behind admission, and not in a rank's first round
                self.gate.reset_running_stats()
        h = self.gate(torch.relu(self.first(x)))
        return self.last(h * (1 + self.gate.running_mean))


class Twice(nn.Module):
    """Uses a weight twice, maybe under reentrant checkpoints, and has one with no part in it."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.idle = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 6)
        self.reentrant = reentrant

    def half(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(nn.functional.linear(x, self.first.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.reentrant:
            return self.last(self.half(self.half(x)))
        x = x.detach().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.half, x, use_reentrant=True)
        return self.last(x)


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3),
    )  # fmt: skip


THREE = [
    [zoo.vectors(8, 8, 8, 5, seed=1), zoo.vectors(8, 3, seed=2), zoo.vectors(8, 8, 7, seed=3)],
    [zoo.vectors(8, seed=4), zoo.vectors(8, 8, 8, seed=5), zoo.vectors(5, 6, seed=6)],
]
"""Two sub-epochs over three partitions, each time with another one that drops out first."""
TWO = [each[:2] for each in THREE]
ALIKE = [[zoo.vectors(8, 8, 8, seed=1), zoo.vectors(8, 8, 8, seed=2)]]
EVEN = [[zoo.vectors(8, 8, seed=1), zoo.vectors(8, 3, seed=2)]]

CASES = {
    "dropout": (trials.mlp_recipe(shards=1), TWO),
    "three, in two shards, clipped": (trials.mlp_recipe(shards=["3"], clip_grad_norm=0.05), THREE),
    "three, accumulated, average": (
        trials.mlp_recipe(shards=1, accumulate=2, ema=0.9, clip_grad_value=0.01), THREE,
    ),
    "three, BatchNorm, accumulated": (
        trials.recipe_of(norms, shards=1, accumulate=2, ema=0.8), THREE,
    ),
    "BatchNorm, in two shards": (trials.recipe_of(norms, shards=["4"]), TWO),
    "buffers of a shard to come": (trials.recipe_of(Opens, shards=["gate", "last"]), ALIKE),
    "buffers that forwards read": (trials.recipe_of(Notebook, shards=1), THREE),
    "used twice, and not at all": (trials.recipe_of(Twice, shards=1, accumulate=2), THREE),
    "first layer frozen": (
        trials.mlp_recipe(model=trials.first_layer_frozen, shards=1,
                          optimizer=lambda m: torch.optim.SGD(
                              [p for p in m.parameters() if p.requires_grad], 0.1, momentum=0.9)),
        TWO,
    ),
    "float16, scaled": (
        trials.mlp_recipe(shards=1, autocast="float16", grad_scaler=trials.scaler(7e5)), TWO,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_replicas_have_the_bits_of_one_process(case: str) -> None:
    make, sub_epochs = CASES[case]
    ranks, losses = train_ranks(with_replicas(make, len(sub_epochs[0])), sub_epochs)
    reference = train_plainly(make, sub_epochs)
    for rank in ranks:
        assert_same_state(rank.tensors(), reference)
    assert all(len(each) == len(sub_epochs) for each in losses)


@pytest.mark.parametrize("late", [0, 1])
def test_a_thread_that_is_late_from_sending_counts_for_its_own_round(late: int) -> None:
    """Else a later round waits for ever, or ends before its gradients are added."""
    make, sub_epochs = CASES["three, accumulated, average"]
    ranks = train_ranks(with_replicas(make, 3), sub_epochs, partial(LateLinks, late))[0]
    assert_same_state(ranks[0].tensors(), train_plainly(make, sub_epochs))


def with_replicas(make: trials.Make, replicas: int) -> trials.Make:
    def made() -> object:
        recipe = make()
        recipe.replicas = replicas
        return recipe

    return made


class WithMomentum(nn.Module):
    """Has a frozen layer that follows another one in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.slow = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.slow.weight.lerp_(self.own.weight, 0.1)
        return self.own(x) + self.slow(x)


def test_a_momentum_encoder_in_replicas_fails_by_its_name() -> None:
    make = trials.recipe_of(WithMomentum, shards=1)
    with pytest.raises(ConfigurationError, match=r"writes to the frozen parameter 'slow\.weight'"):
        train_ranks(with_replicas(make, 2), TWO[:1])


class Scales(nn.Module):
    """Writes to a weight that trains, by its rows in its first step or the same in each."""

    def __init__(self, *, by_rows: bool) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(6))
        self.by_rows = by_rows
        self.register_buffer("begun", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.by_rows:
            self.scale.data.clamp_(max=0.9)
        elif self.training and not self.begun:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0) + 0.1))
                self.begun.fill_(1)
        return self.layer(x * self.scale)


@pytest.mark.parametrize("parts", [TWO, THREE])
def test_a_forward_that_writes_to_a_parameter_by_its_rows_is_told_by_its_name(parts) -> None:
    make = trials.recipe_of(partial(Scales, by_rows=True), shards=1)
    told = r"^the forward writes to parameter 'scale', .* each replica does so with its own rows"
    with pytest.raises(ConfigurationError, match=told):
        train_ranks(with_replicas(make, len(parts[0])), parts[:1])


def test_a_forward_that_writes_the_same_to_a_parameter_trains_in_replicas() -> None:
    make = trials.recipe_of(partial(Scales, by_rows=False), shards=1)
    ranks, _ = train_ranks(with_replicas(make, 2), EVEN)
    assert_same_state(ranks[0].tensors(), train_plainly(make, EVEN))
    assert_same_state(ranks[1].tensors(), ranks[0])


def test_a_parameter_that_gets_two_gradients_in_one_backward_is_refused() -> None:
    make = trials.recipe_of(partial(Twice, reentrant=True), shards=1)
    with pytest.raises(
        ConfigurationError, match=r"parameter .first\.weight. got two gradients in one"
    ):
        train_ranks(with_replicas(make, 2), TWO[:1])


def test_the_order_of_ranks_is_part_of_the_result() -> None:
    make, sub_epochs = CASES["three, in two shards, clipped"]
    turned = [[parts[1], parts[2], parts[0]] for parts in sub_epochs]
    one, other = (train_plainly(make, each).tensors() for each in (sub_epochs, turned))
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_windows_are_rounds_of_all_that_have_a_batch_left() -> None:
    parts = ["abcd", "x", "pqr"]
    windows = ["".join(each) for each in replica_windows([iter(each) for each in parts], 2)]
    assert windows == ["axpbq", "crd"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_chain_knows_where_windows_begin_and_end(accumulate: int) -> None:
    cut = train_ranks(with_replicas(trials.mlp_recipe(shards=1), 2), [TWO[1]])[0][0]
    chain = partial(GradientChain, layout=cut.layout, accumulate=accumulate, rounds=3)
    first, last = (chain(type("Links", (), {"rank": r, "ranks": 2})()) for r in (0, 1))
    assert [first.begins(n) for n in range(3)] == [n % accumulate == 0 for n in range(3)]
    assert not any(last.begins(n) for n in range(3))
    assert [first.ends_window(n) for n in range(3)] == [accumulate == 1, True, True]
