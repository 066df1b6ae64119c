"""A language model that is built on the meta device, with its weights in a safetensors file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from tests.end_to_end.models import next_token_loss

VOCABULARY, WIDTH = 32, 128


class Block(nn.Module):
    """Attention with rotary positions, whose frequencies no state dict has, and a perceptron."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        frequencies = 1 / 10000 ** (torch.arange(0, width, 2).float() / width)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
            nn.Linear(4 * width, width), nn.Dropout(dropout),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        angles = torch.outer(torch.arange(x.shape[1]).float(), self.frequencies)
        query, key = (_turned(each, angles.cos(), angles.sin()) for each in (query, key))
        x = x + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.feed(x)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class LanguageModel(nn.Module):
    """A decoder with tied embeddings, from token ids to logits."""

    def __init__(self, layers: int, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(layers)))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def on_meta(params: dict[str, Any]) -> Recipe:
    """Build the model on the meta device."""
    return _recipe("meta", params)


def on_cpu(params: dict[str, Any]) -> Recipe:
    """Build the same model with values of its own."""
    return _recipe("cpu", params)


def _recipe(device: str, params: dict[str, Any]) -> Recipe:
    with torch.device(device):
        model = LanguageModel(params.get("layers", 4), params.get("width", WIDTH))
    return Recipe(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=next_token_loss,
        batch_size=8,
        shards=params.get("shards", 4),
        cut=params.get("cut", "modules"),
        clip_grad_norm=params.get("clip"),
        accumulate=params.get("accumulate", 1),
        warm_start=params.get("weights"),
    )
