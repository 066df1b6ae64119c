"""Knows where tensors lie, and finds those that training puts into the memory of others."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import ReferenceType

import torch
from torch import Tensor

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.digest import tensor_digest


class Places:
    """Knows where tensors lie, by ranges of addresses that do not overlap.

    Attributes:
        used: what has used one of them, in a sentence, or None.
    """

    def __init__(self) -> None:
        self.used: str | None = None
        self._begins: list[int] = []
        self._ranges: list[tuple[int, str]] = []  # the end, and what lies there

    def __bool__(self) -> bool:
        """Return whether there is any."""
        return bool(self._begins)

    def add(self, told: str, tensor: Tensor) -> None:
        """Add what a tensor has."""
        begin = tensor.data_ptr()
        if begin and tensor.numel():
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            at = bisect.bisect(self._begins, begin)
            self._begins.insert(at, begin)
            self._ranges.insert(at, (begin + (last + 1) * tensor.itemsize, told))

    def discard(self, tensor: Tensor) -> None:
        """Take out what a tensor has, if it was added."""
        at = bisect.bisect_left(self._begins, begin := tensor.data_ptr())
        if self._begins[at : at + 1] == [begin]:
            del self._begins[at], self._ranges[at]

    def at(self, address: int) -> str | None:
        """Return what lies at an address."""
        number = bisect.bisect(self._begins, address) - 1
        if number < 0 or address >= self._ranges[number][0]:
            return None
        return self._ranges[number][1]


@dataclass(slots=True)
class TensorMark:
    """Knows a tensor as it was, and tells whether somebody has written to it since.

    Its version counts what operations of torch write, to it or to a view of it. It does not count
    what is written by `.data`, by NumPy or by other libraries; only the content shows that.
    """

    tensor: Tensor
    version: int
    place: int

    @classmethod
    def on(cls, tensor: Tensor) -> TensorMark:
        """Mark a tensor as it is."""
        return cls(tensor, tensor._version, tensor.data_ptr())

    @property
    def is_written(self) -> bool:
        """Return whether the tensor has been written to, or got other memory."""
        return self.tensor._version != self.version or self.tensor.data_ptr() != self.place


class BoundMark(NamedTuple):
    """Marks a parameter in memory of its shard, which is another one once the shard comes anew."""

    memory: ReferenceType[Tensor]
    mark: TensorMark


TRAINED = "parameter "
"""Begins what is told of a parameter that trains."""

_OWN_STORAGE = 2  # uses of it: the tensor, and whoever asks


class StepNotes:
    """Notes of steps what would differ on a worker, at once or unless every step does it anew.

    A buffer that is given the memory of another one, or other strides, has memory of its own on a
    worker, to which the values are copied. Where each step does so, admission has found that as
    good. Where some steps do, it would move with the other one, or kernels may round otherwise.
    """

    def __init__(self) -> None:
        self._before: set[str] | None = None
        self._now: set[str] | None = None
        self._given: dict[str, Tensor] = {}  # what had no owner in the model

    def begin_step(self) -> None:
        """Begin a step."""
        self._now = set()

    def note(self, told: str) -> None:
        """Note what the step does, in a sentence."""
        if self._now is not None:
            self._now.add(told)

    def give(self, told: str, found: Tensor, has_owner: bool) -> None:
        """Note that a tensor was given memory, from which it was copied into its own.

        Args:
            has_owner: whether that is memory of a tensor that hops.
        """
        self._given.pop(told, None)
        if not has_owner and found.data_ptr():
            self._given[told] = found

    def check(self, told: str, memory: Tensor) -> None:
        """Check a tensor that was not given other memory meanwhile.

        Raises:
            ConfigurationError: it has moved, and what it was given something else refers to.
        """
        if (found := self._given.get(told)) is None or not self._is_kept(told):
            return
        if tensor_digest(found) != tensor_digest(memory):
            raise ConfigurationError(_kept_elsewhere(told))

    def end_step(self) -> None:
        """Compare a step, if one has begun, with the one before it, if there was one.

        Raises:
            ConfigurationError: one of them alone has done something, or a parameter was given
                memory to which something else still refers.
        """
        for told in tuple(self._given):
            if self._is_kept(told) and told.startswith(TRAINED):
                raise ConfigurationError(_kept_elsewhere(told))
        if (now := self._now) is None:
            return
        before, self._before, self._now = self._before, now, None
        if before is not None and (differing := sorted(before ^ now)):
            raise ConfigurationError(differing[0])

    def _is_kept(self, told: str) -> bool:
        """Return whether something else refers to what a tensor was given; else it is forgotten."""
        storage = self._given[told].untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) > _OWN_STORAGE:
            return True
        del self._given[told]
        return False


def is_moved(found: Tensor, memory: Tensor) -> bool:
    """Return whether a tensor lies elsewhere than in its memory, or in another order."""
    return found.data_ptr() != memory.data_ptr() or found.stride() != memory.stride()


class Holder(Protocol):
    """Has tensors of a trial."""

    def add_to(self, places: Places) -> None:
        """Add where they lie."""


class Rebound:
    """Writes what code has put in the place of tensors into the memory that these have.

    All of it is read before any of it is written, as one may have been given the memory of another.

    Args:
        holders: what has tensors of the trial, with which one must not share memory.
        notes: is told of buffers that do; without, that is an error, too.
    """

    def __init__(self, holders: Iterable[Holder], notes: StepNotes | None = None) -> None:
        self._holders, self._notes = holders, notes
        self._found: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, told: str, found: Tensor, memory: Tensor) -> None:
        """Add what is in the place of a tensor, and that one's memory.

        Raises:
            ConfigurationError: it has another shape or type, or its elements lie in another order.
        """
        if (found.shape, found.dtype) != (memory.shape, memory.dtype):
            raise made_anew(told, memory, found)
        order, own = order_of(found), order_of(memory)
        if order != own:
            text = (
                f"training put a tensor with strides {order} in the place of {told}, whose strides "
                f"are {own}, in which kernels may round otherwise; give it .contiguous(), or copy_ "
                "it there"
            )
            self._tell(told, text, ConfigurationError)
        self._found[told] = found.detach(), memory

    def write(self, error: type[Exception] = ConfigurationError) -> None:
        """Write all of them.

        Args:
            error: what is raised where one shares memory.

        Raises:
            Exception: this error; see `StepNotes` for buffers.
        """
        if not self._found:
            return
        places = Places()
        for holder in self._holders:
            holder.add_to(places)
        owners = {told: places.at(found.data_ptr()) for told, (found, _) in self._found.items()}
        given: dict[int, str] = {}
        for told, (found, _) in self._found.items():
            other = owners[told]
            if other is None or other in self._found:  # that one has other memory now
                other = given.setdefault(found.data_ptr(), told)
            if other == told or not found.data_ptr():
                continue
            text = (
                f"training gave {told} the memory of {other}, so that each would change with the "
                "other; on workers each has its own. Give it a copy, as by .clone()"
            )
            if other.startswith(TRAINED):  # an update may come before the values are copied, or not
                raise error(text)
            self._tell(told, text, error)
        values = [
            found if owners[told] is None else found.clone()
            for told, (found, _) in self._found.items()
        ]
        for (told, (found, memory)), value in zip(self._found.items(), values, strict=True):
            memory.copy_(value)
            if self._notes is not None:
                self._notes.give(told, found, owners[told] is not None)

    def _tell(self, told: str, text: str, error: type[Exception]) -> None:
        if self._notes is None or not told.startswith("buffer "):
            raise error(text)
        self._notes.note(text)


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, in the dimensions where they matter."""
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(stride if size > 1 else 0 for stride, size in strides)


def _kept_elsewhere(told: str) -> str:
    return (
        f"training gave {told} the memory of a tensor that something else refers to, which would "
        "change with it; on workers it has its own. Give it a copy, as by .clone()"
    )


def made_anew(told: str, before: Tensor, now: Tensor) -> ConfigurationError:
    """Return the error of a tensor that was registered anew or assigned in another form."""
    forms = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (before, now))
    instead = "register it in the constructor as large as it is ever needed"
    if told.startswith("state "):
        instead = "give it in its first two steps the shape and type that it is ever to have"
    return ConfigurationError(
        f"training made {told} anew, from {' to '.join(forms)}, which other workers would not "
        f"have; {instead}"
    )
