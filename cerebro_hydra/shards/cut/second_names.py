"""Finds what refers to the memory of a model's tensors by another name than the model's own."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import NonFiniteLoss
from cerebro_hydra.shards.cut.values import AttributeValues, ParameterValues, TensorKey

_OWN_STORAGE = 2  # uses of it: the parameter, and whoever asks
_OWN_OBJECT = 2  # references to it: the module's dictionary, and whoever asks
_MOST_TOLD = 3

OTHER_VALUES = (math.nan, math.inf, -math.inf)
"""What memory is overwritten with, because a comparison may swallow one of them."""


class SecondNames:
    """Knows the parameters and buffers whose memory something else refers to, too.

    Such is a hook that has closed over the `.data`, `.detach()` or `.numpy()` of a parameter, or
    over a buffer. It sees every update of the model's own memory, and none of other memory that
    the model is bound to.

    Args:
        model: with its own tensors, or with others for a while.
        known: how many others are known to refer to the memory of each parameter.
    """

    def __init__(self, model: nn.Module, known: int = 0) -> None:
        self._memory: dict[TensorKey, Tensor] = {
            ("parameter", name): parameter.data
            for name, parameter in model.named_parameters()
            if _uses(parameter) > _OWN_STORAGE + known
        }
        self._trains = {name for name, p in model.named_parameters() if p.requires_grad}
        for place, module in model.named_modules():
            for name in module._buffers:
                if (memory := _also_elsewhere(module, name)) is not None:
                    self._memory["buffer", f"{place}.{name}" if place else name] = memory

    @property
    def keys(self) -> Collection[TensorKey]:
        """Return the kind and name of each of these tensors."""
        return self._memory.keys()

    def changed_by_training(self, written: Collection[str]) -> list[TensorKey]:
        """Return those that training changes.

        Args:
            written: the buffers and frozen parameters that it writes to.
        """
        return [key for key in self.keys if key[1] in self._trains or key[1] in written]

    def spoil(self, written: Collection[str]) -> tuple[TensorKey, ...]:
        """Let the memory of those that training changes be NaN for whoever else refers to it.

        What reads it only after the steps that admission took makes the loss NaN, and fails. The
        model must not use it any more. Integers stay as they are, and the others are returned.

        Args:
            written: the buffers and frozen parameters that training writes to.
        """
        keys = self.changed_by_training(written)
        spoilt = tuple(key for key in keys if _has_nan(self._memory[key]))
        for key in spoilt:
            self._memory[key].fill_(math.nan)
        return spoilt

    def forget_unused(self) -> None:
        """Forget the tensors to which nothing refers any more, once the model has others."""
        used = {key: each for key, each in self._memory.items() if _uses(each) > _OWN_STORAGE}
        self._memory = used

    def has(self, value: Any) -> bool:
        """Return whether a tensor or array lies in this memory."""
        if isinstance(value, Tensor) and value.layout is torch.strided:
            at = value.untyped_storage().data_ptr()
        elif isinstance(value, np.ndarray):
            at = value.__array_interface__["data"][0]
        else:
            return False
        storages = (each.untyped_storage() for each in self._memory.values())
        return any(s.data_ptr() <= at < s.data_ptr() + s.nbytes() for s in storages)

    @contextmanager
    def overwritten(self, keys: Collection[TensorKey], value: float) -> Iterator[None]:
        """Let the memory of these have another value for a while."""
        memory = [self._memory[key] for key in keys]
        before = [each.clone() for each in memory]
        try:
            for each in memory:
                _overwrite(each, value)
            yield
        finally:
            for each, own in zip(memory, before, strict=True):
                _restore(each, own)


@contextmanager
def in_place(
    model: nn.Module, kept: Callable[[Any], bool], written: Collection[str]
) -> Iterator[None]:
    """Let a model run on with its tensors and copies of its attributes, and give all of it back.

    What refers to its tensors sees what happens to them, as in plain PyTorch.

    Args:
        kept: as of `AttributeValues`.
        written: the frozen parameters that it may write to.
    """
    own = {p: p.data for name, p in model.named_parameters() if p.requires_grad or name in written}
    of_parameters = {parameter: dict(vars(parameter)) for parameter in own}
    buffers = [(m._buffers, name, b) for m in model.modules() for name, b in m._buffers.items()]
    tensors = [*own.values(), *{id(b): b for *_, b in buffers if b is not None}.values()]
    before = [each.clone() for each in tensors]
    with AttributeValues(model, kept).in_use():
        for registered, name, buffer in buffers:
            registered[name] = buffer
        try:
            yield
        finally:
            for parameter, data in own.items():
                parameter.data, parameter.grad = data, None
                vars(parameter).clear()
                vars(parameter).update(of_parameters[parameter])
            for tensor, content in zip(tensors, before, strict=True):
                _restore(tensor, content)


def _restore(tensor: Tensor, content: Tensor) -> None:
    """Copy contents back into a tensor, once where `expand` repeats them."""
    for dim, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, content = tensor.narrow(dim, 0, 1), content.narrow(dim, 0, 1)
    tensor.copy_(content)


def move(model: nn.Module, keys: Collection[TensorKey], value: float) -> None:
    """Let a model have some of its tensors in other memory, as after a hop.

    Args:
        value: what the memory is overwritten with that they had.
    """
    parameters, buffers = (
        dict(model.named_parameters()),
        dict(model.named_buffers(remove_duplicate=False)),
    )
    for kind, name in keys:
        if kind == "parameter":
            memory = parameters[name].data
            parameters[name].data = memory.clone()
        else:
            memory = buffers[name]
            moved = memory.clone()
            for module in model.modules():
                for leaf, buffer in module._buffers.items():
                    if buffer is memory:
                        module._buffers[leaf] = moved
        _overwrite(memory, value)


def _overwrite(memory: Tensor, value: float) -> None:
    memory.fill_(value) if _has_nan(memory) else memory.add_(1)


def _has_nan(tensor: Tensor) -> bool:
    """Return whether there is a NaN of a tensor's type."""
    return tensor.is_floating_point() or tensor.is_complex()


