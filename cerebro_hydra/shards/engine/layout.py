"""Lays out the tensors of a shard in its segments. A segment is a safetensors file.

    8 bytes     length of the header
    header      JSON, padded with spaces
    data        every tensor at a multiple of 256 bytes, with padding named `pad:N` between them

A segment does not name its trial, so equal layers of different trials have equal bytes.

Gradients are laid out apart, for the time in which a shard's state may leave a device.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cerebro_hydra.documents import parse, unreadable
from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.optimizer_list import kept_of
from cerebro_hydra.recipe.placement import CPU
from cerebro_hydra.shards.cut.model import CutModel, TensorInfo
from cerebro_hydra.shards.cut.small_buffers import in_one_memory
from cerebro_hydra.shards.cut.values import TensorKey
from cerebro_hydra.shards.engine.optimizer import StateEntry, StateTemplate
from cerebro_hydra.shards.mapped_memory import mapped

ALIGNMENT = 256
"""Bytes; the CPU's libraries may look at addresses up to 64 for their kernels, CUDA's up to 256."""
EXISTS = "exists"

Bytes = NDArray[np.uint8]
HostSegments = dict[str, Bytes]
"""The "frozen" and "trainable" bytes of one shard, as the host keeps and sends them."""

Memory = Tensor
"""One-dimensional bytes of the device that computes with them, aligned to `ALIGNMENT`."""
Segments = dict[str, Memory]
"""The "frozen" and "trainable" memory of one shard.

The second may end at the shard's `split`; then "optimizer" is the rest, if that is there.
"""

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip

_KINDS = {
    "param": "parameter", "buffer": "buffer", "ema": "the moving average of parameter",
    "optim": "the optimizer's state", "number": "the optimizer's number",
}  # fmt: skip
_REMEDIES = {torch.complex128: "use complex64, or keep its torch.view_as_real"}


@dataclass(frozen=True)
class LayoutEntry:
    """Describes one tensor: its form, and where it lies in bytes from the start of the segment."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self, memory: Memory) -> Tensor:
        """Return the tensor in the segment's memory, with a storage and a version of its own."""
        start = memory.storage_offset() + self.offset
        part = memory.untyped_storage()[start : start + self.nbytes]
        view = torch.empty(0, dtype=self.dtype, device=memory.device)
        return view.set_(part, 0, self.shape, self.strides)  # type: ignore[call-overload,no-any-return]

    @cached_property
    def kind(self) -> str:
        """Return what it is: a parameter, a buffer, an average, or a tensor or number of state."""
        return self.name.partition(":")[0]

    @cached_property
    def of(self) -> str:
        """Return whose it is: the name of a parameter or buffer."""
        rest = self.name.partition(":")[2]
        return rest.rpartition(":")[0] if is_optimizer_state(self.name) else rest

    @cached_property
    def key(self) -> str:
        """Return the key of optimizer state."""
        return self.name.rpartition(":")[2]


@dataclass(frozen=True)
class SegmentLayout:
    """Describes one segment: its entries in file order, its size, and its constant header."""

    entries: tuple[LayoutEntry, ...]
    nbytes: int
    header: bytes = field(repr=False)

    def allocate(self) -> Bytes:
        """Return zeroed, aligned memory that begins with the header."""
        buffer = aligned(self.nbytes, zeroed=True)
        buffer[: len(self.header)] = np.frombuffer(self.header, np.uint8)
        return buffer

    def check(self, memory: Memory, what: str, nbytes: int | None = None) -> None:
        """Raise ValueError if the memory is not a segment of this layout, or its first bytes.

        On an accelerator only the size is looked at.
        """
        nbytes = self.nbytes if nbytes is None else nbytes
        fits = memory.nbytes == nbytes
        if fits and memory.device == CPU:  # for another device's bytes would be waited
            fits = memory[: len(self.header)].numpy().tobytes() == self.header
        if not fits:
            raise ValueError(
                f"the {what} segment of {memory.nbytes} bytes does not fit its layout of "
                f"{nbytes} bytes; it belongs to another trial or cut, or the factory makes another "
                "model in each process, as by the order of a set of texts: sort it"
            )


