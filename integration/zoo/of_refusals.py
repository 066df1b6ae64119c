"""Trials of our own that admission must refuse, each with what it must say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.ao import quantization

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.testing.model_case import TRIAL_SEED
from integration.zoo.architecture import CLASSES, Architecture, Specimen
from integration.zoo.of_torch import VECTORS, WIDTH


class Quantized(nn.Module):
    """Simulates numbers of 8 bits, whose range observers tell in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net().train()
        weights = quantization.FakeQuantize.with_args(
            observer=quantization.MovingAverageMinMaxObserver,
            quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric,
        )  # fmt: skip
        activations = quantization.default_fake_quant
        self.net.qconfig = quantization.QConfig(activation=activations, weight=weights)  # type: ignore[assignment]
        quantization.prepare_qat(self.net, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits


class Lookahead(torch.optim.Optimizer):
    """Steps by another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.1})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def _net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    )


def _hooked() -> nn.Module:
    model = _net()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def _lookahead(model: nn.Module) -> torch.optim.Optimizer:
    return Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))


REFUSALS = (
    (
        Architecture("observers in evaluation", "ours", VECTORS, Quantized),
        "in evaluation, which must leave the state as it is; let the model's forward begin with "
        "self.apply(enable_observer if self.training else disable_observer)",
    ),
    (
        Architecture("an optimizer that wraps another", "ours", VECTORS, _net, _lookahead),
        "optimizer Lookahead wraps another one, SGD",
    ),
    (
        Architecture("a hook after a gradient", "ours", VECTORS, _hooked),
        "Tensor.register_post_accumulate_grad_hook",
    ),
)
"""Each with a part of what admission into several shards must say."""


def refusal(architecture: Architecture) -> str:
    """Return what admission into four shards says in refusing it, nothing if it is admitted."""
    specimen = Specimen(architecture)
    examples = [specimen.batch(rows, seed) for seed, rows in enumerate(specimen.rows)]
    try:
        admit(specimen.make(4), examples, TRIAL_SEED)
    except ConfigurationError as error:
        return str(error)
    return ""
