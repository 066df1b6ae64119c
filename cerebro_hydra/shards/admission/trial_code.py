"""Describes the code of a trial in parts that have names, so that a resumed run has the same.

The description must be equal in every process that runs the same factory. So it has no values of
parameters, no places in memory or in files, no order of sets, and no line numbers; and it leaves
out what can't be told so: tensors, private attributes, objects of libraries.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import math
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.optimizer_list import OptimizerList
from cerebro_hydra.shards.admission.effects.named_by_code import (
    attribute_names,
    functions_of,
    global_names,
    is_own,
)
from cerebro_hydra.shards.admission.effects.object_reader import slots_of

FORMAT = 1
"""Changes when the same code is described otherwise; then it is not compared."""

_SETTINGS = (
    "loss", "loss_weights", "metrics", "batch_size", "lr_scheduler", "lr_interval", "lr_metric",
    "clip_grad_norm", "clip_grad_value", "accumulate", "autocast", "ema", "early_stopping",
    "collate", "schedule", "vertical_sync", "grad_scaler", "decode", "training_step", "replicas",
    "optimizer_on", "compile",
)  # fmt: skip
"""The fields of a recipe that are compared; of the others some only say where shards lie."""

_CODE = "the code of "
_CLASS = "the class of the optimizer"
_OPTION = "the optimizer's "
_VALUES = "the values in "
_UNTOLD = "..."
_DEEPEST = 8
_MOST_ENTRIES = 1000
_LONGEST = 60
_LEAST_STAMP = 1e9
"""Of a number from here on it is taken that it is a time, or drawn."""
_OF_PROCESS = re.compile(
    r" at 0x|[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}|\d\d:\d\d:\d\d|\d{10}|\d{8}.?\d{6}"
)
"""Is in a text that no other process has: an address, an id that was drawn, a time."""
_OF_SCALER = ("_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval")
_NOT_OPTIONS = ("training", "params", "param_names")


@dataclass(frozen=True)
class Difference:
    """Names a part of a trial's code that is another one than before.

    `then` and `now` are short texts of it; None where it is absent, or has no such text.
    """

    part: str
    then: str | None
    now: str | None
    is_new: bool = False
    is_gone: bool = False

    @property
    def is_of_values(self) -> bool:
        """Return whether it is about values of the user's modules, which may be a time stamp's."""
        return self.part.startswith(_VALUES)

    def __str__(self) -> str:
        if self.is_new:
            return f"{self.part}, which it did not have"
        if self.is_gone:
            return f"{self.part}, which it has no more"
        if self.then is None or self.now is None:
            return self.part
        return f"{self.part}, {self.now} and not {self.then}"


@dataclass(frozen=True)
class TrialCode:
    """Holds a short text or a digest of each part, and the versions that these depend on."""

    versions: Mapping[str, str]
    parts: Mapping[str, str]
    shared: Mapping[str, frozenset[int]] = field(default_factory=dict, compare=False)
    """By part, the user's objects in it, by their ids; several trials may have the same."""

    def to_json(self) -> dict[str, Any]:
        """Describe the code in JSON."""
        return {"versions": dict(self.versions), "parts": dict(self.parts)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TrialCode:
        """Rebuild the description from `to_json`."""
        return cls(dict(document.get("versions", {})), dict(document.get("parts", {})))

    def is_comparable(self, now: TrialCode) -> bool:
        """Return whether both depend on the same versions, so that equal code is told alike."""
        both = self.versions.keys() & now.versions.keys()
        return all(self.versions[name] == now.versions[name] for name in both)

    def differences(self, now: TrialCode) -> list[Difference]:
        """Return what of the code is another one now."""
        both_have = [_CODE]
        if self.parts.get(_CLASS) != now.parts.get(_CLASS):
            both_have.append(_OPTION)  # another class has other options
        found = []
        for part in dict.fromkeys([*self.parts, *now.parts]):
            then, here = self.parts.get(part), now.parts.get(part)
            one_only = then is None or here is None
            if then != here and not (one_only and part.startswith(tuple(both_have))):
                texts = _readable(then), _readable(here)
                found.append(Difference(part, *texts, then is None, here is None))
        return found


def stable_differences(then: TrialCode, now: TrialCode, again: TrialCode) -> list[Difference]:
    """Return what differs from `then`, and not between two builds of the same code.

    What two builds share may have been changed by other trials that were built before.
    """
    none: frozenset[int] = frozenset()
    return [
        each
        for each in then.differences(now)
        if now.parts.get(each.part) == again.parts.get(each.part)
        and not now.shared.get(each.part, none) & again.shared.get(each.part, none)
    ]


def trial_code(recipe: Recipe) -> TrialCode | None:
    """Describe the code of a trial whose recipe was just built; None if that is impossible."""
    try:
        return _trial_code(recipe)
    except Exception:  # a user's object may do anything when it is looked at
        return None


def _trial_code(recipe: Recipe) -> TrialCode:
    walk = _Walk()
    parts: dict[str, str] = {}
    shared: dict[str, frozenset[int]] = {}

    def put(part: str, text: str) -> None:
        parts[part] = text if len(text) <= _LONGEST else _digest(text)
        shared[part] = walk.take_own()

    for kind, modules in _modules(recipe.model, walk).items():
        told = sorted((name, walk.options(module), walk.hooks(module)) for name, module in modules)
        part, is_users = f"the {kind} modules of the model", is_own(type(modules[0][1]).__module__)
        if is_users:
            put(_VALUES + part, "#" + "; ".join(f"{name}({values})" for name, values, _ in told))
        put(part, "#" + "; ".join(f"{n}({'' if is_users else v}){hooks}" for n, v, hooks in told))
    put("the order of the model's layers", _order(recipe.model))
    for part, text in _tensors(recipe.model):
        put(part, text)
    for part, text in _optimizer(recipe, walk):
        put(part, text)
    for name in _SETTINGS:
        put(name, walk.text(getattr(recipe, name)))
    for name, digests in walk.code.items():
        parts[_CODE + name] = _digest(" ".join(sorted(digests)))
    return TrialCode(walk.versions(), parts, shared)


def _digest(text: str) -> str:
    return "#" + hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _readable(text: str | None) -> str | None:
    return None if text is None or text.startswith("#") or _UNTOLD in text else text


def _modules(model: nn.Module, walk: _Walk) -> dict[str, list[tuple[str, nn.Module]]]:
    """Return the modules of a model with their names, by class."""
    found: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        found.setdefault(walk.class_name(type(module)), []).append((name, module))
    return found


def _order(model: nn.Module) -> str:
    """Return the order of layers where it is that of their calls."""
    held = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Sequential))
    return "#" + "; ".join(f"{name}: {', '.join(module._modules)}" for name, module in held)