@dataclass(frozen=True)
class ShardLayout:
    """Describes both segments of a shard; an empty one is a header alone."""

    frozen: SegmentLayout
    trainable: SegmentLayout

    @property
    def nbytes(self) -> int:
        return self.frozen.nbytes + self.trainable.nbytes

    @cached_property
    def split(self) -> int:
        """Return where in the trainable segment begins what updates alone read and write.

        That is moving averages and optimizer state. Parameters and buffers lie before it.
        """
        apart = (entry.offset for entry in self.trainable.entries if is_updates_own(entry.name))
        return next(apart, self.trainable.nbytes)

    @cached_property
    def gradients(self) -> GradientLayout:
        """Return how gradients are laid out in memory of their own."""
        return GradientLayout.of(self)

    @cached_property
    def before_split(self) -> tuple[LayoutEntry, ...]:
        """Return what lies before the `split` of the trainable segment."""
        return tuple(each for each in self.trainable.entries if not is_updates_own(each.name))

    @cached_property
    def behind_split(self) -> tuple[LayoutEntry, ...]:
        """Return what lies behind it, by offsets from there."""
        own = (each for each in self.trainable.entries if is_updates_own(each.name))
        return tuple(replace(each, offset=each.offset - self.split) for each in own)

    def placed(
        self, trainable: Memory, optimizer: Memory | None
    ) -> Iterator[tuple[Sequence[LayoutEntry], Memory]]:
        """Yield the memory of the trainable segment, in one part or two, each with what is in it.

        Args:
            trainable: the segment, or what lies before its `split`.
            optimizer: what lies behind that, if it is apart and there.
        """
        if trainable.nbytes == self.trainable.nbytes:
            yield self.trainable.entries, trainable
            return
        yield self.before_split, trainable
        if optimizer is not None:
            yield self.behind_split, optimizer


@dataclass(frozen=True)
class TrialLayout:
    """Describes the segments of every shard of a trial."""

    shards: tuple[ShardLayout, ...]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def step_bytes(self, first: bool) -> int:
        """Return the bytes that optimizer steps need beside the segments.

        They are gradients, twice because the heap has gaps, and in a trial's first step the
        optimizer state that was just made.
        """
        entries = [entry for shard in self.shards for entry in shard.trainable.entries]
        gradients = sum(entry.nbytes for entry in entries if entry.name.startswith("param:"))
        made = sum(entry.nbytes for entry in entries if is_optimizer_state(entry.name))
        return 2 * gradients + (made if first else 0)

    @classmethod
    def make(cls, recipe: Recipe, cut_model: CutModel, template: StateTemplate) -> TrialLayout:
        """Lay out a recipe's parameters, their moving averages, buffers and optimizer state.

        Raises:
            ConfigurationError: a tensor has a type that safetensors lacks, or two parameters
                overlap in memory.
        """
        check_no_overlap(recipe)
        return cls(
            tuple(
                _shard_layout(cut_model, template, k, recipe.ema is not None)
                for k in range(cut_model.num_shards)
            )
        )


@dataclass(frozen=True, eq=False)
class TrialRuntime:
    """Holds one trial, ready to train.

    Args:
        recipe: its model and optimizer are read but never changed.
        cut_model: trials of equal structure may share one, one trial at a time per thread.
        layout: where each tensor lies in the trial's segments.
        seed: random numbers depend on it, the step, the microbatch and the unit.
        steps_per_epoch: is given to LR schedulers that take it.
        staleness: by shard, how many updates older the weights are that its tasks read; see
            `TaskGraph`.
        spoilt: what something else than the model refers to by a second name, which is NaN here.
    """

    recipe: Recipe
    cut_model: CutModel
    layout: TrialLayout
    seed: int
    steps_per_epoch: int
    staleness: tuple[int, ...] = ()
    spoilt: tuple[TensorKey, ...] = ()

    @property
    def num_shards(self) -> int:
        """Return how many shards the trial has."""
        return self.cut_model.num_shards


def initial_segments(recipe: Recipe, layout: TrialLayout) -> Iterator[HostSegments]:
    """Yield state 0 of a trial by shard: parameters, buffers, the optimizer's initial state."""
    tensors = _initial_tensors(recipe)
    for shard in layout.shards:
        both = {"frozen": shard.frozen, "trainable": shard.trainable}
        yield {name: filled(segment, tensors) for name, segment in both.items()}


