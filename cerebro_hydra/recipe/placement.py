"""Brings what a recipe holds to the device that trains it, and copies models whole."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.copies import deep_copy

CPU = torch.device("cpu")

_REGISTERED = {"_parameters", "_buffers", "_modules"}
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque)


class Placement:
    """Moves modules and optimizers to a device; what is one tensor there stays one.

    Parameters stay the same objects, so that optimizers and hooks go on referring to them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, tuple[Any, Any]] = {}  # with the original, which keeps its id

    def place_module(self, module: nn.Module) -> None:
        """Move parameters, buffers, and tensors in the attributes of modules."""
        for parameter in module.parameters():
            parameter.grad = None
            parameter.data = self.tensor(parameter.data)
            self._moved[id(parameter)] = parameter, parameter
        for each in module.modules():
            for name, value in vars(each).items():
                if name not in _REGISTERED:
                    vars(each)[name] = self._value(value)
            for name, buffer in each._buffers.items():
                each._buffers[name] = self._value(buffer)

    def place_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the state that an optimizer has, as torch does where it loads a checkpoint."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and not stays_on_host(group, key):
                        optimizer.state[parameter][key] = self.tensor(value)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device; one that repeats a value takes no more memory there."""
        if 0 not in tensor.stride():
            return tensor.to(self._device)
        once = tuple(slice(0, 1) if n == 0 else slice(None) for n in tensor.stride())
        return tensor[once].to(self._device).expand(tensor.shape)

    def _value(self, value: Any) -> Any:
        """Return a value whose tensors are on the device; containers stay the same objects."""
        if not isinstance(value, (Tensor, tuple, *_CONTAINERS)):
            return value
        if id(value) not in self._moved:
            self._moved[id(value)] = value, value  # it may refer to itself
            self._moved[id(value)] = value, self._content(value)
        return self._moved[id(value)][1]

    def _content(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter) or value.layout is not torch.strided:
                return value.to(self._device)
            return self.tensor(value.detach()).requires_grad_(value.requires_grad)
        if type(value) is tuple:
            return tuple(map(self._value, value))
        if isinstance(value, dict):
            value.update({key: self._value(each) for key, each in value.items()})
        elif type(value) in _CONTAINERS:
            for at, each in enumerate(value):
                value[at] = self._value(each)
        return value


def stays_on_host(group: dict[str, Any], key: Any) -> bool:
    """Return whether an optimizer's state of this name is on the CPU for every device.

    It is a count of steps, unless kernels read it. Python reads the count for every parameter, and
    would wait for the device each time. torch loads checkpoints by this rule.
    """
    return key == "step" and not (group.get("capturable") or group.get("fused"))


@contextmanager
def on_the_host(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let parameters that have gradients be on the CPU for a step, with their optimizer state.

    What a step changes is copied back. For a device that is the CPU nothing is copied.
    """
    away: list[tuple[Tensor, Tensor, Tensor]] = []
    state: list[tuple[Tensor, Tensor]] = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is None or parameter.device == CPU:
            continue
        away.append((parameter, parameter.data, parameter.grad))
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.device != CPU:
                optimizer.state[parameter][key] = here = value.to(CPU)
                state.append((value, here))
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(CPU)
        parameter.grad = gradient.to(CPU)
    try:
        yield
    finally:
        for parameter, value, gradient in away:
            stepped, parameter.grad = parameter.data, None
            parameter.data = value.copy_(stepped)
            parameter.grad = gradient
        for value, here in state:
            value.copy_(here)
        originals = {id(here): value for value, here in state}
        for parameter, *_ in away:
            for key, value in optimizer.state.get(parameter, {}).items():
                optimizer.state[parameter][key] = originals.get(id(value), value)


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
    copied = deep_copy(model, memo)
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
