"""Seven trials of different models over the same rows: token ids, of which a net sees what it can.

The label is the row again: a language model predicts its next tokens, the others its first token's
class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from tests.end_to_end.models import next_token_loss
from tests.shards.zoo import LongSkips

TOKENS, VOCABULARY, CLASSES, LAYERS = 16, 32, 10, 8

NAMES = ("mlp", "graph", "resnet", "accumulated", "bert", "gpt2", "llama")

BLOCKS = {
    "mlp": ("net.{}", 22),
    "graph": ("net.{}", 22),
    "resnet": ("net.blocks.{}", 6),
    "accumulated": ("net.blocks.{}", 6),
    "bert": ("bert.encoder.layer.{}", LAYERS),
    "gpt2": ("model.transformer.h.{}", 14),
    "llama": ("model.model.layers.{}", LAYERS),
}
"""How the blocks of a model are named, and how many there are."""


def class_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the class of a row's first token."""
    return nn.functional.cross_entropy(outputs, labels[:, 0] % CLASSES)


class Scaled(nn.Module):
    """Takes token ids as numbers, in the shape that a net needs."""

    def __init__(self, shape: tuple[int, ...], net: nn.Module) -> None:
        super().__init__()
        self.shape, self.net = shape, net

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens.float().reshape(-1, *self.shape) / VOCABULARY)


class Speaks(nn.Module):
    """A language model of `transformers`, from token ids to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


class Bert(nn.Module):
    """BERT of `transformers` with dropout and a head for classes."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert
        self.head = nn.Linear(32, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bert(tokens).last_hidden_state[:, 0])


def transformer(name: str, blocks: int) -> nn.Module:
    """Build a small BERT, a GPT-2 with tied embeddings, or a Llama of so many blocks."""
    from transformers import (
        BertConfig,
        BertModel,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )  # fmt: skip

    if name == "gpt2":
        size = {"n_embd": 32, "n_layer": blocks, "n_head": 2, "n_positions": 32}
        return Speaks(GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **size)))
    size = {"hidden_size": 32, "num_hidden_layers": blocks, "intermediate_size": 64,
            "max_position_embeddings": TOKENS, "vocab_size": VOCABULARY}  # fmt: skip
    if name == "bert":
        config = BertConfig(num_attention_heads=2, **size)
        return Bert(BertModel(config, add_pooling_layer=False))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Speaks(LlamaForCausalLM(LlamaConfig(use_cache=False, **heads, **size)))


def perceptron(dropout: float, blocks: int) -> nn.Module:
    hidden = [
        nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Dropout(dropout)) for _ in range(blocks)
    ]
    return Scaled((TOKENS,), nn.Sequential(nn.Linear(TOKENS, 48), *hidden, nn.Linear(48, CLASSES)))


def mixed(params: dict[str, Any]) -> Recipe:
    """Build the model that `params["model"]` names, of fewer blocks if "blocks" says so."""
    name = params["model"]
    blocks = params.get("blocks", BLOCKS[name][1])
    model: nn.Module
    match name:
        case "mlp" | "graph":
            model = perceptron(0.2 if name == "mlp" else 0.0, blocks)
        case "resnet" | "accumulated":
            model = Scaled((1, 4, 4), LongSkips(width=8, blocks=blocks, classes=CLASSES))
        case _:
            model = transformer(name, blocks)
    speaks = name in ("gpt2", "llama")
    return Recipe(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.003),
        loss=next_token_loss if speaks else class_loss,
        batch_size=1 if name == "gpt2" else 2,  # so that activations leave room for an eighth
        shards=params.get("shards", 24),
        cut="export" if name == "graph" else "modules",
        accumulate=3 if name == "accumulated" else 1,
        clip_grad_norm=1.0 if name in ("accumulated", "gpt2") else None,
    )


def named(params: dict[str, Any]) -> Recipe:
    """Build the same model cut at names, so that two runs are cut alike whatever they measure."""
    block, number = BLOCKS[params["model"]]
    return mixed(params | {"shards": [block.format(k) for k in range(1, number)]})