def write_initial(recipe: Recipe, layout: TrialLayout, shards: Sequence[HostSegments]) -> None:
    """Bring the tensors that a recipe has to state 0, and leave other optimizer state."""
    tensors = _initial_tensors(recipe)
    for shard, segments in zip(layout.shards, shards, strict=True):
        _write(shard.frozen, segments["frozen"], tensors)
        _write(shard.trainable, segments["trainable"], tensors)


def _initial_tensors(recipe: Recipe) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in recipe.model.named_parameters():
        tensors[f"param:{name}"] = tensors[f"ema:{name}"] = parameter
        tensors |= kept_of(name, recipe.optimizer.state.get(parameter, {}))
    return tensors | {f"buffer:{n}": b for n, b in recipe.model.named_buffers()}


def filled(segment: SegmentLayout, tensors: Mapping[str, Tensor]) -> Bytes:
    """Return a segment with the tensors that exist, and marks of the optimizer state among them."""
    marks = [e.name in tensors for e in segment.entries if is_optimizer_state(e.name)]
    buffer = segment.allocate()
    _write(segment, buffer, {**tensors, EXISTS: torch.tensor(marks, dtype=torch.uint8)})
    return buffer


def _write(segment: SegmentLayout, buffer: Bytes, tensors: Mapping[str, Tensor]) -> None:
    memory = memory_of(buffer)
    for entry in segment.entries:
        if entry.name in tensors:
            entry.view(memory).copy_(tensors[entry.name].detach())


def is_padding(name: str) -> bool:
    """Return whether an entry of this name fills the gap between two tensors."""
    return name.startswith("pad:")


def is_optimizer_state(name: str) -> bool:
    """Return whether a tensor of this name in a segment has a mark in `exists`."""
    return name.startswith(("optim:", "number:"))


def is_updates_own(name: str) -> bool:
    """Return whether a tensor of this name in a segment is read and written by updates alone.

    An evaluation reads moving averages, too.
    """
    return name.startswith("ema:") or is_optimizer_state(name) or name == EXISTS


