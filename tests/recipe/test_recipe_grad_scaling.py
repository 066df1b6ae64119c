"""Training in float16 against the loop of torch's own documentation, and scales that are no use."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import NonFiniteLoss
from cerebro_hydra.recipe import Columns, PlainTrainer, Recipe

SCALE = 2e5
"""The first step overflows with it, and a later one after it has grown."""


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batch(rows: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (rows,), generator=g)
    return Batch((torch.randn(rows, 4, generator=g),), (labels,), rows)


WINDOWS = [[batch(6, 3 * n), batch(5, 3 * n + 1)] for n in range(8)]


def scaler_of(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(
        "cpu", init_scale=scale, growth_factor=3.0, backoff_factor=0.3, growth_interval=2
    )


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return 8 * F.cross_entropy(outputs, labels)


def trainer_of(fused: bool, loss: object = loss_of, scale: float = SCALE) -> PlainTrainer:
    model = net()
    recipe = Recipe(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused),
        loss,
        accumulate=2,
        clip_grad_norm=0.5,
        lr_scheduler=lambda o: lrs.StepLR(o, 1, 0.9),
        ema=0.9,
        autocast="float16",
        grad_scaler=scaler_of(scale),
    )
    return PlainTrainer(recipe.bind(Columns(("x",), ("y",))), 7, len(WINDOWS))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_that_of_torchs_documentation(fused: bool) -> None:
    """The LR schedule waits with the optimizer in a step that is skipped."""
    trainer, model, scaler = trainer_of(fused), net(), scaler_of(SCALE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    schedule = lrs.StepLR(optimizer, 1, 0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    skips = []
    for window in WINDOWS:
        optimizer.zero_grad()
        losses = []
        for each in window:
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                loss = loss_of(model(each.features[0]), each.labels[0])
            losses.append(loss.item())
            scaler.scale(loss * (each.rows / 11)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skips.append(scaler.get_scale() < before)
        if not skips[-1]:
            schedule.step()
        average.update_parameters(model)
        assert trainer.step(window) == losses
        assert trainer.scaling is not None
        assert trainer.scaling.state() == scaler.state_dict() | {"skipped": sum(skips)}
    assert skips[0] and any(skips[1:]) and not all(skips), skips
    assert trainer.steps == len(skips) and trainer.updates == skips.count(False)
    assert trainer.recipe.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    there, state = model.state_dict(), trainer.tensors()
    for name, tensor in trainer.recipe.model.state_dict().items():
        assert torch.equal(tensor, there[name]), name
    pairs = zip(model.named_parameters(), average.module.parameters(), strict=True)
    for (name, parameter), mean in pairs:
        assert torch.equal(state[f"ema:{name}"], mean), name
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(state[f"optim:{name}:{key}"], value), (name, key)


def test_a_trainer_that_goes_on_has_the_scale_and_the_skips() -> None:
    first = trainer_of(fused=False)
    first.train(WINDOWS[:6])
    assert first.scaling is not None and 0 < first.scaling.skipped < 6
    recipe = trainer_of(fused=False).recipe
    second = PlainTrainer(recipe, 7, 8, first_step=first.steps, scaler=first.scaling.state())
    assert second.scaling is not None and second.scaling.state() == first.scaling.state()
    assert second.updates == first.updates > 0 and second.ema is not None


def without_gradient(outputs: Tensor, labels: Tensor) -> Tensor:
    """A finite loss whose gradient is NaN at every scale."""
    return loss_of(outputs, labels) + (0 * outputs).abs().sqrt().sum()


def test_steps_that_are_skipped_at_every_scale_fail_the_trial_in_words() -> None:
    trainer = trainer_of(fused=False, loss=without_gradient, scale=1.0)
    step = partial(trainer.step, WINDOWS[0])
    with pytest.raises(NonFiniteLoss) as caught:
        for _ in range(20):
            step()
    assert str(caught.value) == (
        "gradients were NaN or infinite at every loss scale down to 0.000219 up to step 7; look "
        "for what overflows in float16, or try autocast='bfloat16', a lower learning rate or "
        "clip_grad_norm"
    )


def test_a_loss_that_is_not_finite_itself_fails_the_trial_at_any_scale() -> None:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return loss_of(outputs, labels) * float("inf")

    with pytest.raises(NonFiniteLoss, match="the loss is inf at step 0, batch 0"):
        trainer_of(fused=False, loss=loss).step(WINDOWS[0])
    # The scaled one may pass what float32 holds, where the loss does not.
    trainer = trainer_of(fused=False, scale=3e38)
    trainer.step(WINDOWS[0])
    assert trainer.updates == 0
