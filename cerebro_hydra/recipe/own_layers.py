"""Gives a model its own copies of plain layers to which something else refers, too.

Such a layer is often the default of an argument, as in `def __init__(self, act=nn.ReLU())`, which
all models have then. Trials that take turns on a device would meet one another's hooks there.
"""

from __future__ import annotations

import copy
import sys
import types
from collections import defaultdict

import torch
from torch import nn

_PLAIN = (
    bool, int, float, str, type(None), type, types.FunctionType, types.BuiltinFunctionType,
    torch.dtype,
)  # fmt: skip


def take_own_layers(model: nn.Module) -> None:
    """Copy layers of a model that was just built, if others than its modules refer to them.

    What has tensors, hooks or objects, and not only numbers, texts and functions, is left.
    """
    paths = defaultdict[int, list[tuple[str, str]]](list)  # of each: its holders, with its names
    for path, parent in model.named_modules():
        for name in () if isinstance(parent, torch.jit.ScriptModule) else parent._modules:
            paths[id(parent._modules[name])].append((path, name))
    del parent
    for places in paths.values():
        path, name = places[0]
        held = sys.getrefcount(model.get_submodule(path)._modules[name]) - 1  # but for this call
        layer = model.get_submodule(path)._modules[name]
        if held > len(places) and _is_plain(layer):
            own = copy.deepcopy(layer)
            for path, name in places:
                model.get_submodule(path)._modules[name] = own
        del layer


def _is_plain(layer: nn.Module | None) -> bool:
    return (
        isinstance(layer, nn.Module)
        and not isinstance(layer, torch.jit.ScriptModule)
        and all(
            name == "_modules" or _is_plain_value(value)
            for module in layer.modules()
            for name, value in vars(module).items()
        )
    )


def _is_plain_value(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain_value, value))
    return isinstance(value, _PLAIN) or (isinstance(value, dict | set) and not value)
