"""Gives a model that was built on the meta device memory, for weights that are yet to come."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.meta_operations import MetaOperations
from cerebro_hydra.recipe.recipe import Recipe


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a model has parameters or buffers on the meta device, in part or whole."""
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def give_memory(recipe: Recipe, operations: MetaOperations) -> None:
    """Let nothing of a recipe's model be on the meta device.

    Parameters and persistent buffers get memory that nobody has touched yet, so it costs nothing,
    for `warm_start` has their values. Other buffers and tensors get their values.

    Args:
        operations: what the factory did.

    Raises:
        ConfigurationError: there is no warm_start, or the value of a tensor can't be told.
    """
    if recipe.warm_start is None:
        raise ConfigurationError(
            "the model is on the meta device, where tensors have no values; set warm_start to a "
            "safetensors file with its state dict, or build it on the CPU"
        )
    _check_optimizer(recipe.optimizer)
    loaded = set(map(id, recipe.model.state_dict(keep_vars=True).values()))
    made: dict[int, Tensor] = {}
    unknown: list[str] = []
    for path, module in recipe.model.named_modules():
        for attributes in (module._buffers, vars(module)):
            for name, tensor in attributes.items():
                if not isinstance(tensor, Tensor) or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    is_loaded = id(tensor) in loaded
                    value = _untouched(tensor) if is_loaded else operations.value(tensor)
                    if value is None:
                        unknown.append(f"{path}.{name}" if path else name)
                        continue
                    made[id(tensor)] = value
                attributes[name] = made[id(tensor)]
    if unknown:
        raise ConfigurationError(
            f"the factory makes {unknown[:10]} on the meta device, which are in no state dict, "
            "from data or random numbers; make them with device='cpu', or register them as "
            "persistent buffers and add them to warm_start"
        )
    operations.forget()  # views that it knows of keep a parameter as it is
    for parameter in recipe.model.parameters():
        if parameter.is_meta:
            own = nn.Parameter(_untouched(parameter), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, own)  # the optimizer refers to the object
            vars(parameter).update(vars(own))


def _untouched(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", requires_grad=False)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ConfigurationError(
                    f"optimizer {type(optimizer).__name__} has made its state {key!r} on the meta "
                    "device, where it has no values; choose one that makes its state in its first "
                    "step, such as AdamW, or build the model on the CPU"
                )
