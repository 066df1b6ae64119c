"""Lets a model's own parameters, attributes and buffers have other values for a while."""

from __future__ import annotations

import array
import copy
import functools
import itertools
import math
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, MethodType, SimpleNamespace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cerebro_hydra.copies import deep_copy

TensorKey = tuple[Literal["parameter", "buffer"], str]
"""The kind of a tensor and its name in the model."""

_ATOMS = (int, float, str, type(None))
_OF_TORCH = vars(nn.Module()).keys()
_Place = tuple[dict[str, Any], str]
"""The attributes of a module, and the name of one of them."""
_ABSENT = object()
"""Stands for an attribute that a module does not have."""

_BLOCKS = (Tensor, np.ndarray, bytearray, array.array)
"""What is filled in place, as others may refer to it, or to its memory."""
_LARGEST_BLOCK = 1 << 24
"""Bytes; what is larger is copied, and whoever else refers to it has another one."""

_HEAP_TYPE = 1 << 9
"""The flag of a class that was made by a class statement, or as by one."""
_OF_PYTHON = sys.stdlib_module_names - {"abc", "argparse", "collections", "typing"}
"""Modules of which no class is the base of a class of plain objects."""
_READ: dict[type, Callable[[Any], Any]] = {
    OrderedDict: lambda held: dict(OrderedDict.items(held)),
    dict: lambda held: dict(dict.items(held)),
    set: lambda held: set(set.__iter__(held)),
    list: lambda held: list(list.__iter__(held)),
    deque: lambda held: list(deque.__iter__(held)),
    defaultdict: lambda held: dict(dict.items(held)),
}
"""Reads the items of each kind of container, past the methods that a class may have of its own."""

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

    The model runs as another worker would build it, but it is the same object, and so are the
    containers and plain objects that it holds. So what refers to one of them, such as a hook, a
    lambda, a loss or another module, refers to what the model has that runs.
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
        modules = list(model.modules())
        memo = _own_memo(model)
        if of is not None:
            memo |= _own_memo(of) | {id(buffer): buffer for buffer in of.buffers()}
        memo |= {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
        buffers = [{n: memo.get(id(b), b) for n, b in each._buffers.items()} for each in modules]
        if kept is not None:
            leaves = tree_leaves([dict(vars(module)) for module in modules])
            memo |= {id(each): each for each in leaves if kept(each)}
        copies = _Copies(memo, Contents.of_holder)
        present = [Contents.of(module) for module in modules]
        copies.take(itertools.chain.from_iterable(each.values() for each in present))
        own = [each.mapped(copies.copied) for each in present]
        for module, copied in zip(modules, buffers, strict=True):
            if copied:
                copies.contents[id(module._buffers)] = Contents(copied)
        self._contents = [*zip(modules, own, strict=True), *copies.filled()]
        self._empty = copies.empty()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Give the modules these attributes, and afterwards their own."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        filled = [holder for holder in self._empty if holder]  # such as hooks of a module
        if filled:
            self._empty = [holder for holder in self._empty if not holder]
            self._contents += [(holder, _EMPTY[type(holder)]) for holder in filled]
        before = [(holder, Contents.of(holder)) for holder, _ in self._contents]
        for holder, contents in self._contents:
            contents.fill(holder)
        self._contents = before


class BuiltAttributes:
    """Holds copies of attributes of a model as it was built, and gives it such ones again.

    Args:
        places: the modules, each with the name of an attribute that it has or may have.
    """

    def __init__(self, model: nn.Module, places: Iterable[tuple[nn.Module, str]]) -> None:
        self._model = model
        self._places = self._with_sharers([(vars(module), name) for module, name in places])
        copies = _Copies(self._memo(), Contents.of_holder)
        copies.take(held.get(name) for held, name in self._places)
        self._built = [
            copies.copied(held[name]) if name in held else _ABSENT for held, name in self._places
        ]
        self._contents = copies.contents

    def give_back(self, replaced: Callable[[Any], bool] = lambda present: True) -> None:
        """Let the attributes be as they were, and what they refer to have what it had.

        Args:
            replaced: says of a present value whether it is to go.
        """
        again = _Copies(self._memo(), lambda value: self._contents.get(id(value)))
        built = zip(self._places, self._built, strict=True)
        given = [(*place, value) for place, value in built if replaced(place[0].get(place[1]))]
        again.take(value for *_, value in given)
        for held, name, value in given:
            if value is _ABSENT:
                held.pop(name, None)
            else:
                held[name] = again.copied(value)
        for holder, contents in again.filled():
            contents.fill(holder)
        for holder in again.empty():
            _EMPTY[type(holder)].fill(holder)

    def _with_sharers(self, places: list[_Place]) -> list[_Place]:
        """Return places, and those that refer to what is there, for training may part them."""
        there = {id(held.get(name)) for held, name in places}
        known = {(id(held), name) for held, name in places}
        copies = _Copies(self._memo(), Contents.of_holder)
        return places + [
            (held, name)
            for held in map(vars, self._model.modules())
            for name, value in held.items()
            if name not in _OF_TORCH and (id(held), name) not in known
            if not there.isdisjoint(copies.reached([value])[0])
        ]

    def _memo(self) -> dict[int, Any]:
        return _own_memo(self._model) | {id(buffer): buffer for buffer in self._model.buffers()}


def _own_memo(model: nn.Module) -> dict[int, Any]:
    """Return the modules and parameters of a model by their ids, which are not copied."""
    return {id(each): each for each in (*model.modules(), *model.parameters())}


def held_by(value: Any, kept: Callable[[Any], bool]) -> list[tuple[Any, Contents]]:
    """Return the containers and plain objects that a value refers to, or is, and what they have.

    Args:
        kept: says of a value that it, and what it refers to, is left out.
    """

    def contents_of(each: Any) -> Contents | None:
        return None if kept(each) else Contents.of_holder(each)

    holders, contents = _Copies({}, contents_of).reached([value])
    return [(holder, contents[key]) for key, holder in holders.items()]


class Contents(NamedTuple):
    """Holds what an object has: the items of a container, attributes, the content of a tensor."""

    items: Any = None
    attributes: Mapping[str, Any] = MappingProxyType({})
    slots: Mapping[str, Any] = MappingProxyType({})
    block: Any = None

    @classmethod
    def of(cls, holder: Any) -> Contents:
        """Return what it has, past the methods that its class may have of its own."""
        if type(holder) in _BLOCKS:
            value = holder.detach() if isinstance(holder, Tensor) else holder
            return cls(
                block=copy.copy(value) if isinstance(value, np.ndarray) else deep_copy(value)
            )
        if (read := _READ.get(type(holder))) is not None:
            return cls(read(holder))
        items = next(
            (read(holder) for kind, read in _READ.items() if isinstance(holder, kind)), None
        )
        state = object.__getstate__(holder)
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        return cls(items, dict(attributes or ()), slots or {})

    @classmethod
    def of_holder(cls, value: Any) -> Contents | None:
        """Return what a value has, None if it is to be copied as a whole."""
        kind = type(value)
        if kind in _READ:
            return cls.of(value) if value else _EMPTY[kind]
        is_holder = _is_block(value) if kind in _BLOCKS else _is_plain(kind)
        return cls.of(value) if is_holder else None

    def is_empty_of(self, holder: Any) -> bool:
        """Return whether a container has nothing, as most have in modules, such as hooks."""
        return self is _EMPTY.get(type(holder))

    def values(self) -> Iterator[Any]:
        """Yield all that is there."""
        items = self.items.values() if isinstance(self.items, dict) else self.items or ()
        return itertools.chain(items, self.attributes.values(), self.slots.values())

    def with_made(self, first: Contents, second: Contents) -> Contents:
        """Return the same with what two later readings have alike where there was nothing."""

        def filled(name: str) -> Any:
            mine, one, other = (getattr(each, name) for each in (self, first, second))
            if isinstance(mine, Mapping):
                made = {k: v for k, v in other.items() if one.get(k, _ABSENT) is v}
                return {**mine, **{k: v for k, v in made.items() if mine.get(k) is None}}
            alike = not mine and list(map(id, one or ())) == list(map(id, other or ()))
            return other if alike else mine

        return Contents(filled("items"), filled("attributes"), filled("slots"), self.block)

    def is_same(self, other: Contents) -> bool:
        """Return whether there are the same objects by the same names, or the same content."""
        if self.block is not None:
            return _same_block(self.block, other.block)
        return self._ids() == other._ids()

    def _ids(self) -> list[int]:
        parts = (self.items or (), self.attributes, self.slots, self.values())
        return list(map(id, itertools.chain.from_iterable(parts)))

    def mapped(self, function: Callable[[Any], Any]) -> Contents:
        """Return the same with what a function makes of each value."""

        def each_of(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: function(value) for name, value in values.items()} if values else {}

        items = self.items
        if isinstance(items, dict):
            items = each_of(items)
        elif items:
            items = type(items)(map(function, items))
        return Contents(items, each_of(self.attributes), each_of(self.slots), self.block)

    def fill(self, holder: Any) -> None:
        """Let an object have this; what it has already is left as it is."""
        if self.block is not None:
            _fill_block(holder, self.block)
            return
        if isinstance(holder, dict):
            _update(holder, self.items)
        elif isinstance(holder, list):
            list.__setitem__(holder, slice(None), self.items)
        elif isinstance(holder, set):
            set.clear(holder)
            set.update(holder, self.items)
        elif isinstance(holder, deque):
            deque.clear(holder)
            deque.extend(holder, self.items)
        if type(holder) in _READ:
            return
        if hasattr(holder, "__dict__"):
            _update(vars(holder), self.attributes)
        for name in Contents.of(holder).slots.keys() - self.slots.keys():
            object.__delattr__(holder, name)
        for name, value in self.slots.items():
            object.__setattr__(holder, name, value)


_EMPTY = {kind: Contents(read(kind())) for kind, read in _READ.items()}
"""What containers have that have nothing, by their kinds."""


def _is_block(value: Any) -> bool:
    """Return whether a tensor or an array can be filled, and is small enough for that."""
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and not value.is_inference() and value.is_leaf
        return is_plain and 0 not in value.stride() and value.nbytes <= _LARGEST_BLOCK
    if isinstance(value, np.ndarray):
        of_fields = value.dtype.hasobject and value.dtype.names  # gives other objects each time
        return value.flags.writeable and not of_fields and value.nbytes <= _LARGEST_BLOCK
    return len(value) <= _LARGEST_BLOCK


def _same_block(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        may_be_nan = one.is_floating_point() and one.dtype.itemsize > 1
        same_or_nan = functools.partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
        return torch.equal(one, other) or (may_be_nan and same_or_nan(one, other))
    if isinstance(one, np.ndarray):
        if one.dtype.hasobject:  # these need not say whether they are equal
            return [*map(id, one.flat)] == [*map(id, other.flat)]
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fcmM")
    return bool(one == other)


def _fill_block(holder: Any, block: Any) -> None:
    if not isinstance(holder, Tensor):
        holder[... if isinstance(holder, np.ndarray) else slice(None)] = block
    elif (holder.shape, holder.dtype) == (block.shape, block.dtype):
        holder.detach().copy_(block)
    else:
        holder.data = block.clone()


def _update(held: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    kind = OrderedDict if isinstance(held, OrderedDict) else dict
    if list(kind.keys(held)) != list(values):  # the order counts, too
        kind.clear(held)
    for name, value in values.items():
        if dict.get(held, name, _ABSENT) is not value:
            kind.__setitem__(held, name, value)


class _Copies:
    """Copies values, of which containers and objects stay the same: what they hold is copied.

    Args:
        memo: what other values are copied to, by their ids, as `copy.deepcopy` takes it.
        contents_of: returns what a container or an object has, None of anything else.

    Attributes:
        holders: these containers and objects, by their ids.
        contents: copies of what each has.
    """

    def __init__(self, memo: dict[int, Any], contents_of: Callable[[Any], Contents | None]) -> None:
        self.holders: dict[int, Any] = {}
        self.contents: dict[int, Contents] = {}
        self._memo, self._contents_of = memo, contents_of

    def take(self, values: Iterable[Any]) -> None:
        """Copy what containers and objects have that values refer to, which stay the same."""
        holders, contents = self.reached(values)
        self.holders |= holders
        self._memo |= holders
        self.contents |= contents
        for key, has in contents.items():
            if not has.is_empty_of(holders[key]):
                self.contents[key] = has.mapped(self.copied)

    def filled(self) -> list[tuple[Any, Contents]]:
        """Return those that have anything, with copies of it."""
        pairs = ((self.holders[key], has) for key, has in self.contents.items())
        return [(holder, has) for holder, has in pairs if not has.is_empty_of(holder)]

    def empty(self) -> list[Any]:
        """Return the containers that have nothing."""
        pairs = ((self.holders[key], has) for key, has in self.contents.items())
        return [holder for holder, has in pairs if has.is_empty_of(holder)]

    def copied(self, value: Any) -> Any:
        """Return a copy, or the value itself if it was taken or can't be copied."""
        if isinstance(value, _ATOMS) or id(value) in self.contents:
            return value
        known = len(self._memo)
        try:
            return deep_copy(value, self._memo)
        except Exception:  # such as a lock, or a tensor with a graph
            while len(self._memo) > known:  # copies that are made by half
                self._memo.popitem()
            return value

    def reached(self, values: Iterable[Any]) -> tuple[dict[int, Any], dict[int, Contents]]:
        """Return the containers and objects that values refer to, or are, and what they have."""
        holders: dict[int, Any] = {}
        found: dict[int, Contents] = {}
        left = list(values)
        while left:
            each = left.pop()
            if isinstance(each, _ATOMS) or id(each) in self._memo or id(each) in found:
                continue
            if isinstance(each, tuple):
                left += each
            elif isinstance(each, MethodType):
                left.append(each.__self__)
            elif isinstance(each, functools.partial):
                left += [each.func, *each.args, *each.keywords.values()]
            elif (contents := self._contents_of(each)) is not None:
                holders[id(each)], found[id(each)] = each, contents
                if not contents.is_empty_of(each):
                    left += contents.values()
        return holders, found


def _is_plain(kind: type[Any]) -> bool:
    """Return whether objects of a class have items and attributes that others may exchange.

    Those of most of Python's own library, such as threads and queues, may have more, and an
    optimizer has what is copied with its parameters.
    """
    return kind is SimpleNamespace or (
        not issubclass(kind, torch.optim.Optimizer)
        and all(
            base in _READ
            or base is object
            or (base.__flags__ & _HEAP_TYPE and base.__module__.partition(".")[0] not in _OF_PYTHON)
            for base in kind.__mro__
        )
    )
