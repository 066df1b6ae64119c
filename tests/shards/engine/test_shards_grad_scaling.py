"""What float16 asks of shards beside equal bits: admission, memory, forks and failing alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from cerebro_hydra.errors import NonFiniteLoss
from cerebro_hydra.recipe import PlainTrainer, Recipe
from cerebro_hydra.replay.replay_trial import Ancestor
from cerebro_hydra.shards.admission.task_profiler import profile
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain, zoo
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start
from tests.shards.trials import VECTORS, bound, mlp_recipe, scaler


def make(scale: float, **rules: Any) -> Recipe:
    settings = {"autocast": "float16", "grad_scaler": scaler(scale), **rules}
    return bound(mlp_recipe(**settings))()


class Normed(torch.optim.SGD):
    """It divides gradients by the norm of all that it has, so shards would differ."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        total = sum(float(each.square().sum()) for each in grads) ** 0.5
        for each in grads:
            each.div_(total)
        return super().step(closure)


def normed(model: nn.Module) -> Normed:
    return Normed(model.parameters(), lr=0.1)


def test_admission_compares_updates_whatever_the_scale_is_at_first() -> None:
    """Those that are skipped would differ in no bit."""
    assert start(make(2.0**60, optimizer=normed), VECTORS[0]).cut_model.num_shards == 1
    # One whose scale grows in each step would overflow in some step of any number.
    eager = torch.amp.GradScaler("cpu", 2.0**60, growth_factor=50.0, growth_interval=1)
    trial = start(make(1.0, grad_scaler=eager), VECTORS[0])
    assert trial.cut_model.num_shards > 1 and trial.admission.report.fallback is None
    assert trial.train(VECTORS[0]).steps == 3
    assert trial.cursor(0)["scaler"]["skipped"] == 3


def test_the_memory_of_tasks_is_that_of_updates_that_are_taken() -> None:
    def activations(scale: float, **rules: Any) -> list[int]:
        trial = start(make(scale, shards=["3", "6"], **rules), VECTORS[0])
        batch = zoo.vectors(8)[0]
        found = profile(trial.recipe, trial.cut_model, trial.layout, (batch.features, batch.labels))
        assert found.recompute is not None
        return [shard.activations for shard in found.recompute]

    assert activations(2.0**60) == activations(64.0)
    assert activations(2.0**60, clip_grad_norm=0.1) == activations(64.0, clip_grad_norm=0.1)


def test_a_fork_goes_on_with_the_scale_and_its_own_schedule() -> None:
    """A schedule of its own has stepped as often as steps were taken, not as often as asked."""
    trial = start(make(4e5), VECTORS[0])
    trial.train(VECTORS[0])
    parent = PlainTrainer(make(4e5), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    parent.train(VECTORS[0])
    assert parent.scaling is not None and 0 < parent.scaling.skipped < parent.steps

    def fork() -> Recipe:
        return make(8.0, lr_scheduler=lambda o: lrs.StepLR(o, 1, 0.5))

    cursors = [trial.cursor(k) for k in range(trial.cut_model.num_shards)]
    for k, (content, _) in enumerate(trial.shards.copy()):
        kept = {"step": cursors[k]["step"], "epochs": 0, "scaler": cursors[k]["scaler"]}
        trial.shards[k] = content, json.dumps(kept)
    trial.recipe = fork()
    spec: Any = SimpleNamespace(seed=plain.TRIAL_SEED, steps_per_epoch=STEPS_PER_EPOCH, trial_id="")
    reference = Ancestor(spec, fork(), until=2, lags={}, kept=parent.tensors().keys()).fork(
        parent, epochs=0
    )
    assert trial.train(VECTORS[1]).loss_sum == reference.train(VECTORS[1])[0]
    assert_same_state(trial.tensors(), reference)
    assert reference.scaling is not None
    assert trial.cursor(1)["scaler"] == reference.scaling.state()
    rate = reference.recipe.optimizer.param_groups[0]["lr"]
    assert trial.cursor(1)["groups"][0]["lr"] == rate
    assert rate == fork().optimizer.param_groups[0]["lr"] * 0.5**reference.updates


class NaNGradient(torch.autograd.Function):
    """It passes its input on, and NaN back once `armed`."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan") if NaNGradient.armed else gradient


class Spoilt(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NaNGradient.apply(x)


@pytest.fixture
def armed() -> Any:
    """Let gradients be finite until they are not any more."""
    NaNGradient.armed = False
    yield lambda: setattr(NaNGradient, "armed", True)
    NaNGradient.armed = False


def spoilt_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Spoilt(), nn.Linear(8, 3))


def test_a_scale_that_falls_for_ever_fails_the_trial_in_the_words_of_plain_training(
    armed: Any,
) -> None:
    """The last shard's own gradients are finite; those of the first are not, so both skip."""

    def recipe() -> Recipe:
        return make(1.0, model=spoilt_mlp, shards=["3"], cut="modules")

    trial: Trial = start(recipe(), VECTORS[0])
    reference = PlainTrainer(recipe(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    armed()
    windows = [window for _ in range(4) for window in VECTORS[0]]
    with pytest.raises(NonFiniteLoss) as ours:
        trial.train(windows)
    with pytest.raises(NonFiniteLoss) as plainly:
        reference.train(windows)
    assert str(ours.value) == str(plainly.value)


class SpoiltWeight(nn.Module):
    """Its weight's gradient is NaN once `armed`; what it passes back is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * NaNGradient.apply(self.weight)


@pytest.mark.parametrize("place", [1, 3, 5])
def test_a_gradient_of_any_shard_that_overflows_lets_all_skip_the_step(
    place: int, armed: Any
) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
        layers.insert(place, SpoiltWeight())
        return nn.Sequential(*layers, nn.Linear(8, 3))

    def recipe() -> Recipe:
        return make(64.0, model=model, shards=["2", "4"], cut="modules")

    trial = start(recipe(), VECTORS[0])
    reference = PlainTrainer(recipe(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    armed()
    assert trial.train(VECTORS[0]).loss_sum == reference.train(VECTORS[0])[0]
    assert_same_state(trial.tensors(), reference)
    assert reference.scaling is not None and reference.scaling.skipped == reference.steps > 0
    assert trial.cursor(2)["scaler"] == reference.scaling.state()
