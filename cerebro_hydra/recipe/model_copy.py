"""Copies models, with what a deep copy leaves on the original or can't take."""

from __future__ import annotations

import copy
import operator
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a model, whose hooks and functions refer to the copy.

    Tensors that are made again before each forward, such as the weight of `weight_norm`, are copied
    without their graph.

    Args:
        memo: copies by the id of their originals, as `copy.deepcopy` takes it and adds to it.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        attributes = vars(module)
        for kept in (attributes, *attributes.values()):
            if isinstance(kept, dict):
                functions = {k: v for k, v in kept.items() if isinstance(v, FunctionType)}
                kept.update({key: _bound(function, memo) for key, function in functions.items()})
    return copied


def referring_to_copies(value: Any, memo: dict[int, Any]) -> Any:
    """Return a function, or a list of functions, that refers to copies instead of originals.

    Args:
        memo: as `copy_model` has left it.
    """
    if isinstance(value, list | tuple):
        return type(value)([referring_to_copies(each, memo) for each in value])
    return _bound(value, memo) if isinstance(value, FunctionType) else value


def _bound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Return a function that refers to copies wherever the given one refers to originals."""
    if id(function) in memo:
        return memo[id(function)]  # type: ignore[no-any-return]
    memo[id(function)] = function  # it may refer to itself

    def in_copy(value: Any) -> Any:
        is_function = isinstance(value, FunctionType)
        return _bound(value, memo) if is_function else memo.get(id(value), value)

    cells = function.__closure__ or ()
    try:
        referred = [*(cell.cell_contents for cell in cells), *(function.__defaults__ or ())]
    except ValueError:
        return function  # a variable that has no value yet
    copies = [in_copy(value) for value in referred]
    if all(map(operator.is_, copies, referred)):
        return function
    closure, defaults = copies[: len(cells)], copies[len(cells) :]
    bound = FunctionType(
        function.__code__, function.__globals__, function.__name__,
        tuple(defaults) or None, tuple(map(CellType, closure)),
    )  # fmt: skip
    bound.__kwdefaults__ = function.__kwdefaults__
    vars(bound).update(vars(function))
    memo[id(function)] = bound
    return bound
