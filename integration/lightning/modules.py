"""A LightningModule, which agents in other processes can import."""

from __future__ import annotations

from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cerebro_hydra import SparkEstimator


class Classifier(lightning.LightningModule):
    """Classifies 16 numbers by two layers."""

    def __init__(self, lr: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 4)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return a score for each class."""
        scores: Tensor = self.layers(features)
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        features, label = batch
        loss = F.cross_entropy(self(features), label)
        self.log("train_loss", loss, on_step=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss and the share of hits."""
        features, label = batch
        scores = self(features)
        self.log("val_loss", F.cross_entropy(scores, label))
        self.log("val_acc", (scores.argmax(1) == label).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return an optimizer and a schedule that steps after each step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["lr"], 40)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def classifier(params: dict[str, Any]) -> SparkEstimator:
    """Build an estimator of a classifier with dropout, in two shards."""
    return SparkEstimator(
        Classifier(params["lr"], dropout=0.2),
        metrics={"acc": "max"},
        batch_size=16,
        shards=["layers.4"],
    )


class Adversary(lightning.LightningModule):
    """Makes rows of a part of them, against a critic; it steps two optimizers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 16))
        self.critic = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, features: Tensor) -> Tensor:
        """Return a score for each row."""
        scores: Tensor = self.critic(features)
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Step the critic, then the generator."""
        features, _ = batch
        of_generator, of_critic = self.optimizers()  # type: ignore[attr-defined]
        made = self.generator(features[:, :4])
        self.toggle_optimizer(of_critic)
        of_critic.zero_grad()
        critic = (F.softplus(-self(features)) + F.softplus(self(made.detach()))).mean()
        self.manual_backward(critic)
        self.clip_gradients(of_critic, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.toggle_optimizer(of_generator)
        of_generator.zero_grad()
        generator = F.softplus(-self(made)).mean()
        self.manual_backward(generator)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.log_dict({"train_loss": generator, "critic": critic})
        self.lr_schedulers().step()  # type: ignore[union-attr]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log how little rows are taken for such."""
        self.log("val_loss", F.softplus(-self(batch[0])).mean())

    def configure_optimizers(self) -> Any:
        """Return an optimizer for each part, and an LR scheduler for the critic's."""
        of_generator = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        of_critic = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(of_critic, 0.9)
        return [of_generator, of_critic], [schedule]
