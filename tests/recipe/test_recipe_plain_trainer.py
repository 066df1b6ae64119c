"""The definition of training against loops written out by hand, feature by feature, bit for bit.

Everything else is held against `PlainTrainer`, so these loops share nothing with it but torch and
the seeds of random keys: they read as a person would write the feature down.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.recipe import Columns, PlainTrainer, Recipe, mean, merge_evaluations

SEED = 7
STEPS_PER_EPOCH = 3


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def momentum(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(rows: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (rows,), generator=g)
    return Batch((torch.randn(rows, 4, generator=g),), (labels,), rows)


BATCHES = [batch(rows, seed) for seed, rows in enumerate((6, 6, 5))]
SINGLY = [[each] for each in BATCHES]


def trainer_of(model: nn.Module | None = None, **rules: object) -> PlainTrainer:
    model = net() if model is None else model
    recipe = Recipe(model, momentum(model), nn.CrossEntropyLoss(), **rules)  # type: ignore[arg-type]
    return PlainTrainer(recipe.bind(Columns(("x",), ("y",))), SEED, STEPS_PER_EPOCH)


def loss_of(model: nn.Module, given: Batch) -> Tensor:
    return F.cross_entropy(model(given.features[0]), given.labels[0])


def same(ours: nn.Module, by_hand: nn.Module) -> bool:
    """Whether all parameters and buffers are equal in every bit."""
    there = by_hand.state_dict()
    return all(torch.equal(tensor, there[name]) for name, tensor in ours.state_dict().items())


def test_a_step_is_forward_backward_update() -> None:
    trainer, model = trainer_of(), net()
    optimizer = momentum(model)
    total, losses = 0.0, []
    for each in BATCHES:
        optimizer.zero_grad()
        loss = loss_of(model, each)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        total += loss.item() * each.rows
    assert trainer.train(SINGLY) == (total, 17)
    assert len(set(losses)) == 3
    assert same(trainer.recipe.model, model)
    state = trainer.tensors()
    for name, parameter in model.named_parameters():
        assert torch.equal(state[f"param:{name}"], parameter)
        found = state[f"optim:{name}:momentum_buffer"]
        assert torch.equal(found, optimizer.state[parameter]["momentum_buffer"])
    assert torch.equal(state["buffer:1.running_mean"], model[1].running_mean)


def test_a_window_weighs_each_batch_by_its_rows() -> None:
    trainer, model = trainer_of(), net()
    optimizer = momentum(model)
    for window in (BATCHES, BATCHES[1:]):
        rows = sum(each.rows for each in window)
        optimizer.zero_grad()
        for each in window:
            (loss_of(model, each) * (each.rows / rows)).backward()
        optimizer.step()
    trainer.train([BATCHES, BATCHES[1:]])
    assert same(trainer.recipe.model, model)


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_gradients_are_clipped_as_a_whole_before_the_update(kind: str) -> None:
    trainer, model = trainer_of(**{f"clip_grad_{kind}": 0.02}), net()
    optimizer = momentum(model)
    for each in BATCHES:
        optimizer.zero_grad()
        loss_of(model, each).backward()
        parameters = list(model.parameters())
        if kind == "value":
            for parameter in parameters:
                parameter.grad.clamp_(-0.02, 0.02)
        else:
            norm = torch.stack([parameter.grad.norm(2) for parameter in parameters]).norm(2)
            for parameter in parameters:
                parameter.grad.mul_(torch.clamp(0.02 / (norm + 1e-6), max=1.0))
        optimizer.step()
    trainer.train(SINGLY)
    assert same(trainer.recipe.model, model)


def test_a_schedule_steps_after_every_update() -> None:
    def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> lrs.OneCycleLR:
        return lrs.OneCycleLR(optimizer, max_lr=0.5, total_steps=2 * steps)

    trainer, model = trainer_of(lr_scheduler=one_cycle), net()
    optimizer = momentum(model)
    schedule = lrs.OneCycleLR(optimizer, max_lr=0.5, total_steps=6)
    for each in BATCHES:
        optimizer.zero_grad()
        loss_of(model, each).backward()
        optimizer.step()
        schedule.step()
    trainer.train(SINGLY)
    assert same(trainer.recipe.model, model)
    assert trainer.recipe.optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]


@pytest.mark.parametrize("on_metric", [False, True])
def test_a_schedule_steps_when_a_later_epoch_begins(on_metric: bool) -> None:
    def make(optimizer: torch.optim.Optimizer) -> lrs.LRScheduler:
        if on_metric:
            return lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return lrs.StepLR(optimizer, 1, 0.5)

    trainer, model = trainer_of(lr_scheduler=make, lr_interval="epoch"), net()
    optimizer = momentum(model)
    rates = iter([0.1, 0.1, 0.05] if on_metric else [0.1, 0.05, 0.025])
    for before in (None, {"val_loss": 1.0}, {"val_loss": 2.0}):
        optimizer.param_groups[0]["lr"] = next(rates)
        for each in BATCHES:
            optimizer.zero_grad()
            loss_of(model, each).backward()
            optimizer.step()
        trainer.train(SINGLY, before)
        assert same(trainer.recipe.model, model)


class Drops(nn.Module):
    """Draws before its first unit, in a unit that it calls twice, and after its last unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.drop(x + torch.rand(4)) + x)
        return self.last(x) + torch.rand(3)


