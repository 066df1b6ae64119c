"""Checks models: what no worker could train is refused, before anything is copied or run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cerebro_hydra.errors import ConfigurationError


def checked_model(given: Any) -> nn.Module:
    """Return the model that is to be trained: a `DataParallel` stands for the one that it wraps.

    Raises:
        ConfigurationError: it is no module, or one that can't be copied and trained elsewhere.
    """
    model = given.module if isinstance(given, nn.DataParallel) else given
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"{_told(name)} is a ScriptModule, whose first call in a process gives other bits "
                "than later ones; give the module as it was before torch.jit.script or trace"
            )
        _check_initialised(name, module)
        _check_computed_tensors(name, module)
    _check_hooks(model)
    return model


def _check_initialised(name: str, module: nn.Module) -> None:
    if any(map(is_lazy, [*module.parameters(recurse=False), *module.buffers(recurse=False)])):
        raise ConfigurationError(
            f"{_told(name)} is a {type(module).__name__} without a size yet; give it sizes, or run "
            "the model once on a batch before the optimizer is made"
        )


def _check_computed_tensors(name: str, module: nn.Module) -> None:
    """Refuse results of operations, which keep their graph, unless a hook makes them again."""
    if module._forward_pre_hooks:
        return  # as those of weight_norm and of pruning
    for attribute, value in vars(module).items():
        if isinstance(value, Tensor) and not value.is_leaf:
            raise ConfigurationError(
                f"attribute {attribute!r} of {_told(name)} was computed from parameters before "
                "training, and no copy of the model would compute it again; compute it in forward, "
                "or set it to None"
            )


def _check_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients, which belong to one tensor object and hop with no bytes."""
    for name, parameter in model.named_parameters():
        # torch offers no public way to ask.
        if getattr(parameter, "_backward_hooks", None) or getattr(
            parameter, "_post_accumulate_grad_hooks", None
        ):
            raise ConfigurationError(
                f"parameter {name!r} has a gradient hook (Tensor.register_hook), which would not "
                "hop with it; scale gradients with param groups, clip_grad_norm or clip_grad_value "
                "instead"
            )


def _told(name: str) -> str:
    return f"module {name!r}" if name else "the model"