@contextmanager
def told_if_nan(spoilt: Collection[TensorKey]) -> Iterator[None]:
    """Let the error of a loss that is NaN tell what may have read a second name that is NaN.

    Args:
        spoilt: as `SecondNames.spoil` returns them.

    Raises:
        NonFiniteLoss: the body has raised it.
    """
    try:
        yield
    except NonFiniteLoss as error:
        if not spoilt or "is nan" not in str(error):
            raise
        names = " or ".join(f"{kind} {name!r}" for kind, name in tuple(spoilt)[:_MOST_TOLD])
        raise NonFiniteLoss(
            f"{error}; or refer to the module, if a hook, the forward or the loss reads {names} by "
            "another name, such as a tensor or array that .data, .detach() or .numpy() gave when "
            "the model was made: on workers that is NaN, as it would see no update"
        ) from error


@contextmanager
def on_copies(model: nn.Module, kept: list[SecondNames]) -> Iterator[None]:
    """Let a model have copies of its tensors and attributes for a while.

    Args:
        kept: is given what refers to these copies afterwards, as what keeps its first call's does.
    """
    parameters, attributes = ParameterValues.initial(model), AttributeValues(model)
    with parameters.in_use(), attributes.in_use():
        yield
        names = SecondNames(model, known=1)  # by what gives the parameters these values
    del parameters, attributes
    names.forget_unused()
    kept.append(names)


def _also_elsewhere(module: nn.Module, name: str) -> Tensor | None:
    """Return a buffer's memory if something else has the buffer, or another name for its memory."""
    references = sys.getrefcount(module._buffers[name])
    buffer = module._buffers[name]
    if buffer is None:
        return None
    references += weakref.getweakrefcount(buffer)
    if references <= _OWN_OBJECT and _uses(buffer) <= _OWN_STORAGE:
        return None
    return buffer.data if buffer.layout is torch.strided else None


def _uses(tensor: Tensor) -> int:
    """Return how many uses the memory of a dense tensor has, this one among them."""
    if tensor.layout is not torch.strided:
        return 0
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
