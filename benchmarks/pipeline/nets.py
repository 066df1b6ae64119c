"""Two transformers as a list of modules, so that anyone can cut them in the middle."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY, TOKENS, CLASSES = 256, 4, 1000, 64, 10


class Embedding(nn.Module):
    """Embeds tokens, shape (batch, TOKENS), and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        places = torch.arange(features.shape[1], device=features.device)
        return self.words(features) + self.places(places)


class BertBlock(nn.Module):
    """An encoder layer with dropout, as BERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class LlamaBlock(nn.Module):
    """Causal attention with rotary places, and a gated feed-forward, both after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = (nn.Linear(WIDTH, n * WIDTH, bias=False) for n in (3, 1))
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        angles = 10_000 ** -torch.linspace(0, 1, WIDTH // HEADS // 2)
        turns = torch.outer(torch.arange(TOKENS), angles)
        self.cos, self.sin = nn.Buffer(turns.cos()), nn.Buffer(turns.sin())

    def _turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            [first * self.cos - second * self.sin, first * self.sin + second * self.cos], dim=-1
        )

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(
            self._turned(q), self._turned(k), v, is_causal=True
        )
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        inner = self.between(x)
        return x + self.down(nn.functional.silu(self.gate(inner)) * self.up(inner))


class Head(nn.Module):
    """Tells classes from the mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x).mean(1))


BLOCKS: dict[str, Callable[[], nn.Module]] = {"BERT": BertBlock, "Llama": LlamaBlock}


class Net(nn.Module):
    """One of the transformers, whole."""

    def __init__(self, name: str, layers: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(Embedding(), *(BLOCKS[name]() for _ in range(layers)), Head())

    def forward(self, features: Tensor) -> Tensor:
        return self.parts(features)
