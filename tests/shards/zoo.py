"""Models and batches for the tests of cuts."""

from __future__ import annotations

import os
import queue
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import nn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.recipe import ForwardCall
from cerebro_hydra.shards.cut.sample import Sample

LATE = "CEREBRO_HYDRA_TESTS_LATE"


class Unseen(type):
    """Gives classes a number that no reading of a trial finds, by which a test says when to act."""

    @property
    def late(cls) -> int:
        return int(os.environ.get(LATE, "0"))

    @late.setter
    def late(cls, number: int) -> None:
        os.environ[LATE] = str(number)


class Notes:
    """Takes notes of what a trial does where no reading of it finds them."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue = queue.SimpleQueue()

    def add(self, note: object) -> None:
        self.queue.put(note)

    def all(self) -> list:
        """Return the notes so far."""
        found = [self.queue.get() for _ in range(self.queue.qsize())]
        for note in found:
            self.queue.put(note)
        return found

    def clear(self) -> None:
        while not self.queue.empty():
            self.queue.get()


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

    def __init__(self, width: int = 4, blocks: int = 3, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, classes)

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


class Encoder(nn.Module):
    """Blocks of attention with dropout, a mask in a buffer and a learned position outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.position = nn.Parameter(torch.randn(12, 16) * 0.1)
        self.register_buffer("mask", torch.full((12, 12), -1e9).triu(1))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = self.mask[: tokens.shape[1], : tokens.shape[1]]  # a view that every block reads
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x * self.scale)


class Tied(nn.Module):
    """Reads its embeddings again at the end, with a norm of batches and dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.Sequential(
            nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(8, 8),
            nn.Tanh(), nn.Linear(8, 8),
        )  # fmt: skip
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class Norms(nn.Module):
    """An MLP with dropout, BatchNorm, and tensors that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(n, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
            for n in (6, 16, 16)
        )
        self.head = nn.Linear(16, 3)
        self.register_buffer("shift", torch.full((16,), 0.1), persistent=False)
        self.scales = {"hidden": [torch.full((16,), 1.5)]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * self.scales["hidden"][0] + self.shift
        return self.head(x + torch.arange(16, device=x.device))


class SharedLayer(nn.Module):
    """Calls its first layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x))
        if self.training:
            x = x + torch.rand_like(x)  # between units, goes on with drop's
        x = self.drop(self.first(x)).tanh()
        return self.last(self.drop(self.first(x)))


class Mean(nn.Module):
    """Takes sequences of any length from two on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x.unsqueeze(-1)))
        return self.c(torch.tanh(self.b(y)).mean(1))


class Net(nn.Module):
    """Three layers, to which a subclass adds something, or of which it makes other use."""

    layers: ClassVar[dict[str, tuple[int, int]]] = {"a": (6, 6), "b": (6, 6), "c": (6, 3)}

    def __init__(self) -> None:
        super().__init__()
        for name, (inputs, outputs) in self.layers.items():
            setattr(self, name, nn.Linear(inputs, outputs))
        self.add()

    def add(self) -> None:
        """Nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh())


class Pair(Net):
    layers: ClassVar[dict[str, tuple[int, int]]] = {"a": (6, 6), "b": (6, 3)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class One(Net):
    layers: ClassVar[dict[str, tuple[int, int]]] = {"a": (6, 3)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


class Counts(Pair):
    """Counts its calls in training in a buffer that no checkpoint holds, and uses the count."""

    def add(self) -> None:
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if self.training:
            self.calls.add_(1)
        return self.b(y * self.calls)


class Decides(nn.Module):
    """Its control flow depends on values, so it can't be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.a(x))
        return y if y.sum() > 0 else y * 0.5


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return Logits(LlamaForCausalLM(config))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    return Logits(BertForSequenceClassification(config))


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
    return Sample(batch.features, ForwardCall(), None, False, nullcontext, dynamic_shapes=False)
