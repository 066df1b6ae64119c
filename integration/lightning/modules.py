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
