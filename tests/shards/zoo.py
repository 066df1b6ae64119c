"""Models and batches for the tests of cuts."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.recipe import ForwardCall
from cerebro_hydra.shards.cut.sample import Sample


class Block(nn.Module):
    """A residual block with BatchNorm and operations in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return self.relu(y)


class LongSkips(nn.Module):
    """A small ResNet whose stem output and first block reach the end of the network too."""

    def __init__(self, width: int = 4, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = first = y = self.stem(x)
        for number, block in enumerate(self.blocks):
            y = block(y)
            if number == 0:
                first = y
        y = y + stem * 0.5 + first
        return self.head(self.drop(y).mean((2, 3)))


class Language(nn.Module):
    """GPT-2 with tied embeddings; `forward(tokens)` gives logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=16, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.gpt = GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gpt(tokens).logits


class Logits(nn.Module):
    """Wraps a model of `transformers`; `forward(tokens)` gives its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens).logits


class Decides(nn.Module):
    """Its control flow depends on values, so it can't be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.a(x))
        return y if y.sum() > 0 else y * 0.5


def mlp(dropout: float = 0.3, width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, width), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(width, width), nn.ReLU(inplace=True), nn.Dropout(dropout),
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3),
    )  # fmt: skip


def language_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    return nn.functional.cross_entropy(flat, tokens[:, 1:].reshape(-1))


def vectors(*rows: int, seed: int = 0, features: int = 6) -> list[Batch]:
    g = torch.Generator().manual_seed(seed)
    return [
        Batch((torch.randn(n, features, generator=g),), (torch.randint(3, (n,), generator=g),), n)
        for n in rows
    ]


def images(*rows: int, seed: int = 0) -> list[Batch]:
    g = torch.Generator().manual_seed(seed)
    return [
        Batch((torch.randn(n, 1, 8, 8, generator=g),), (torch.randint(3, (n,), generator=g),), n)
        for n in rows
    ]


def tokens(*rows: int, seed: int = 0) -> list[Batch]:
    g = torch.Generator().manual_seed(seed)
    each = [torch.randint(50, (n, 12), generator=g) for n in rows]
    return [Batch((t,), (t,), len(t)) for t in each]


def singly(batches: list[Batch]) -> list[list[Batch]]:
    """Put each batch into a window of its own."""
    return [[batch] for batch in batches]


def sample(batch: Batch) -> Sample:
    """Return a sample with which a model can be traced."""
    return Sample(batch.features, ForwardCall(), None, nullcontext, dynamic_shapes=False)