def _tensors(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the forms of parameters and buffers, and which parameters train."""
    named = sorted(model.named_parameters(remove_duplicate=False), key=lambda each: each[0])
    first: dict[int, str] = {}
    tied = [first.setdefault(id(p), name) for name, p in named]
    forms = [f"{n}={t}:{_form(p)}" for (n, p), t in zip(named, tied, strict=True)]
    yield "the names and shapes of the model's parameters", "#" + "; ".join(forms)
    frozen = "; ".join(name for name, p in named if not p.requires_grad)
    yield "which parameters of the model train", "#" + frozen
    buffers = sorted(model.named_buffers(remove_duplicate=False), key=lambda each: each[0])
    told = "; ".join(f"{name}:{_form(buffer)}" for name, buffer in buffers)
    yield "the names and shapes of the model's buffers", "#" + told


def _form(tensor: Tensor) -> str:
    try:
        return f"{tensor.dtype}{tuple(tensor.shape)}"
    except RuntimeError:  # a parameter that gets its shape from the first batch
        return "lazy"


def _optimizer(recipe: Recipe, walk: _Walk) -> Iterator[tuple[str, str]]:
    optimizer = recipe.optimizer
    several = isinstance(optimizer, OptimizerList)
    kinds = [part.kind for part in optimizer.parts] if several else [type(optimizer)]
    yield _CLASS, ", ".join(map(walk.class_name, kinds))
    names = {id(p): name for name, p in recipe.model.named_parameters()}
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    held = [sorted(names.get(id(p), _UNTOLD) for p in group["params"]) for group in groups]
    yield "the parameters of the optimizer's groups", "#" + repr(held)
    options = dict.fromkeys(name for group in groups for name in group)
    yield "the hooks of the optimizer's steps", walk.hooks(optimizer) or "none"
    for name in options:
        if name not in _NOT_OPTIONS:
            told = [walk.text(group.get(name)) for group in groups]
            yield _OPTION + name, told[0] if len({*told}) == 1 else ", ".join(told)


class _Walk:
    """Writes values as texts, and notes the code of the user's that it meets."""

    def __init__(self) -> None:
        self.code: dict[str, set[str]] = {}
        """Digests by the name of a class or function; several functions may have one name."""
        self._packages = {"torch"}
        self._noted: set[int] = set()
        self._inside: list[int] = []  # the objects that the present one is a part of
        self._own: set[int] = set()
        self._kept: list[Any] = []  # so that no other object gets the id of one that was noted

    def versions(self) -> dict[str, str]:
        """Return what the texts depend on beside the user's code."""
        python = ".".join(map(str, sys.version_info[:2])) + " -O" * sys.flags.optimize
        modules = ((name, sys.modules.get(name)) for name in sorted(self._packages))
        found = {name: getattr(module, "__version__", None) for name, module in modules}
        told = {name: str(version) for name, version in found.items() if version is not None}
        return {"format": str(FORMAT), "python": python, **told}

    def take_own(self) -> frozenset[int]:
        """Return the user's objects that were met since the last call."""
        own, self._own = frozenset(self._own), set()
        return own

    def text(self, value: Any) -> str:
        """Return a text that is equal in every process, with `_UNTOLD` for what has none."""
        if isinstance(value, int | float) and abs(value) >= _LEAST_STAMP and math.isfinite(value):
            return _UNTOLD
        if value is None or type(value) in _PLAIN:
            return repr(value)
        if type(value) is str:
            is_own = os.path.isabs(value) or _OF_PROCESS.search(value) is not None
            return _UNTOLD if is_own else repr(value)
        if isinstance(value, float):  # libraries of other machines may compute other last digits
            return f"{value:.9g}" if math.isfinite(value) else str(value)
        if isinstance(value, Enum):
            return f"{self.class_name(type(value))}.{value.name}"
        if isinstance(value, torch.dtype | range | slice | Fraction | Decimal):
            return str(value)
        if isinstance(value, np.generic):
            return self.text(value.item())
        if isinstance(value, Tensor):
            return f"tensor {_form(value)}"
        if isinstance(value, type):
            return self.class_name(value)
        if len(self._inside) >= _DEEPEST or id(value) in self._inside:
            return _UNTOLD
        self._inside.append(id(value))
        try:
            return self._composed(value)
        finally:
            self._inside.pop()

    def _composed(self, value: Any) -> str:
        if isinstance(value, _CONTAINERS) and len(value) > _MOST_ENTRIES:
            return f"{len(value)} entries"
        if isinstance(value, list | tuple):
            told = [self.text(each) for each in value]
            if any(isinstance(each, str | tuple | type) for each in value):
                told.sort()  # it may be made of a set
            return f"[{', '.join(told)}]"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self.text, value)))}}}"
        if isinstance(value, dict | types.MappingProxyType):
            return f"{{{self._pairs(value.items())}}}"
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return f"{self.text(value.__func__)} of {self.text(value.__self__)}"
        if isinstance(value, functools.partial):
            given = self.text([*value.args]), self.text(dict(value.keywords))
            return f"{self.text(value.func)}({', '.join(given)})"
        if isinstance(value, types.BuiltinFunctionType):
            return value.__qualname__
        if isinstance(value, _CACHED):
            return self.text(value.__wrapped__)
        kind = self.class_name(type(value))
        if isinstance(value, torch.amp.GradScaler):
            return f"{kind}({[getattr(value, name, None) for name in _OF_SCALER]})"
        if isinstance(value, nn.Module):
            inner = (f"{n}: {self.options(m)}" for n, m in value.named_modules())
            return f"{kind}({'; '.join(inner)})"
        if is_own(type(value).__module__) or isinstance(value, _NAMESPACES):
            return f"{kind}({self.options(value)})"
        return kind

    def options(self, value: Any) -> str:
        """Return the attributes of an object that are options, as far as they can be told."""
        if is_own(type(value).__module__):
            self._own.add(id(value))
            self._kept.append(value)
        attributes = [*getattr(value, "__dict__", {}).items(), *slots_of(value)]
        return self._pairs((n, v) for n, v in attributes if _is_option(n, v))

    def hooks(self, holder: Any) -> str:
        """Return the functions that a module or an optimizer calls around its own."""
        held = ((n, v) for n, v in vars(holder).items() if n.endswith("_hooks") and v)
        told = (f"{n}: {', '.join(map(self.text, v.values()))}" for n, v in held)
        return "; ".join(sorted(told))

    def _pairs(self, pairs: Iterable[tuple[Any, Any]]) -> str:
        return ", ".join(sorted(f"{self.text(name)}={self.text(each)}" for name, each in pairs))

    def class_name(self, kind: type) -> str:
        """Return the name of a class, and note its code if it is the user's."""
        self._note_package(kind.__module__)
        for base in kind.__mro__ if is_own(kind.__module__) else ():
            if is_own(base.__module__) and self._is_first(base):
                with self._apart():
                    self._note(f"class {base.__qualname__}", self._class(base))
        return kind.__qualname__

    def _class(self, kind: type) -> str:
        told = [base.__qualname__ for base in kind.__bases__]
        for name, value in sorted(vars(kind).items()):
            if functions := functions_of(value):
                told += [f"{name}: {self._code_of(function)}" for function in functions]
                told += [f"{name} has {self._captured(f, of_class=True)}" for f in functions]
            elif _is_option(name, value) and not _can_be_filled(value):
                told.append(f"{name}={self.text(value)}")
        return "; ".join(told)

    def _function(self, function: types.FunctionType) -> str:
        self._note_package(function.__module__)
        name = function.__qualname__
        if not is_own(function.__module__):
            return name
        if self._is_first(function.__code__):
            with self._apart():
                self._note(f"function {name}", self._code_of(function))
        captured = self._captured(function)
        return f"{name}({captured})" if captured else name

    def _is_first(self, noted: Any) -> bool:
        """Return whether this is met for the first time."""
        first = id(noted) not in self._noted
        if first:
            self._noted.add(id(noted))
            self._kept.append(noted)
        return first

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Let the body tell code as if it were a part of nothing."""
        inside, self._inside = self._inside, []
        own, self._own = self._own, set()
        try:
            yield
        finally:
            self._inside, self._own = inside, own

    def _note(self, name: str, text: str) -> None:
        self.code.setdefault(name, set()).add(_digest(text))

    def _note_package(self, module: str | None) -> None:
        package = str(module).partition(".")[0]
        if not is_own(module) and package not in sys.stdlib_module_names:
            self._packages.add(package)

    def _captured(self, function: types.FunctionType, of_class: bool = False) -> str:
        """Return what a function was made with: values that it closes over, and defaults.

        Args:
            of_class: two builds have the function, so that what calls may have filled is left out.
        """
        told = []
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            try:
                value = cell.cell_contents
            except ValueError:  # it is empty as yet
                continue
            if of_class and _can_be_filled(value):
                continue
            if isinstance(value, list | dict | set):
                self._own.add(id(value))
                self._kept.append(value)
            told.append(f"{name}={self.text(value)}")
        named = function.__kwdefaults__ or {}
        defaults = [*(function.__defaults__ or ()), *(named[name] for name in sorted(named))]
        if fixed := [each for each in defaults if not _can_be_filled(each)]:
            told.append(self.text(fixed))
        return ", ".join(told)

    def _code_of(self, function: types.FunctionType) -> str:
        """Return the text of a function's code, and note the user's code that it calls by name."""
        code = function.__code__
        called = [function.__globals__.get(name) for name in global_names(code)]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty as yet
                called.append(cell.cell_contents)
        for value in called:
            if isinstance(value, types.ModuleType) and is_own(value.__name__):
                named = sorted(attribute_names(code) & vars(value).keys())
                inner: list[Any] = [vars(value)[name] for name in named]
            else:
                inner = [value]
            for each in inner:
                if isinstance(each, types.FunctionType | type):
                    self.text(each)
        return _code_text(code, function.__doc__)


_PLAIN = (bool, int, bytes)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_CACHED = type(functools.lru_cache(len))
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


def _can_be_filled(value: Any) -> bool:
    """Return whether calls may have changed what a value has, as of a cache."""
    return isinstance(value, dict | list | set) or is_own(type(value).__module__)


def _is_option(name: str, value: Any) -> bool:
    """Return whether an attribute is none that a forward, or another process, makes anew."""
    is_path = "path" in name and isinstance(value, str | os.PathLike)
    is_private = name.startswith("_") or name in _NOT_OPTIONS
    return not (is_private or is_path or isinstance(value, Tensor | nn.Module | types.ModuleType))


@functools.lru_cache(4096)
def _code_text(code: types.CodeType, doc: str | None = None) -> str:
    constants = [_constant(each) for each in code.co_consts]
    if doc is not None and code.co_consts[:1] == (doc,):
        constants[0] = ""
    told = (
        code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, constants,
    )  # fmt: skip
    return repr(told)


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _code_text(value)
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return repr(value)
