"""Models that train without labels, with their losses and collates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VAE(nn.Module):
    """Draws its code in its own forward while it trains, and gives three tensors."""

    def __init__(self, features: int, hidden: int, code: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, hidden), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(hidden, code), nn.Linear(hidden, code)
        self.decoder = nn.Sequential(
            nn.Linear(code, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, features)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean
        if self.training:
            code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance


def elbo(outputs: tuple[Tensor, Tensor, Tensor], features: Tensor) -> Tensor:
    """Return the negative evidence lower bound (Kingma & Welling 2014, appendix B)."""
    made, mean, log_variance = outputs
    divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum(1) / 2
    return (((made - features) ** 2).sum(1) + divergence).mean()


def reconstruction(outputs: tuple[Tensor, ...], features: Tensor) -> Tensor:
    """Return the mean squared error of what the decoder makes."""
    return F.mse_loss(outputs[0], features)


class TwoViews(nn.Module):
    """Encodes two views of each row."""

    def __init__(self, features: int, hidden: int, code: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(features, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, code)
        )
        self.head = nn.Linear(code, code)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        views = self.head(self.encoder(torch.cat([first, second]))).chunk(2)
        return views[0], views[1]


def two_views(batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
    """Return two noisy views of each row; in evaluation the row and its reverse."""
    x = batch["features"]
    if not training:
        return {"first": x, "second": x.flip(1)}
    return {name: x + 0.1 * torch.randn_like(x) for name in ("first", "second")}


def nt_xent(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the contrastive loss of SimCLR (Chen et al. 2020, equation 1), temperature 0.5."""
    codes = F.normalize(torch.cat(outputs), dim=1)
    rows = len(outputs[0])
    likeness = codes @ codes.T / 0.5
    likeness = likeness.masked_fill(torch.eye(2 * rows, dtype=torch.bool), -1e9)
    return F.cross_entropy(likeness, (torch.arange(2 * rows) + rows) % (2 * rows))
