"""Lets a model's own parameters, attributes and buffers have other values for a while."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_ATOMS = (int, float, str, type(None))
_CONTAINERS = (dict, OrderedDict, set, list, deque)
_EMPTIED = (dict, OrderedDict, set, list)


def absent_value(parameter: nn.Parameter) -> Tensor:
    """Return a value without memory of its own: it reads as NaN, and writing to it is an error."""
    nothing = math.nan if parameter.is_floating_point() or parameter.is_complex() else 0
    return parameter.data.new_full((), nothing).expand(parameter.shape)


class ParameterValues:
    """Holds values for the parameters of a model, which has them while they are used.

    Args:
        value: returns the value of each parameter by its name.
    """

    def __init__(self, model: nn.Module, value: Callable[[str, nn.Parameter], Tensor]) -> None:
        self._values = {p: value(name, p) for name, p in model.named_parameters()}

    @classmethod
    def initial(cls, model: nn.Module) -> ParameterValues:
        """Return copies of the present values."""
        return cls(model, lambda _, parameter: parameter.detach().clone())

    @classmethod
    def absent(cls, model: nn.Module) -> ParameterValues:
        """Return the values of a worker before shards come."""
        return cls(model, lambda _, parameter: absent_value(parameter))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Give the parameters these values, and afterwards their own, without gradients."""
        own = self._exchanged(self._values)
        try:
            yield
        finally:
            self._values = self._exchanged(own)
            for parameter in own:
                parameter.grad = None

    @staticmethod
    def _exchanged(values: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Give parameters other values, and return those that they had."""
        before = {parameter: parameter.data for parameter in values}
        for parameter, value in values.items():
            parameter.data = value
        return before


class AttributeValues:
    """Holds attributes and buffers for the modules of a model, which has them while they are used.

    The model runs as another worker would build it, but it is the same object. So functions that
    refer to it, such as a hook, a lambda or a loss, refer to the model that runs.
    """

    def __init__(self, model: nn.Module) -> None:
        """Copy what the modules have now."""
        self._modules = list(model.modules())
        memo: dict[int, Any] = {id(each): each for each in self._modules}
        memo |= {id(parameter): parameter for parameter in model.parameters()}
        memo |= {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
        self._values = [
            {name: _copied(value, memo) for name, value in vars(module).items()}
            for module in self._modules
        ]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Give the modules these attributes, and afterwards their own."""
        own = [dict(vars(module)) for module in self._modules]
        swapped = _Swaps()
        for module, values, before in zip(self._modules, self._values, own, strict=True):
            for name, value in values.items():
                if not swapped(before.get(name), value):
                    vars(module)[name] = value
            for name in before.keys() - values.keys():
                del vars(module)[name]
        try:
            yield
        finally:
            swapped = _Swaps()
            self._values = [
                _taken_back(vars(module), before, values, swapped)
                for module, values, before in zip(self._modules, self._values, own, strict=True)
            ]


def _taken_back(
    now: dict[str, Any], own: dict[str, Any], given: dict[str, Any], swapped: _Swaps
) -> dict[str, Any]:
    """Bring the attributes of a module back to its own; return what they were."""
    taken = dict(now)
    for name, value in own.items():
        if name in given and swapped(value, given[name]) and taken.get(name) is value:
            taken[name] = given[name]
        now[name] = value
    for name in taken.keys() - own.keys():
        del now[name]
    return taken


class _Swaps:
    """Swaps the contents of containers, once for all that refer to the same one."""

    def __init__(self) -> None:
        self._done: set[tuple[int, int]] = set()

    def __call__(self, one: Any, other: Any) -> bool:
        """Swap two values if they are containers of the same type, and tell whether they are."""
        if one is other or type(one) is not type(other) or type(one) not in _CONTAINERS:
            return False
        if (one or other) and (id(one), id(other)) not in self._done:
            self._done.add((id(one), id(other)))
            contents = copy.copy(one)
            _fill(one, other)
            _fill(other, contents)
        return True


def _fill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, dict | set):
        container.update(contents)
    else:
        container.extend(contents)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, _ATOMS):
        return value
    if type(value) in _EMPTIED and not value:  # as most dicts of hooks, which deepcopy is slow on
        return memo.setdefault(id(value), type(value)())
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # such as a lock, or a tensor with a graph
        return value
