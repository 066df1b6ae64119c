"""Modules with a training step of their own, which agents in other processes can import."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from cerebro_hydra.recipe import Recipe


class Stepped(nn.Module):
    """Classifies 16 numbers, with a buffer and a counted attribute at its root."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(
            nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4)
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, label = batch
        self.seen += len(label)
        loss = F.cross_entropy(self(features), label)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        logits = self(batch["features"])
        loss = F.cross_entropy(logits, batch["label"])
        hits = (logits.argmax(1) == batch["label"]).float().mean()
        self.log_dict({"val_loss": loss, "val_hits": hits}, on_epoch=True)
        self.log("val/logits", logits.mean())
        return {"loss": loss, "logits": logits}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        scheduler = LinearLR(optimizer, 0.1, total_iters=5)
        return {
            "optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}
        }  # fmt: skip


def stepped(params: dict[str, Any]) -> Recipe:
    """Build a `Stepped`, cut into two shards by name."""
    return Recipe(
        Stepped(params["lr"]),
        metrics={"hits": "max", "accuracy": "accuracy"},
        batch_size=16,
        shards=["layers.4"],
    )
