"""Refuses training that changes what hops with no shard: attributes, and other random numbers."""

from __future__ import annotations

import functools
import itertools
import random
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.recipe.randomness import unit_hooks
from cerebro_hydra.shards.cut.sample import Example, copy_example
from cerebro_hydra.shards.cut.values import AttributeValues, ParameterValues
from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.shards.engine.bound_model import bound_model
from cerebro_hydra.shards.engine.differences import same_bits
from cerebro_hydra.shards.engine.microbatch import Microbatch
from cerebro_hydra.shards.engine.optimizer import NOT_CLONED
from cerebro_hydra.storage.digest import digest

_Attributes = dict[str, Any]

_OF_TORCH = vars(nn.Module()).keys()
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_OPTIMIZERS = {*NOT_CLONED, "defaults", "_zero_grad_profile_name"}
NOTHING = ("NoneType", "None")
"""What is read of None."""

_OURS = __name__.partition(".")[0]
_ATOMS = (int, float, complex, str, bytes, bool, type(None))
_KEYS = (tuple, torch.device, torch.dtype)
_LIBRARIES = {"torch", "builtins", "functools"}
_OF_HOOKS = "what is kept by a"
_LONGEST = 1000
"""Of a longer collection, the length alone is read."""


@contextmanager
def refused_random_numbers() -> Iterator[None]:
    """Refuse what draws from the generators of Python or NumPy, even if it has no effect yet.

    Raises:
        ConfigurationError: one of them has moved.
    """
    before = _global_generators()
    yield
    for name, state in _global_generators().items():
        if state != before[name]:
            raise ConfigurationError(
                f"forward, loss, metrics or collate draw random numbers from {name}, which don't "
                "restart at a shard's key; draw them from torch, as by torch.rand(())"
            )


def _global_generators() -> dict[str, Any]:
    numpy = np.random.get_state(legacy=False)["state"]
    plain = {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in numpy.items()}
    return {"Python's random": random.getstate(), "numpy.random": plain}


@contextmanager
def refused_writes(model: nn.Module) -> Iterator[set[str]]:
    """Refuse an evaluation that changes parameters, or buffers in a way that depends on the past.

    A buffer that every forward sets anew, whatever it was, is no state; the body is given a set
    that fills with the names of such buffers.

    Raises:
        ConfigurationError: it has changed one.
    """
    before = {name: tensor_digest(p) for name, p in model.named_parameters()}
    buffers = _BufferWrites(model)
    with buffers.refused():
        yield buffers.set_anew
    for name, parameter in model.named_parameters():
        if tensor_digest(parameter) != before[name]:
            raise ConfigurationError(
                f"the forward writes to parameter {name!r} in evaluation, which must leave the "
                "state as it is; write to it `if self.training` only, or use another tensor, such "
                "as weight * mask"
            )