def test_random_numbers_restart_at_the_forward_and_at_every_unit() -> None:
    trainer, model = trainer_of(Drops()), Drops()
    optimizer = momentum(model)
    for step, window in enumerate([BATCHES[:2], BATCHES[2:]]):
        rows = sum(each.rows for each in window)
        optimizer.zero_grad()
        for microbatch, each in enumerate(window):
            key = (SEED, step, microbatch)
            torch.manual_seed(seed_of(*key, ""))
            x = each.features[0] + torch.rand(4)
            torch.manual_seed(seed_of(*key, "drop@0"))
            x = F.dropout(x, 0.5) + each.features[0]
            torch.manual_seed(seed_of(*key, "drop@1"))
            x = F.dropout(x, 0.5)
            torch.manual_seed(seed_of(*key, "last@0"))
            outputs = F.linear(x, model.last.weight, model.last.bias) + torch.rand(3)
            loss = F.cross_entropy(outputs, each.labels[0])
            (loss * (each.rows / rows) if len(window) > 1 else loss).backward()
        optimizer.step()
    torch.manual_seed(123)  # whatever was drawn before changes nothing
    trainer.train([BATCHES[:2], BATCHES[2:]])
    assert same(trainer.recipe.model, model)


def test_collate_draws_from_the_key_of_its_microbatch() -> None:
    def flips(given: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
        return given | {"x": given["x"] * torch.rand(4)} if training else given

    trainer, model = trainer_of(collate=flips), net()
    optimizer = momentum(model)
    for step, each in enumerate(BATCHES):
        optimizer.zero_grad()
        torch.manual_seed(seed_of(SEED, step, 0, "collate"))
        x = each.features[0] * torch.rand(4)
        F.cross_entropy(model(x), each.labels[0]).backward()
        optimizer.step()
    trainer.train(SINGLY)
    assert same(trainer.recipe.model, model)


def test_the_moving_average_starts_at_the_first_update_and_is_evaluated() -> None:
    trainer, model = trainer_of(ema=0.9), net()
    optimizer = momentum(model)
    average: dict[str, Tensor] = {}
    for each in BATCHES:
        optimizer.zero_grad()
        loss_of(model, each).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            if name in average:
                average[name].lerp_(parameter.detach(), 1 - 0.9)
            else:
                average[name] = parameter.detach().clone()
    trainer.train(SINGLY)
    assert same(trainer.recipe.model, model)
    state = trainer.tensors()
    assert all(torch.equal(state[f"ema:{name}"], tensor) for name, tensor in average.items())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(average[name])
        expected = loss_of(model.eval(), BATCHES[0]).item()
    assert trainer.evaluate(BATCHES[:1]).sums["loss"] == (expected * 6, 6)


def test_mixed_precision_is_autocast_around_forward_and_loss() -> None:
    trainer, model = trainer_of(autocast="bfloat16"), net()
    optimizer = momentum(model)
    for each in BATCHES:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = loss_of(model, each)
        loss.backward()
        optimizer.step()
    trainer.train(SINGLY)
    assert same(trainer.recipe.model, model)
    full = trainer_of()
    full.train(SINGLY)
    assert not same(full.recipe.model, model)


class Hits:
    """A custom metric: how many rows are right, of all rows."""

    def start(self) -> dict[str, int]:
        return {"hits": 0, "rows": 0}

    def update(self, state: dict[str, int], outputs: Tensor, labels: Tensor) -> dict[str, int]:
        hits = int((outputs.argmax(1) == labels).sum())
        return {"hits": state["hits"] + hits, "rows": state["rows"] + len(labels)}

    def merge(self, state: dict[str, int], other: dict[str, int]) -> dict[str, int]:
        return {name: state[name] + other[name] for name in state}

    def compute(self, state: dict[str, int]) -> float:
        return state["hits"] / state["rows"]


def test_evaluation_merges_partitions_by_rows_and_leaves_the_trial_alone() -> None:
    def error(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs.argmax(1) != labels).float().mean()

    trainer = trainer_of(metrics={"error": (error, "min"), "hits": (Hits(), "max")})
    trainer.train(SINGLY)
    model = copy.deepcopy(trainer.recipe.model).eval()
    sums, hits = {"loss": 0.0, "error": 0.0}, 0
    per_partition = []
    for partition in (BATCHES[:2], BATCHES[2:]):
        loss_sum = error_sum = 0.0
        for each in partition:
            with torch.no_grad():
                outputs = model(each.features[0])
                loss_sum += F.cross_entropy(outputs, each.labels[0]).item() * each.rows
                wrong = outputs.argmax(1) != each.labels[0]
            error_sum += int(wrong.sum())  # a share of hits is exact
            hits += int((~wrong).sum())
        sums["loss"], sums["error"] = sums["loss"] + loss_sum, sums["error"] + error_sum
        per_partition.append(loss_sum)
    before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    parts = [trainer.evaluate(BATCHES[:2]), trainer.evaluate(BATCHES[2:])]
    assert [part.sums["loss"] for part in parts] == list(zip(per_partition, (12, 5), strict=True))
    merged = merge_evaluations(trainer.recipe.state_metrics, parts)
    assert merged == {"loss": sums["loss"] / 17, "error": sums["error"] / 17, "hits": hits / 17}
    after = trainer.tensors()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    never_evaluated = trainer_of()
    never_evaluated.train([*SINGLY, *SINGLY])
    trainer.train(SINGLY)
    assert same(trainer.recipe.model, never_evaluated.recipe.model)
    assert mean([(1.0, 1), (5.0, 3)]) == 1.5


class Counts(nn.Module):
    """Its outputs depend on how many batches it has seen, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.last(x) * self.seen


def test_buffers_that_evaluation_writes_to_are_copies_of_each_partition() -> None:
    trainer, last = trainer_of(Counts()), Counts().last
    expected = 0.0
    for seen, each in enumerate(BATCHES[:2], start=1):
        with torch.no_grad():
            expected += F.cross_entropy(last(each.features[0]) * seen, each.labels[0]).item() * 6
    for _ in range(2):
        assert trainer.evaluate(BATCHES[:2]).sums["loss"] == (expected, 12)
    assert trainer.recipe.model.seen == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_training_before_the_update(bad: float) -> None:
    trainer = trainer_of()
    trainer.train(SINGLY[:1])
    before = {name: p.detach().clone() for name, p in trainer.recipe.model.named_parameters()}
    broken = Batch((BATCHES[0].features[0] * bad,), BATCHES[0].labels, 6)
    with pytest.raises(NonFiniteLoss, match="the loss is nan at step 1, batch 1 of its window"):
        trainer.train([[BATCHES[0], broken]])
    now = dict(trainer.recipe.model.named_parameters())
    assert all(torch.equal(tensor, now[name]) for name, tensor in before.items())
    with pytest.raises(NonFiniteLoss, match="validation loss of batch 1 is nan"):
        trainer_of().evaluate([BATCHES[0], broken])


def test_a_loss_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="depends on no trainable parameter"):
        trainer_of(net().requires_grad_(False)).train(SINGLY)
