"""Lets a model's own parameters, attributes and buffers have other values for a while."""

from __future__ import annotations

import copy
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

TensorKey = tuple[Literal["parameter", "buffer"], str]
"""The kind of a tensor and its name in the model."""

_ATOMS = (int, float, str, type(None))
_CONTAINERS = (dict, OrderedDict, set, list, deque)
_EMPTIED = (dict, OrderedDict, set, list)
_ABSENT = object()
"""Stands for an attribute that a module does not have."""

_SIGNALLING = {
    torch.float64: (torch.int64, 0xFFF4A5A5A5A5A5A5 - (1 << 64)),
    torch.float32: (torch.int32, 0xFFA5A5A5 - (1 << 32)),
    torch.float16: (torch.int16, 0xFD25 - (1 << 16)),
    torch.bfloat16: (torch.int16, 0xFFA5 - (1 << 16)),
}
"""The bits, as an integer, of a NaN that arithmetic turns into a quiet one, with other bits."""

Key = TypeVar("Key", bound=Hashable)

_ALIGNMENT = 16
"""Of the bytes of a stand-in, which no type of torch passes."""

_LEAST_ROOM, _SHARE = 1 << 16, 64
"""Stand-ins take so many bytes, or the part of what they stand for that has this divisor."""


def absent_value(parameter: nn.Parameter) -> Tensor:
    """Return a value without memory of its own: it reads as NaN, and writing to it is an error."""
    nothing = math.nan if parameter.is_floating_point() or parameter.is_complex() else 0
    return parameter.data.new_full((), nothing).expand(parameter.shape)


class StandIns(Generic[Key]):
    """Stands for tensors that are elsewhere, and tells which of them was written to.

    A stand-in reads as NaN. It can be written to in every way: its elements share memory, but not
    so that torch sees it, which refuses to write to `absent_value`. Even what reads and writes
    leaves other bits: arithmetic makes the NaN a quiet one, and clamping changes infinity, which
    the last elements are. Of what isn't floating point, each byte is 1.

    A stand-in has as many elements as the sizes of its tensor add up to, less one for each but one:
    a matrix has few, and a vector all. They are held twice. Together they have a 64th of the bytes
    they stand for, or 64 KiB; those that are too large for that, the largest ones, have one element
    like `absent_value`, and torch refuses to write to them.

    Args:
        tensors: have the types, shapes and device. Those without elements have no stand-in.

    Attributes:
        tensors: the stand-ins.
    """

    def __init__(self, tensors: Mapping[Key, Tensor]) -> None:
        wanted = {key: each for key, each in tensors.items() if each.numel()}
        sizes = {key: 1 + sum(n - 1 for n in each.shape) for key, each in wanted.items()}
        strides = dict.fromkeys(wanted, 1)
        room = max(_LEAST_ROOM, sum(each.nbytes for each in wanted.values()) // _SHARE)
        for key, size in sorted(sizes.items(), key=lambda item: item[1]):
            room -= size * wanted[key].itemsize
            if room < 0:
                sizes[key], strides[key] = 1, 0
        begin = _ALIGNMENT  # so that none lies where the memory as a whole does
        spans = (
            -(-sizes[key] * each.itemsize // _ALIGNMENT) * _ALIGNMENT
            for key, each in wanted.items()
        )
        _, *ends = itertools.accumulate(spans, initial=begin)
        self._ends = dict(zip(wanted, ends, strict=True))
        nbytes = max(ends, default=begin)
        device = next((each.device for each in wanted.values()), None)
        self._memory = torch.ones(nbytes, dtype=torch.uint8, device=device).view(torch.int64)
        self.tensors: dict[Key, Tensor] = {}
        for key, each in wanted.items():
            part, first = self._memory.untyped_storage(), begin // each.itemsize
            if self._memory.is_cpu:  # where admission tells parameters by their storage
                part, first = part[begin : self._ends[key]], 0
            begin = self._ends[key]
            flat = torch.empty(0, dtype=each.dtype, device=device)
            _poison(flat.set_(part, first, (sizes[key],)))  # type: ignore[call-overload]
            stand_in = torch.empty(0, dtype=each.dtype, device=device)
            steps = [strides[key]] * each.dim()
            stand_in.set_(part, first, each.shape, steps)  # type: ignore[call-overload]
            self.tensors[key] = stand_in
        self._before = self._memory.clone()

    def written(self) -> Key | None:
        """Return a stand-in that was written to; a device is waited for."""
        if torch.equal(self._memory, self._before):
            return None
        (first, *_) = (self._memory != self._before).nonzero().flatten().tolist()
        return next(key for key, end in self._ends.items() if first * 8 < end)


def _poison(flat: Tensor) -> None:
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    if not flat.is_floating_point():
        return
    if flat.dtype in _SIGNALLING:
        dtype, bits = _SIGNALLING[flat.dtype]
        flat.view(dtype).fill_(bits)
        flat[2:][-2:-1] = math.inf
        flat[1:][-1:] = -math.inf
    else:
        flat.fill_(math.nan)


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

    def __init__(
        self,
        model: nn.Module,
        kept: Callable[[Any], bool] | None = None,
        of: nn.Module | None = None,
    ) -> None:
        """Copy what the modules have now.

        Args:
            kept: says of a tensor or an array that it is not copied, but where it is a buffer.
            of: has modules, parameters and buffers to which the model may refer.
        """
        self._modules = list(model.modules())
        memo = _own_memo(model)
        if of is not None:
            memo |= _own_memo(of) | {id(buffer): buffer for buffer in of.buffers()}
        memo |= {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
        elsewhere = memo
        if kept is not None:
            leaves = tree_leaves([dict(vars(module)) for module in self._modules])
            elsewhere = memo | {id(each): each for each in leaves if kept(each)}
        self._values = [
            {
                name: _copied(value, memo if name == "_buffers" else elsewhere)
                for name, value in vars(module).items()
            }
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


class BuiltAttributes:
    """Holds copies of attributes of a model as it was built, and gives it such ones again.

    Args:
        places: the modules, each with the name of an attribute that it has or may have.
    """

    def __init__(self, model: nn.Module, places: Iterable[tuple[nn.Module, str]]) -> None:
        self._model = model
        memo = self._memo()
        self._built = [
            (
                held,
                name,
                *((held[name], _copied(held[name], memo)) if name in held else (_ABSENT,) * 2),
            )
            for held, name in ((vars(module), name) for module, name in places)
        ]

    def give_back(self, replaced: Callable[[Any], bool] = lambda present: True) -> None:
        """Let the attributes be as they were, and containers with their entries of then.

        Args:
            replaced: says of a present value whether it is to go.
        """
        memo = self._memo()
        for held, name, own, value in self._built:
            if not replaced(held.get(name)):
                continue
            if value is _ABSENT:
                held.pop(name, None)
                continue
            held[name] = value = _copied(value, memo)
            if type(own) in _CONTAINERS and type(own) is type(value):
                _fill(own, value)  # functions may refer to it
                held[name] = own

    def _memo(self) -> dict[int, Any]:
        return _own_memo(self._model) | {id(buffer): buffer for buffer in self._model.buffers()}


def _own_memo(model: nn.Module) -> dict[int, Any]:
    """Return the modules and parameters of a model by their ids, which are not copied."""
    return {id(each): each for each in (*model.modules(), *model.parameters())}


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
