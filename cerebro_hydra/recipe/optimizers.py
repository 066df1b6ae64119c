"""Refuses optimizers that can't be cut into shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError

# Optimizers whose update of one parameter needs the others, or another kind of gradient.
INSEPARABLE_OPTIMIZERS = {
    "LBFGS": "its line search needs every parameter at once",
    "SparseAdam": "it needs sparse gradients",
}


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse what can't be cloned over the parameters of a shard.

    Raises:
        ConfigurationError: it is no optimizer, not separable by parameter, or over other
            parameters than the model's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer is a {type(optimizer).__name__}; give an instance over the "
            "model's parameters, such as torch.optim.AdamW(model.parameters())"
        )
    for kind in type(optimizer).__mro__:
        if kind.__name__ in INSEPARABLE_OPTIMIZERS:
            raise ConfigurationError(
                f"optimizer {type(optimizer).__name__} can't be cut into shards: "
                f"{INSEPARABLE_OPTIMIZERS[kind.__name__]}; choose one that updates each parameter "
                "by itself, such as AdamW or SGD"
            )
    known = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigurationError(
                    f"param group {number} of the optimizer holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is not the model's; build the optimizer "
                    "from this model's own parameters"
                )