def aligned(nbytes: int, zeroed: bool = False) -> Bytes:
    """Return memory that starts at a multiple of `ALIGNMENT`.

    Kernels may round otherwise on other addresses. Zeroed memory costs nothing until written to.
    Large memory is mapped from a file within `MappedMemory`.
    """
    if (of_file := mapped(nbytes)) is not None:
        return of_file.numpy()
    raw = (np.zeros if zeroed else np.empty)(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def in_place(segments: HostSegments) -> HostSegments:
    """Return segments that can be computed in: one that is not aligned is copied."""
    return {name: _aligned_copy(buffer) for name, buffer in segments.items()}


def _aligned_copy(buffer: Bytes) -> Bytes:
    if buffer.ctypes.data % ALIGNMENT == 0:
        return buffer
    copy = aligned(buffer.nbytes)
    copy[:] = buffer
    return copy


def memory_of(buffer: Bytes) -> Memory:
    """Return aligned bytes of the host as memory of the CPU, at the same place.

    Those that are read-only must be in a frozen segment, to which nobody writes.
    """
    alias = buffer[:]  # so that whoever owns the bytes can count those who look into them
    return torch.from_numpy(alias if alias.flags.writeable else np.asarray(_Alias(alias)))


def on_host(segments: HostSegments) -> Segments:
    """Return aligned segments of the host as memory of the CPU; see `memory_of`."""
    return {name: memory_of(buffer) for name, buffer in segments.items()}


class _Alias:
    """Is the base of a writable array, which torch takes without a warning, on read-only bytes."""

    def __init__(self, buffer: Bytes) -> None:
        interface = buffer.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self._buffer = buffer


def read_tensors(buffer: Bytes) -> dict[str, Tensor]:
    """Return every tensor of a segment by name, in the model's shape and without the padding.

    Raises:
        StoreError: the bytes are no segment.
    """
    content = buffer.tobytes()
    try:
        tensors = safetensors.torch.load(content)
    except (safetensors.SafetensorError, KeyError) as error:
        raise StoreError(
            f"a segment of {len(content)} bytes is damaged ({error}); restore it from a copy"
        ) from error
    header = parse(content[8 : 8 + int.from_bytes(content[:8], "little")], "a segment's header")
    for name, text in header.get("__metadata__", {}).items():
        order = [int(axis) if axis.isdecimal() else -1 for axis in text.split(",")]
        if name not in tensors or sorted(order) != list(range(tensors[name].dim())):
            raise unreadable(f"the order of axes of {name!r} in a segment", text)
        tensors[name] = tensors[name].permute([order.index(d) for d in range(len(order))])
    return {name: tensor for name, tensor in tensors.items() if not is_padding(name)}


def check_no_overlap(recipe: Recipe) -> None:
    """Refuse a model whose parameters share memory with one another, or a buffer, as other tensors.

    Raises:
        ConfigurationError: two are different views of the same memory.
    """
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in recipe.model.named_parameters()
        if p.numel()
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ConfigurationError(
                f"parameters {name!r} and {other!r} are different views of the same memory; "
                "tie them by assigning one Parameter to both, or copy one"
            )
    trained = ((f"param:{n}", p) for n, p in recipe.model.named_parameters() if p.requires_grad)
    buffers = ((f"buffer:{name}", buffer) for name, buffer in recipe.model.named_buffers())
    for together in in_one_memory((*trained, *buffers)):
        owner = next((name for name in together if name.startswith("param:")), None)
        if owner is not None:
            other = next(name for name in together if name.startswith("buffer:"))
            raise ConfigurationError(
                f"buffer {other.partition(':')[2]!r} lies in the memory of parameter "
                f"{owner.partition(':')[2]!r}, which training changes; register a copy, or let the "
                "forward read the parameter"
            )


def _shard_layout(
    cut_model: CutModel, template: StateTemplate, shard: int, ema: bool
) -> ShardLayout:
    params = [p for p in cut_model.params if p.owner == shard]
    buffers = [b for b in cut_model.buffers if b.owner == shard]
    state = [
        (f"{e.kind}:{p.name}:{e.key}", e.dtype, e.shape, _state_strides(p, e))
        for p in params
        if not p.frozen
        for e in template.of(p.name)
    ]
    named = [(f"param:{p.name}", p) for p in params] + [(f"buffer:{b.name}", b) for b in buffers]
    frozen = [(n, i.dtype, i.shape, i.strides) for n, i in named if i.frozen]
    trainable = [(n, i.dtype, i.shape, i.strides) for n, i in named if not i.frozen]
    if ema:
        averaged = [p for p in params if not p.frozen]
        trainable += [(f"ema:{p.name}", p.dtype, p.shape, p.strides) for p in averaged]
    marks = [(EXISTS, torch.uint8, (len(state),), (1,))] if state else []
    return ShardLayout(segment_of(frozen), segment_of([*trainable, *state, *marks]))


def _state_strides(param: TensorInfo, entry: StateEntry) -> tuple[int, ...]:
    if entry.strides is not None:
        return entry.strides
    return param.strides if entry.shape == param.shape else contiguous_strides(entry.shape)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(n, 1) for n in shape[d + 1 :]) for d in range(len(shape)))


def segment_of(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]]],
    dtype_names: Mapping[torch.dtype, str] = DTYPE_NAMES,
) -> SegmentLayout:
    """Lay out tensors, given by name, type, shape and strides, one after the other.

    Raises:
        ConfigurationError: safetensors lacks a tensor's type.
    """
    header: dict[str, Any] = {}
    permutations: dict[str, str] = {}
    placed: list[LayoutEntry] = []
    at = 0
    for name, dtype, shape, strides in tensors:
        if dtype not in dtype_names:
            kind, _, rest = name.partition(":")
            what = f"{_KINDS[kind]} {rest!r}" if kind in _KINDS else f"tensor {name!r}"
            raise ConfigurationError(
                f"{what} has dtype {dtype}, which safetensors lacks; "
                + _REMEDIES.get(dtype, "convert it to another dtype")
            )
        nbytes = math.prod(shape) * dtype.itemsize
        # A tensor whose dimensions lie in memory in another order is written in that order.
        order = sorted(range(len(shape)), key=lambda d: -strides[d])
        if strides == contiguous_strides(shape) or torch.Size(shape).numel() == 0:
            order = list(range(len(shape)))
        if order != list(range(len(shape))):
            permutations[name] = ",".join(map(str, order))
        header[name] = {
            "dtype": dtype_names[dtype],
            "shape": [shape[d] for d in order],
            "data_offsets": [at, at + nbytes],
        }
        placed.append(LayoutEntry(name, dtype, shape, strides, at, nbytes))
        at += nbytes
        if gap := -at % ALIGNMENT:
            header[f"pad:{len(placed) - 1}"] = {
                "dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap],
            }  # fmt: skip
            at += gap
    if permutations:
        header["__metadata__"] = permutations
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    start = 8 + len(text)
    entries = tuple(
        LayoutEntry(e.name, e.dtype, e.shape, e.strides, start + e.offset, e.nbytes) for e in placed
    )
    return SegmentLayout(entries, start + at, struct.pack("<Q", len(text)) + text)


