"""Trials that every executor is proved with: each model, and each feature of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.recipe import Columns, Recipe
from tests.shards import zoo

Make = Callable[[], Recipe]
SubEpoch = Sequence[list[Batch]]
"""The batches of each optimizer step."""


@dataclass(frozen=True)
class Case:
    """Holds how a trial is built, and the batches of each of its sub-epochs."""

    recipe: Make
    sub_epochs: Sequence[SubEpoch]

    @property
    def windows(self) -> SubEpoch:
        """Return those of the first sub-epoch."""
        return self.sub_epochs[0]


# ---------------------------------------------------------------------- recipes


def recipe_of(
    model: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    seed: int = 3,
    **rules: Any,
) -> Make:
    """Return a factory of equal recipes; the optimizer is made of the model, else it is AdamW."""

    def make() -> Recipe:
        torch.manual_seed(seed)
        built = model()
        chosen = optimizer(built) if optimizer else torch.optim.AdamW(built.parameters(), lr=1e-2)
        return Recipe(built, chosen, loss or nn.CrossEntropyLoss(), **rules)

    return make


def mlp_recipe(optimizer=None, shards=3, model=None, **rules) -> Make:
    return recipe_of(model or zoo.mlp, optimizer, shards=shards, **rules)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def seeded(build: Callable[[], nn.Module], shards=2, **rules) -> Make:
    """Return a factory of recipes that are trained with momentum."""
    return recipe_of(build, momentum, seed=2, shards=shards, **rules)


def made(model: Callable[[], nn.Module], loss=None, shards=2, seed=3, **rules) -> Make:
    """Return a factory of recipes that train what is not frozen; the loss is made of the model."""

    def make() -> Recipe:
        torch.manual_seed(seed)
        built = model()
        trained = [p for p in built.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.5)
        chosen = loss(built) if loss else nn.CrossEntropyLoss()
        return Recipe(built, optimizer, chosen, shards=shards, **rules)

    return make


def resnet_recipe(shards=3, **rules) -> Make:
    rules = {
        "clip_grad_norm": 1.0, "metrics": ["accuracy"], "lr_scheduler": lambda o: lrs.StepLR(o, 2),
    } | rules  # fmt: skip
    return recipe_of(
        zoo.LongSkips,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
        seed=4,
        shards=shards,
        **rules,
    )


def language_recipe(shards=3, model=zoo.Language, optimizer=None, **rules) -> Make:
    return recipe_of(model, optimizer, zoo.language_loss, seed=5, shards=shards, **rules)


def rotary_recipe(name: str) -> Make:
    """Return a factory of language models whose rotary embedding lies in regions."""
    import transformers

    def model() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, intermediate_size=24, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, use_cache=False,
        )  # fmt: skip
        return getattr(transformers, f"{name}ForCausalLM")(config)

    def loss(outputs, tokens):
        return zoo.language_loss(outputs.logits, tokens)

    return recipe_of(model, loss=loss, seed=5, shards=3, clip_grad_norm=0.5)


def first_layer_frozen() -> nn.Module:
    model = zoo.mlp()
    model[0].requires_grad_(False)
    return model


def middle_frozen() -> nn.Module:
    model = zoo.mlp()
    model[3].requires_grad_(False)
    return model


def by_groups(model: nn.Module, cls=torch.optim.AdamW, **options) -> torch.optim.Optimizer:
    """Let a group that comes first have the parameters that the model has last."""
    early = [p for n, p in model.named_parameters() if n.startswith("0")]
    late = [p for n, p in model.named_parameters() if not n.startswith("0")]
    groups = [{"params": late, "lr": 0.03, "weight_decay": 0.1}, {"params": early, "lr": 0.001}]
    return cls(groups, lr=0.01, **options)


COLUMNS = Columns(("x",), ("y",))


def bound(make: Make) -> Make:
    """Return a factory whose recipes know the columns of vectors, as `collate` needs."""
    return lambda: make().bind(COLUMNS)


def flips(batch, training):
    if training:
        signs = torch.randint(2, (len(batch["x"]), 1)) * 2.0 - 1.0
        batch["x"] = batch["x"] * signs
    return batch


def scaler(init_scale: float) -> torch.amp.GradScaler:
    """Return one that changes by no power of two, so that unscaling rounds."""
    return torch.amp.GradScaler(
        "cpu", init_scale=init_scale, growth_factor=1.7, backoff_factor=0.3, growth_interval=2
    )


def shortened(batch, training):
    return batch | {"x": batch["x"][:, : 2 + len(batch["x"]) % 4]}


def first_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, tokens[:, 0] % 3)


# ---------------------------------------------------------------------- batches


def two_sub_epochs() -> list[SubEpoch]:
    return [zoo.singly(zoo.vectors(8, 8, 5)), zoo.singly(zoo.vectors(8, 5, seed=1))]


VECTORS = two_sub_epochs()
PAIRS = [[zoo.vectors(8, 8), zoo.vectors(5, seed=2)], [zoo.vectors(8, 5, seed=1)]]
FOUR_WINDOWS = [[zoo.vectors(8, 8, 5, seed=s) for s in each] for each in ((0, 1), (2, 3))]
THREES = [[zoo.vectors(8, 8, 5), zoo.vectors(8, seed=3)], [zoo.vectors(8, 5, 8, seed=1)]]
LENGTHS = [zoo.singly(zoo.vectors(8, 7, 6)), zoo.singly(zoo.vectors(5))]
IMAGES = [zoo.singly(zoo.images(6, 6, 4)), zoo.singly(zoo.images(6, 4, seed=1))]
IMAGE_THREES = [[zoo.images(6, 6, 4)], [zoo.images(6, 4)]]
TOKENS = [zoo.singly(zoo.tokens(4, 4)), zoo.singly(zoo.tokens(4, 3, seed=1))]
TOKEN_PAIRS = [[zoo.tokens(4, 4), zoo.tokens(3)], [zoo.tokens(4, 3, seed=1)]]


# ---------------------------------------------------------------------- the trials

MLP: dict[str, Case] = {
    name: Case(bound(mlp_recipe(**{"metrics": ["accuracy"]} | rules)), sub_epochs)
    for name, (sub_epochs, rules) in {
        "dropout": (VECTORS, {}),
        "in two": (VECTORS, {"shards": 2}),
        "in four": (VECTORS, {"shards": 4}),
        "groups, schedule": (
            VECTORS, {"optimizer": by_groups, "lr_scheduler": lambda o: lrs.StepLR(o, 2)}
        ),
        "clipped": (VECTORS, {"clip_grad_norm": 0.05}),
        "never clipped": (VECTORS, {"clip_grad_norm": 1e6}),
        "values clipped, average": (VECTORS, {"clip_grad_value": 0.01, "ema": 0.9}),
        "accumulated": (THREES, {"accumulate": 3}),
        "accumulated, clipped": (THREES, {"accumulate": 3, "clip_grad_norm": 0.1}),
        "accumulated, cosine": (
            PAIRS, {"accumulate": 2, "lr_scheduler": lambda o: lrs.CosineAnnealingLR(o, 9)}
        ),
        "bfloat16": (VECTORS, {"autocast": "bfloat16"}),
        "float16, average": (
            VECTORS, {"autocast": "float16", "grad_scaler": scaler(4e5), "ema": 0.9}
        ),
        "float16, accumulated, clipped": (
            FOUR_WINDOWS, {
                "autocast": "float16", "grad_scaler": scaler(7e5), "accumulate": 3,
                "clip_grad_norm": 0.1, "lr_scheduler": lambda o: lrs.StepLR(o, 1, 0.9),
            },
        ),
        "frozen first, clipped": (VECTORS, {"model": first_layer_frozen, "clip_grad_norm": 0.5}),
        "frozen first, average": (VECTORS, {"model": first_layer_frozen, "ema": 0.9}),
        "frozen middle": (VECTORS, {"model": middle_frozen}),
        "augmented": (VECTORS, {"collate": flips}),
        "of lengths": (LENGTHS, {"model": zoo.Mean, "collate": shortened}),
    }.items()
}  # fmt: skip

TRIALS: dict[str, Case] = {f"mlp, {name}": case for name, case in MLP.items()} | {
    "resnet": Case(resnet_recipe(), IMAGES),
    "resnet, in five": Case(resnet_recipe(5), IMAGES),
    "resnet, accumulated": Case(resnet_recipe(accumulate=3), IMAGE_THREES),
    "resnet, bfloat16": Case(resnet_recipe(autocast="bfloat16", clip_grad_norm=None), IMAGES),
    "gpt2": Case(language_recipe(4), TOKENS),
    "gpt2, accumulated, clipped": Case(
        language_recipe(accumulate=2, clip_grad_norm=0.5), TOKEN_PAIRS
    ),
    "tied, accumulated, clipped, average": Case(
        language_recipe(
            ["blocks.2", "blocks.4", "blocks.6"], zoo.Tied, accumulate=2, clip_grad_norm=0.5,
            ema=0.9,
        ),
        TOKEN_PAIRS,
    ),
    "encoder, bfloat16, accumulated": Case(
        language_recipe(model=zoo.Encoder, autocast="bfloat16", accumulate=2), TOKEN_PAIRS
    ),
    "llama": Case(language_recipe(model=zoo.llama, optimizer=momentum), TOKENS),
    "bert, bfloat16": Case(
        recipe_of(zoo.bert, loss=first_token_loss, shards=3, autocast="bfloat16"), TOKENS
    ),
    "layer thrice": Case(seeded(zoo.SharedLayer, ["drop"], accumulate=2), PAIRS),
    "layer thrice, in three": Case(seeded(zoo.SharedLayer, ["drop", "last"], accumulate=2), PAIRS),
    "layer thrice, in all": Case(seeded(zoo.SharedLayer, 7, accumulate=2), PAIRS),
    "counts": Case(seeded(zoo.Counts), VECTORS),
    "norms, accumulated, clipped, average": Case(
        recipe_of(
            zoo.Norms, loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])), shards=3,
            metrics=["accuracy"], accumulate=2, ema=0.9, clip_grad_norm=0.5,
            lr_scheduler=lambda o: lrs.StepLR(o, 1),
        ),
        [[zoo.vectors(8, 8), zoo.vectors(8, 4, seed=1)], [zoo.vectors(8, 5, seed=2)]],
    ),
}  # fmt: skip

ACCELERATED = {
    "norms": TRIALS["norms, accumulated, clipped, average"],
    "resnet": TRIALS["resnet"],
    "bert": TRIALS["bert, bfloat16"],
    "gpt2": TRIALS["gpt2, accumulated, clipped"],
    "llama": TRIALS["llama"],
}
"""What a GPU has to train with the bits of plain PyTorch there."""
