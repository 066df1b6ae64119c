"""Models of text: those of transformers as they come, recurrent ones, adapters by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def bert(hidden: int, layers: int, vocabulary: int, positions: int = 64) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64), intermediate_size=4 * hidden,
        max_position_embeddings=positions, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2(hidden: int, layers: int, vocabulary: int, positions: int = 64) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_embd=hidden, n_layer=layers, n_head=max(2, hidden // 64),
        n_positions=positions, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def t5(hidden: int, layers: int, vocabulary: int, heads: int = 2) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocabulary, d_model=hidden, d_kv=hidden // heads, d_ff=4 * hidden,
        num_layers=layers, num_heads=heads, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


class Recurrent(nn.Module):
    """Two recurrent layers between an embedding and a classifier."""

    def __init__(self, kind: type[nn.RNNBase], vocabulary: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.recurrent = kind(hidden, hidden, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(tokens))[0][:, -1])


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank addition."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.down.T) @ self.up.T


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a BERT but for its head, and adapt the queries and values of its attention."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in ("query", "value"):
            layer = getattr(module, name, None)
            if isinstance(layer, nn.Linear):
                setattr(module, name, Adapted(layer, rank))
    model.classifier.requires_grad_(True)
    return model