class _BufferWrites:
    """Watches a model's forwards in evaluation, which are given copies of its buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._given: dict[str, _Given] = {}
        self._trying = False
        self.set_anew: set[str] = set()

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Look at every forward for a while."""
        handles = [
            self._model.register_forward_pre_hook(self._entering),
            self._model.register_forward_hook(self._left, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, model: nn.Module, args: Any) -> None:
        if not self._trying:
            self._given = {n: _Given(b, b._version, b.clone()) for n, b in model.named_buffers()}

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
            for larger in (True, False):
                for name, given in self._given.items():
                    value = _other(given.value, larger) if name in names else given.value.clone()
                    self._put(name, value)
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
            self.set_anew.update(written)
            return
        name = next((name for name in written if not are_set_anew([name])), written[0])
        raise ConfigurationError(
            f"the forward writes to buffer {name!r} in evaluation, which must leave the state as "
            f"it is; {_instead(model, name)}"
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


def _other(tensor: Tensor, larger: bool) -> Tensor:
    """Return another value than a tensor has."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, torch.nan)
    return ~tensor if tensor.dtype is torch.bool else tensor + (1 if larger else -1)


def _instead(model: nn.Module, buffer: str) -> str:
    owner = model.get_submodule(buffer.rpartition(".")[0])
    if _package(type(owner)) == "torch" and ".quantization" in type(owner).__module__:
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


class OptimizerCounts:
    """Watches the integers that an optimizer keeps as its own attributes.

    A clone of the optimizer steps on each shard after each hop, and begins with the factory's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before = self._read()

    def check(self) -> None:
        """Refuse an optimizer that counts in an attribute.

        Raises:
            ConfigurationError: steps have changed one.
        """
        for name, value in self._read().items():
            if value != self._before.get(name):
                kind = type(self._optimizer).__name__
                raise ConfigurationError(
                    f"each step changes attribute {name!r} of optimizer {kind}, which is no part "
                    f"of the state that hops; keep it in every param group, as group[{name!r}]"
                )

    def _read(self) -> dict[str, int]:
        return {name: v for name, v in vars(self._optimizer).items() if type(v) is int}


class SideEffects:
    """Watches the attributes of a model in training, and what the functions of its recipe hold.

    What a step leaves there is gone after a hop. That is no harm if each forward sets it anew, so
    it must be the same after a step of a model with a history and of one without.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._buffers = {name for name, _ in recipe.model.named_buffers()}
        self._seen: list[_Attributes] = []
        self._latest = self._read() | read_optimizer(recipe.optimizer, recipe.model)
        self.written: set[str] = set()
        """What steps have changed; that later ones do so, too, says nothing about their history."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the attributes after a step; the first two are on the same example."""
        found = self._read()
        if len(self._seen) < 2:
            self._seen.append(found)
        found = found | read_optimizer(optimizer, self._recipe.model)
        self.written |= changed(self._latest, found)
        self._latest = found

    def check(
        self,
        trained: Mapping[str, Tensor],
        history: AttributeValues,
        example: Example,
        key: RandomKey,
    ) -> None:
        """Take a step with a history and one without, if these steps left different values.

        Args:
            trained: the state to take them from, named as a checkpoint names it.
            history: the attributes that training has left; the model has its own.
            example: the batch of the first two steps.

        Raises:
            ConfigurationError: an attribute depends on the history; the message names it.
        """
        first, second = self._seen
        changed = [where for where in second if first.get(where) != second[where]]
        if not changed:
            return
        fresh = AttributeValues(self._recipe.model)
        # Twice with a history, because what comes back every other step is the same once.
        states = [self._after_pass(trained, a, example, key) for a in (fresh, history, history)]
        for where in changed:
            without, *with_history = (state.get(where) for state in states)
            if not all(extends(state, without) for state in with_history):
                instead = "register it as a buffer, or let every forward set it anew"
                if where.startswith(_OF_HOOKS):
                    instead = "let the hook write to a file or a logger in place of it"
                raise ConfigurationError(
                    f"each step changes {where}, which is no part of the state that hops; {instead}"
                )

    def _after_pass(
        self,
        trained: Mapping[str, Tensor],
        attributes: AttributeValues,
        example: Example,
        key: RandomKey,
    ) -> _Attributes:
        """Return the attributes after a forward and a backward, which change nothing else."""
        recipe, model = self._recipe, self._recipe.model
        with (
            ParameterValues(model, lambda name, _: trained[f"param:{name}"].clone()).in_use(),
            attributes.in_use(),
            bound_model(model.train()) as bound,
            unit_hooks(model, key.reseed),
        ):
            buffers = model.named_buffers()
            bound.lend_buffers({name: trained[f"buffer:{name}"].clone() for name, _ in buffers})
            batch = Microbatch.collated(recipe, copy_example(example), key, weight=None)
            with recipe.precision():
                loss = batch.loss_of(recipe.call(model, batch.inputs))
            loss.backward()  # type: ignore[no-untyped-call]
            return self._read()

    def _read(self) -> _Attributes:
        return read_attributes(self._recipe, self._buffers)


def read_attributes(recipe: Recipe, buffers: Collection[str]) -> dict[str, Any]:
    """Return what a model, its losses and collate hold, in tuples, dicts and sets of plain values.

    Each value goes by a description of its attribute. Objects are read if their class is from a
    package of the model's or of these functions; somebody else's logger is not.

    Args:
        buffers: the names of those that hop; others are read as attributes are.
    """
    model = recipe.model
    others = {name: buffer for name, buffer in model.named_buffers() if name not in buffers}
    reader = _Reader(model, others.values(), (*recipe.losses, recipe.collate))
    found = {
        f"{_told(name)} of {_described(module_name, module)}": reader.read(value)
        for module_name, module in model.named_modules()
        for name, value in _own_attributes(module)
    }
    functions = []
    for number, loss in enumerate(recipe.losses):
        which = f"loss {number}" if len(recipe.losses) > 1 else "the loss"
        if isinstance(loss, nn.Module):
            found |= _held_by_loss(which, loss, reader)
        else:
            functions.append(loss)
    found["a value of the loss"] = reader.read(functions)
    found["a value of the collate"] = reader.read(recipe.collate)
    made = "buffer {!r}, which the first forward makes"
    return found | {made.format(name): reader.read(buffer) for name, buffer in others.items()}


def _held_by_loss(which: str, loss: nn.Module, reader: _Reader) -> dict[str, Any]:
    attributes = {
        f"attribute {'.'.join(filter(None, (place, name)))!r} of {which}": reader.read(value)
        for place, module in loss.named_modules()
        for name, value in _own_attributes(module)
    }
    buffers = loss.named_buffers()
    return attributes | {f"buffer {name!r} of {which}": reader.read(b) for name, b in buffers}


def read_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return what an optimizer holds beside its param groups and state, as attributes are read."""
    reader, kind = _Reader(model, (), (optimizer,)), type(optimizer).__name__
    return {
        f"attribute {name!r} of optimizer {kind}": reader.read(value)
        for name, value in vars(optimizer).items()
        if name not in _OF_OPTIMIZERS and not name.startswith("_optimizer_")
    }


def read_metrics(recipe: Recipe) -> dict[str, Any]:
    """Return what the metrics of a recipe hold, as attributes are read."""
    functions = [metric.function for metric in recipe.metric_list]
    reader = _Reader(recipe.model, (), functions)
    return {
        f"a value of metric {metric.name!r}": reader.read(metric.function)
        for metric in recipe.metric_list
    }


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the names of attributes that were made, deleted or changed between two readings."""
    kept = before.keys() & after.keys()
    return (before.keys() ^ after.keys()) | {name for name in kept if before[name] != after[name]}


def _own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's attributes, and the user's hooks."""
    for name, value in vars(module).items():
        if name in _HOOKS:
            if hooks := [hook for hook in value.values() if not _is_ours(hook)]:
                yield name, hooks
        elif name not in _OF_TORCH:
            yield name, value


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith(f"{_OURS}.")


def _told(attribute: str) -> str:
    if attribute.endswith("_hooks"):
        return f"{_OF_HOOKS} {attribute.strip('_').removesuffix('_hooks').replace('_', ' ')} hook"
    return f"attribute {attribute!r}"


def _described(name: str, module: nn.Module) -> str:
    return f"module {name!r}" if name else f"the model ({type(module).__name__})"


class _Reader:
    """Reads values beside the model's own modules, parameters and buffers."""

    def __init__(self, model: nn.Module, others: Iterable[Tensor], beside: Iterable[Any]) -> None:
        modules = list(model.modules())
        self._known = {id(each) for each in (*modules, *model.parameters(), *model.buffers())}
        self._known -= {id(tensor) for tensor in others}
        self._packages = {_package(type(each)) for each in (*modules, *beside)}
        self._packages -= _LIBRARIES
        self._read: dict[int, tuple[Any, Any]] = {}  # with the value, which keeps its id

    def read(self, value: Any) -> Any:
        """Return a plain value; what refers to itself is read once."""
        if isinstance(value, _ATOMS):
            return type(value).__qualname__, repr(value)
        if id(value) in self._known:
            return ()
        if id(value) not in self._read:
            self._read[id(value)] = value, ()
            self._read[id(value)] = value, self._content(value)
        return self._read[id(value)][1]

    def _content(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return str(value.dtype), tuple(value.shape), _digest(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return str(value.dtype), value.shape, digest(np.ascontiguousarray(value).data)
        if isinstance(value, itertools.count):
            return repr(value)
        if (state := _generator_state(value)) is not None:
            return self.read(state)
        if isinstance(value, Collection) and len(value) > _LONGEST:
            return len(value)
        if isinstance(value, Mapping):
            return {_key(k): self.read(v) for k, v in value.items()}
        if isinstance(value, set | frozenset):
            return {_key(each) for each in value}
        if isinstance(value, list | tuple | deque):
            return tuple(self.read(each) for each in value)
        return tuple(self.read(each) for each in self._held_by(value))

    def _held_by(self, value: Any) -> list[Any]:
        if isinstance(value, types.FunctionType):
            cells = [cell for cell in value.__closure__ or () if not _is_empty(cell)]
            return [cell.cell_contents for cell in cells] + [value.__defaults__, vars(value)]
        if isinstance(value, types.MethodType):
            return [value.__self__]
        if isinstance(value, functools.partial):
            return [value.func, value.args, value.keywords]
        if isinstance(value, nn.Module) or _package(type(value)) in self._packages:
            return [getattr(value, "__dict__", ())]  # an unregistered module has all in there
        return []


def _key(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_key, value))})"
    return repr(value) if isinstance(value, (*_ATOMS, *_KEYS)) else type(value).__qualname__


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _digest(tensor: Tensor) -> str:
    try:
        return tensor_digest(tensor)
    except (RuntimeError, NotImplementedError):  # it is sparse or has no values
        return ""


def _generator_state(value: Any) -> Any:
    """Return the state of a generator of random numbers, or None if the value is none."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, torch.Generator):
        return value.get_state()
    return None


def extends(longer: Any, shorter: Any) -> bool:
    """Tell whether values are equal, but for entries that only the longer dict or set has."""
    if isinstance(longer, dict) and isinstance(shorter, dict):
        return all(k in longer and extends(longer[k], v) for k, v in shorter.items())
    if isinstance(longer, set) and isinstance(shorter, set):
        return longer >= shorter
    if isinstance(longer, tuple) and isinstance(shorter, tuple):
        return len(longer) == len(shorter) and all(map(extends, longer, shorter))
    return bool(longer == shorter)
