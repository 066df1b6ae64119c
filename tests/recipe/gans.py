"""A GAN, whose training step steps two optimizers, for the estimator and as a module by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from cerebro_hydra.recipe import Recipe

NOISE = 4


class GAN(nn.Module):
    """Makes rows of noise, and scores rows: the higher, the more they are like real ones."""

    def __init__(self, features: int = 16) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, features)
        )
        self.critic = nn.Sequential(
            nn.Linear(features, 8), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(x)  # type: ignore[no-any-return]


def train_gan(
    model: nn.Module, batch: Mapping[Any, Tensor], optimizers: Sequence[Optimizer]
) -> dict[str, Tensor]:
    """Train the critic on each batch, and the generator on every other one."""
    of_generator, of_critic = optimizers
    real = batch[0]
    made = model.generator(torch.randn(len(real), NOISE))
    of_critic.zero_grad()
    found = F.softplus(-model.critic(real)) + F.softplus(model.critic(made.detach()))
    found.mean().backward()
    of_critic.step()
    model.steps += 1
    if model.steps % 2 == 0:
        of_generator.zero_grad()
        F.softplus(-model.critic(made)).mean().backward()
        of_generator.step()
    return {"loss": found.mean()}


def realness(scores: Tensor, label: Tensor) -> Tensor:
    """Measure how little real rows are taken for such."""
    return F.softplus(-scores).mean()


def optimizers_of(model: GAN, lr: float = 0.01) -> list[Optimizer]:
    return [
        Adam(model.generator.parameters(), lr=lr, betas=(0.5, 0.9)),
        SGD(model.critic.parameters(), lr=10 * lr, momentum=0.9),
    ]


def halved(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 3, 0.5)


def gan(params: Mapping[str, Any], features: int = 16, **options: Any) -> Recipe:
    """Build a GAN; options are of the recipe."""
    model = GAN(features)
    given = {
        "optimizer": optimizers_of(model, params.get("lr", 0.01)),
        "loss": realness,
        "batch_size": 16,
        "lr_scheduler": [halved, None],
        "training_step": train_gan,
    }
    return Recipe(model, **{**given, **options})


class Module(GAN):
    """Does the same as a `LightningModule` does it that optimizes by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        real = batch[0]
        made = self.generator(torch.randn(len(real), NOISE))
        self.toggle_optimizer(of_critic)
        assert not self.generator[0].weight.requires_grad
        of_critic.zero_grad()
        found = F.softplus(-self.critic(real)) + F.softplus(self.critic(made.detach()))
        self.manual_backward(found.mean())
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.steps += 1
        self.log("train_loss", found.mean())
        if self.steps % 2 == 0:
            of_generator.zero_grad()
            self.manual_backward(F.softplus(-self.critic(made)).mean())
            of_generator.step()
        self.lr_schedulers().step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", realness(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizers = optimizers_of(self)
        return optimizers, [halved(optimizers[0])]


def either(params: Mapping[str, Any]) -> Recipe:
    """Build the GAN in one of both ways."""
    return Recipe(Module(), batch_size=16) if params["module"] else gan(params)