@dataclass(frozen=True)
class GradientLayout:
    """Describes memory with a mark for each parameter that trains, and room for its gradient.

    A mark is 0 where there is no gradient, so zeroed memory has none.
    """

    entries: tuple[LayoutEntry, ...]
    nbytes: int

    @classmethod
    def of(cls, shard: ShardLayout) -> GradientLayout:
        """Lay out the gradients of a shard, which keeps that as its `gradients`."""
        params = [e for e in shard.trainable.entries if e.name.startswith("param:")]
        return cls._in_order([replace(e, name=e.name.partition(":")[2]) for e in params])

    @classmethod
    def _in_order(cls, given: Sequence[LayoutEntry]) -> GradientLayout:
        at, entries = _up(len(given)), []
        for entry in given:
            entries.append(replace(entry, offset=at))
            at += _up(entry.nbytes)
        return cls(tuple(entries), at)

    def buckets(self, full: int) -> Iterator[GradientLayout]:
        """Part the gradients from the last one on, which is the first that a backward makes.

        Args:
            full: bytes from which on nothing more is put into one.
        """
        bucket: list[LayoutEntry] = []
        for entry in reversed(self.entries):
            bucket.append(entry)
            if sum(each.nbytes for each in bucket) >= full:
                yield self._in_order(bucket)
                bucket = []
        if bucket:
            yield self._in_order(bucket)

    def load(self, memory: Memory, params: Mapping[str, nn.Parameter]) -> None:
        """Let the gradients in the memory be those of the parameters.

        A gradient that a parameter has already came later and is added, as autograd would.
        """
        marks = memory[: len(self.entries)].tolist()
        for entry in itertools.compress(self.entries, marks):
            parameter, gradient = params[entry.name], entry.view(memory)
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = gradient

    def store(self, memory: Memory | None, params: Mapping[str, nn.Parameter]) -> None:
        """Move the gradients of the parameters into the memory.

        Raises:
            ConfigurationError: a gradient is sparse.
            ValueError: there are gradients, but no memory.
        """
        marks = torch.zeros(len(self.entries), dtype=torch.uint8)
        for number, entry in enumerate(self.entries):
            parameter = params[entry.name]
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                memory = _fitting(entry, gradient, memory)
                marks[number] = 1
                if gradient.data_ptr() != memory.data_ptr() + entry.offset:
                    entry.view(memory).copy_(gradient)
        if memory is not None:
            memory[: len(self.entries)] = marks


@dataclass(frozen=True, slots=True)
class ShardBytes:
    """Holds the bytes of a shard: both segments, and the gradients of what trains.

    Args:
        forward_writes: whether forwards change buffers.
        optimizer: of the trainable segment, what updates alone need.
        averages: whether there are moving averages in that, which an evaluation reads.
    """

    frozen: int
    trainable: int
    gradients: int
    forward_writes: bool
    optimizer: int = 0
    averages: bool = False

    @classmethod
    def of(cls, layout: ShardLayout) -> ShardBytes:
        """Return those of a layout."""
        trained = layout.trainable.entries
        return cls(
            layout.frozen.nbytes,
            layout.trainable.nbytes,
            layout.gradients.nbytes,
            any(entry.name.startswith("buffer:") for entry in trained),
            layout.trainable.nbytes - layout.split,
            any(entry.name.startswith("ema:") for entry in trained),
        )


def _fitting(entry: LayoutEntry, gradient: Tensor, memory: Memory | None) -> Memory:
    """Return the memory that a gradient can be moved into."""
    if gradient.is_sparse:
        raise ConfigurationError(
            f"the gradient of parameter {entry.name!r} is sparse and can't leave a device; set "
            "sparse=False in its embedding"
        )
    if memory is None:
        raise ValueError(
            f"parameter {entry.name!r} has a gradient when its shard leaves the device; give "
            "memory for gradients"
        )
    return memory


def _up(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT
