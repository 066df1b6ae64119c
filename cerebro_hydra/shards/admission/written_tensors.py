"""Finds which buffers and frozen parameters training writes to, and refuses it in evaluations.

Here it is found of a trial's first steps and evaluations; of later ones by `BoundModel`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut.small_buffers import in_one_memory
from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.shards.engine.differences import same_bits
from cerebro_hydra.shards.places import order_of


class BuffersInOneMemory:
    """Knows which buffers of a model lie in one another's memory; made before they are copied."""

    def __init__(self, model: nn.Module) -> None:
        self._together = tuple(in_one_memory(model.named_buffers()))

    def check(self, written: Sequence[str]) -> None:
        """Refuse what is written: each of them lies alone as soon as its shard is in a segment.

        Raises:
            ConfigurationError: there is one; the message names it and another.
        """
        for together in self._together:
            name = next((each for each in together if each in written), None)
            if name is not None:
                other = next(each for each in together if each != name)
                raise ConfigurationError(
                    f"each step changes buffer {name!r}, which lies in the memory of buffer "
                    f"{other!r} as another tensor; register a copy, or the same tensor twice"
                )


class WrittenTensors:
    """Watches the tensors of a model that no optimizer changes.

    Args:
        initial: the state before training, named as a checkpoint names it, in memory of its own.
    """

    def __init__(self, model: nn.Module, initial: Mapping[str, Tensor]) -> None:
        self._model = model
        self._initial = initial
        self._before = {name: (t, t._version) for name, t in _unoptimized(model).items()}

    def names(self) -> tuple[str, ...]:
        """Return what has been written since, in place, by `.data` or by another tensor."""
        now = _unoptimized(self._model)
        return tuple(name.partition(":")[2] for name, t in now.items() if self._is_written(name, t))

    def check_made(self) -> None:
        """Refuse parameters that a forward has made, which no worker has from the begin.

        Raises:
            ConfigurationError: there is one; the message names it.
        """
        for name, _ in self._model.named_parameters():
            if f"param:{name}" not in self._initial:
                raise ConfigurationError(
                    f"the forward makes parameter {name!r} in its first call, so no optimizer has "
                    "it, and each worker would make its own; make its module in __init__, or run "
                    "the model once on a batch before the optimizer is made"
                )

    def check_shapes(self) -> None:
        """Refuse buffers that have other shapes by now.

        Raises:
            ConfigurationError: there is one; the message names it.
        """
        for full_name, tensor in _unoptimized(self._model).items():
            before = self._initial.get(full_name)
            if before is not None and before.shape != tensor.shape:
                name = full_name.partition(":")[2]
                raise ConfigurationError(
                    f"buffer {name!r} has shape {tuple(before.shape)} before training and "
                    f"{tuple(tensor.shape)} after its first steps, and its memory is laid out "
                    "before; register it with that shape"
                )

    def reordered(self) -> tuple[str, ...]:
        """Return the names of the buffers that have other strides by now."""
        buffers = dict(self._model.named_buffers())
        pairs = ((n, self._initial.get(f"buffer:{n}"), b) for n, b in buffers.items())
        return tuple(n for n, a, b in pairs if a is not None and order_of(a) != order_of(b))

    def _is_written(self, name: str, tensor: Tensor) -> bool:
        before, version = self._before.get(name, (None, 0))
        if tensor is not before or tensor._version != version:
            return True
        return not same_bits(tensor, self._initial[name])


def _unoptimized(model: nn.Module) -> dict[str, Tensor]:
    found = {f"buffer:{name}": buffer for name, buffer in model.named_buffers()}
    frozen = {f"param:{n}": p for n, p in model.named_parameters() if not p.requires_grad}
    return found | frozen


@contextmanager
def refused_writes(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Refuse an evaluation that changes parameters, or buffers in a way that depends on the past.

    A buffer that every forward sets anew, whatever it was, is no state; the body is given what
    fills with the names of such buffers, and what the latest forward has set there.

    Raises:
        ConfigurationError: it has changed one.
    """
    before = {name: tensor_digest(p) for name, p in model.named_parameters()}
    buffers = _BufferWrites(model)
    with buffers.refused():
        yield buffers.set_anew
    for name, parameter in model.named_parameters():
        if tensor_digest(parameter) != before[name]:
            raise _parameter_written(model, name)


def _parameter_written(model: nn.Module, name: str) -> ConfigurationError:
    """Return the error of an evaluation that wrote to a parameter.

    The model is switched to training and back, to see whether that writes to it.
    """
    evaluated = tensor_digest(model.get_parameter(name))
    modes = (True, False)  # its attributes may be given back, and then only the second one writes
    switched = [tensor_digest(model.train(mode).get_parameter(name)) for mode in modes]
    if switched == [evaluated, evaluated]:
        return ConfigurationError(
            f"the forward writes to parameter {name!r} in evaluation, which must leave the state "
            "as it is; write to it `if self.training` only, or use another tensor, such as weight "
            "* mask"
        )
    owner = name.rpartition(".")[0]
    where = f"module {owner!r}" if owner else "the model"
    return ConfigurationError(
        f"train() and eval() of {where} write to its parameter {name!r}, as LoRA layers that merge "
        "their weights do, and evaluation must leave the state as it is; leave the weights apart, "
        "as with merge_weights=False, and merge them after training"
    )


class _BufferWrites:
    """Watches a model's forwards in evaluation, which are given copies of its buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._given: dict[str, _Given] = {}
        self._trying = False
        self.set_anew = dict[str, Tensor]()

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Look at every forward for a while."""
        handles = [
            self._model.register_forward_pre_hook(self._entering),
            self._model.register_forward_hook(self._left, with_kwargs=True),
        ]
        self._note()
        try:
            yield
            self._check_between()
        finally:
            for handle in handles:
                handle.remove()

    def _note(self) -> None:
        buffers = self._model.named_buffers()
        self._given = {name: _Given(b, b._version, b.clone()) for name, b in buffers}

    def _check_between(self) -> None:
        """Refuse what was written since the latest forward, which was none of a forward."""
        for name, given in self._given.items():
            if name not in self.set_anew and not same_bits(
                self._model.get_buffer(name), given.value
            ):
                raise self._written_between(name)

    def _written_between(self, name: str) -> ConfigurationError:
        """Return the error of a buffer that is written in evaluation, and not by a forward."""
        model, before = self._model, self._model.training
        modes = (True, False)
        first, second = (tensor_digest(model.train(mode).get_buffer(name)) for mode in modes)
        model.train(before)
        if first != second:
            return ConfigurationError(
                f"train() and eval() write to buffer {name!r}, and evaluation must leave the state "
                f"as it is; {instead_of_writing(model, name)}"
            )
        return ConfigurationError(
            f"the loss, a metric or the collate writes to buffer {name!r} in evaluation, which "
            "must leave the state as it is; let the forward of a module write to it, "
            "`if self.training` only"
        )

    def _entering(self, model: nn.Module, args: Any) -> None:
        if not self._trying:
            self._check_between()
            self._note()

    def _left(self, model: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        if self._trying:
            return
        after = {name: model.get_buffer(name) for name in self._given}
        written = [name for name, given in self._given.items() if given.is_written(after[name])]
        if not written:
            return
        after = {name: after[name].clone() for name in written}
        found = [t.clone() for t in _tensors(outputs)]

        def are_set_anew(names: Sequence[str]) -> bool:
            """Tell whether the forward gives the same if these have other values before it."""
            others = {n: [after[n], *other_values(self._given[n].value)] for n in names}
            for number in range(max(map(len, others.values()))):
                for name, given in self._given.items():
                    values = others.get(name, [given.value])
                    self._put(name, values[min(number, len(values) - 1)].clone())
                try:
                    again = _tensors(model(*args, **kwargs))
                except Exception:  # the forward can't do with such a value
                    return False
                if len(again) != len(found) or not all(map(same_bits, again, found)):
                    return False
                if not all(same_bits(model.get_buffer(name), after[name]) for name in written):
                    return False
            return True

        self._trying = True
        if are_set_anew(written):
            self._trying = False
            self.set_anew |= after
            return
        name = next((name for name in written if not are_set_anew([name])), written[0])
        raise ConfigurationError(
            f"the forward writes to buffer {name!r} in evaluation, which must leave the state as "
            f"it is; {instead_of_writing(model, name)}"
        )

    def _put(self, name: str, value: Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        self._model.get_submodule(owner)._buffers[leaf] = value


class _Given(NamedTuple):
    """Holds a buffer as a forward was given it."""

    buffer: Tensor
    version: int
    value: Tensor

    def is_written(self, now: Tensor) -> bool:
        """Return whether the forward wrote to it; writing to `.data` counts no version."""
        if now is not self.buffer or now._version != self.version:
            return True
        return not same_bits(now, self.value)


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


_VALUES = math.nan, 1e30, -1e30, 0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0, 2.0, 10.0, 100.0
"""Code may ask whether a number is in a range of which the first steps know nothing."""


def other_values(tensor: Tensor) -> Iterator[Tensor]:
    """Yield values that a tensor of its kind may have."""
    if tensor.is_floating_point():
        yield from (torch.full_like(tensor, value) for value in _VALUES)
    elif tensor.is_complex():
        yield torch.full_like(tensor, torch.nan)
    else:
        yield from [~tensor] if tensor.dtype is torch.bool else [tensor + 1, tensor - 1]


def instead_of_writing(model: nn.Module, buffer: str) -> str:
    owner = model.get_submodule(buffer.rpartition(".")[0])
    if isinstance(owner, nn.modules.batchnorm._NormBase):
        return (
            "let the norm follow the model's mode, as by self.norm.train(self.training), or give "
            "it track_running_stats=False"
        )
    place = type(owner).__module__
    if place.startswith("torch.") and ".quantization" in place:
        switch = "self.apply(enable_observer if self.training else disable_observer)"
        return f"let the model's forward begin with {switch}, both of torch.ao.quantization"
    return "write to it `if self.training` only"


def check_averaged(recipe: Recipe, written: Sequence[str]) -> None:
    """Refuse a moving average of frozen parameters to which the forward writes.

    Raises:
        ConfigurationError: the recipe keeps averages, and there is such a parameter.
    """
    frozen = {name for name, _ in recipe.model.named_parameters()}
    if recipe.ema is not None and (names := [name for name in written if name in frozen]):
        raise ConfigurationError(
            f"ema is {recipe.ema!r}, and the forward writes to frozen parameter {names[0]!r}, "
            "which it would average too; leave ema out, or make that parameter a buffer"
        )
