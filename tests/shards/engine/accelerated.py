"""Five trials for accelerators: what a GPU has to train with the bits of plain PyTorch there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.recipe import Recipe
from tests.shards import zoo
from tests.shards.by_task.test_shards_shard_run import llama_recipe
from tests.shards.engine.test_shards_equivalence import language_recipe, resnet_recipe


@dataclass(frozen=True)
class Case:
    """Holds how a trial is built, and the batches of each of its steps."""

    recipe: Callable[[], Recipe]
    windows: Sequence[list[Batch]]


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


def norms() -> Recipe:
    torch.manual_seed(0)
    model = Norms()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
    return Recipe(
        model, optimizer, loss, metrics=["accuracy"], shards=3, accumulate=2, ema=0.9,
        clip_grad_norm=0.5, lr_scheduler=lambda o: lrs.StepLR(o, 1),
    )  # fmt: skip


def bert() -> Recipe:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    model = zoo.Logits(BertForSequenceClassification(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)

    def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, tokens[:, 0] % 3)

    return Recipe(model, optimizer, loss, shards=3, autocast="bfloat16")


MODELS = {
    "norms": Case(norms, [zoo.vectors(8, 8), zoo.vectors(8, 4, seed=1)]),
    "resnet": Case(resnet_recipe(3), zoo.singly(zoo.images(6, 6))),
    "bert": Case(bert, zoo.singly(zoo.tokens(4, 4))),
    "gpt2": Case(
        language_recipe(accumulate=2, clip_grad_norm=0.5), [zoo.tokens(4, 4), zoo.tokens(4, 3)]
    ),
    "llama": Case(llama_recipe(), zoo.singly(zoo.tokens(4, 4))),
}
