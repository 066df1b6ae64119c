"""Reads what objects of any kind hold, value by value, so that two readings can be compared.

A reading walks through what pickle would take of an object: its attributes and slots, the entries
of containers, the closures and defaults of functions, the places of iterators. Each value has a
path, whose parts stand between `PART`: the name that the reader was given, then attributes
(`.gain`) and entries (`['w']`, `[0]`, `{member}`). Two readings of equal objects are equal, also in
two processes.

The user's own classes and functions that are met can be read as well: what their code names.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import gc
import itertools
import multiprocessing.sharedctypes
import multiprocessing.synchronize
import operator
import os
import random
import sys
import threading
import types
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from inspect import get_annotations
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from cerebro_hydra.recipe.module_origins import is_installed, is_ours, is_own
from cerebro_hydra.shards.admission.effects.filled_caches import (
    MOST_ITEMS,
    Cache,
    Growing,
    Variable,
    kept_results,
)
from cerebro_hydra.shards.admission.effects.named_by_code import (
    attribute_names,
    attributes_set,
    constant_texts,
    environment_names,
    functions_of,
    global_names,
    globals_set,
    modules_named,
    names_where_changed,
    names_where_written,
)
from cerebro_hydra.shards.admission.effects.readings import (
    AS,
    CACHED,
    CONTAINER,
    GENERATOR,
    ITERATING,
    NOTHING,
    OBJECT,
    OF_CLASS,
    OF_ENVIRONMENT,
    OF_GLOBAL,
    PART,
    Reading,
    attribute_of,
    entry_of,
    is_of_process,
    is_shared,
)
from cerebro_hydra.shards.admission.effects.value_texts import (
    ATOMS,
    NAMED,
    are_plain,
    are_settings,
    atom_text,
    digest_of,
    function_text,
    module_of,
    name_of_type,
    place_text,
    plain_text,
    short,
    slots_of,
    tensor_text,
)
from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.storage.digest import digest

T = TypeVar("T")

_DESCRIPTORS = (
    types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
_WEAK = (
    weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, weakref.ref
)  # fmt: skip
_OF_TORCH = ("torch.distributions.", "torch.optim.lr_scheduler", "torch.nn.")
_STREAMS = {"io", "_io", "logging", "threading", "_thread", "socket", "queue", "weakref"}
"""Modules of what is no state of training, whether or not pickle would copy it."""

_LONGEST = 1000
"""Of a longer collection of plain values, one digest is read."""
_DEEPEST = 100
_MOST_SHARED = 10_000
"""Of more objects in one container that trials share none is read: they are data."""
_MOST = 100_000
"""Values of a reading; what is deeper, or comes after them, is not read."""


class _Unreadable(Exception):
    """Something within an object can't be read, such as a lock."""


Container = dict[Any, Any] | set[Any] | list[Any] | deque[Any]


class ObjectReader:
    """Reads objects into one reading; what it meets again is told by its first path.

    Args:
        leaves: what stands for objects by their ids, which are not read; they stay alive meanwhile.
        packages: those of whose classes objects are read. Objects of the standard library are, too,
            if all that is in them can be; of other installed packages only settings are.
        addresses: what stands for numbers by which objects are known in this process alone, as for
            the ids of leaves.
    """

    def __init__(
        self,
        leaves: Mapping[int, str],
        packages: Collection[str],
        addresses: Mapping[int, str] | None = None,
    ) -> None:
        self.found: Reading = {}
        self._leaves = leaves
        self._addresses = addresses or {}
        self.packages = packages
        self._seen: dict[int, tuple[Any, str]] = {}  # with the object, which keeps its id
        self._sentinels: dict[int, tuple[Any, list[str]]] = {}  # each `object()`, with its paths
        self._texts: dict[int, tuple[Any, Any]] = {}  # of objects without others, as well
        self._later = deque[Callable[[], None]]()  # each reads what a large container has
        self._depth = 0
        self._strict = 0
        self._code: dict[int, type | types.FunctionType] = {}  # that was met
        self._met: list[type | types.FunctionType] = []  # the same, in order
        self._names: dict[tuple[Any, int], frozenset[str]] = {}  # in that code, by its size
        self._named: Counter[str] = Counter()
        self.caches: list[Cache[Any]] = []  # the user's own functions with one
        self.growing: dict[str, Growing] = {}  # dicts and sets, by path
        self.containers: dict[str, Container] = {}  # that trials share, by path
        self.variables: dict[str, Variable] = {}  # that trials share, by path
        self.class_attributes: dict[str, Variable] = {}  # likewise
        self.classes: dict[str, type] = {}  # the user's own, by the end of such paths

    def read(self, path: str, value: Any) -> None:
        """Read a value and all that it holds; the path must be a new one."""
        kind = type(value)
        if getattr(kind, "STANDS_IN", False):
            self.found[path] = f"{name_of_type(kind)}, not read"
        elif kind in ATOMS:
            self.found[path] = atom_text(value)
        elif (leaf := self._leaves.get(id(value))) is not None:
            self.found[path] = leaf
        elif isinstance(value, Tensor):
            self._read_tensor(path, value)
        elif (text := self._once(value, plain_text)) is not None:
            self.found[path] = text
            if isinstance(value, type | types.FunctionType):
                self.meet(value)
        elif self._depth > _DEEPEST or len(self.found) > _MOST:
            self.found[path] = f"{name_of_type(kind)}, not read"
        elif kind is object:  # it stands for something, such as that nothing is there yet
            self.found[path] = OBJECT
            self._sentinels.setdefault(id(value), (value, []))[1].append(path)
        elif kind is not tuple and id(value) in self._seen:
            self.found[path] = AS + self._seen[id(value)][1]
        else:
            self._seen[id(value)] = value, path
            self._depth += 1
            try:
                self._read_object(path, value)
            finally:
                self._depth -= 1

    def meet(self, code: type | types.FunctionType) -> None:
        """Let `read_code` read what a class or function names."""
        if id(code) not in self._code:
            self._code[id(code)] = code
            self._met.append(code)

    def read_code(self) -> None:
        """Read what the user's own classes and functions name, of those that were met.

        That is global variables, attributes of classes, and what methods have from outside of their
        class. It belongs to the process; all trials there share it.
        """
        read: set[tuple[int, str]] = set()
        done = 0
        while done < len(self._met) or self._later:  # to which what is read adds
            if done == len(self._met):
                self._later.popleft()()
                continue
            code = self._met[done]
            done += 1
            if isinstance(code, type):
                if is_own(type(code).__module__):
                    self.meet(type(code))
                for owner in code.__mro__:
                    if is_own(owner.__module__) and (id(owner), "") not in read:
                        read.add((id(owner), ""))
                        self._read_class(owner)
            elif is_own(code.__module__):
                for module, variables, name in _variables(code):
                    if (id(variables), name) not in read:
                        read.add((id(variables), name))
                        self._read_global(name, module, variables.get(name))
                        path = f"{OF_GLOBAL}{name!r} of {module}"
                        self.variables[path] = Variable(variables, name)
                for name in environment_names(code.__code__):
                    path = f"{OF_ENVIRONMENT}{name!r} that {module_of(code)} names"
                    self.found[path] = short(os.environ.get(name, "not set"))
        for _, paths in self._sentinels.values():  # code compares with what it names
            first = next(filter(is_of_process, paths), paths[0])
            self.found |= {path: AS + first for path in paths if path != first}

    def texts_in_code(self) -> frozenset[str]:
        """Return the texts that stand in the user's code that was met, as keys of a dict may."""
        return self._in_own_code(constant_texts)

    def made_by_code(self) -> set[str]:
        """Return the shared values that the user's code may make once all is built.

        That is attributes that it sets, and entries of dicts by keys that stand there.
        """
        names, texts = self._in_own_code(attributes_set), self.texts_in_code()
        attributes = {p for p in self.found if attribute_of(p) in names and is_shared(p)}
        entries = {p for p in self.found if entry_of(p) in texts and is_shared(p)}
        return attributes | {p for p in entries if self.is_written(p.rpartition(PART)[0])}

    def set_by_code(self) -> set[str]:
        """Return the values of the process that the user's code may set once all is built."""
        names = self._in_own_code(globals_set) | self._in_own_code(attributes_set)  # of modules
        own = {p for p in self.variables if PART not in p and p.split("'")[1] in names}
        return {path for path in self.made_by_code() | own if is_of_process(path)}

    def is_written(self, path: str) -> bool:
        """Return whether the user's code that was met sets entries of what a path names."""
        return self._is_named(path, names_where_written)

    def is_changed(self, path: str) -> bool:
        """Return whether the user's code that was met changes what a path names in place."""
        return self._is_named(path, names_where_changed)

    def _is_named(self, path: str, names_in: Callable[[types.CodeType], Iterable[str]]) -> bool:
        name, *parts = path.split(PART)
        own = [name.split("'")[1]] if "'" in name else []
        *_, last = "", *own, *(part[1:] for part in parts if part.startswith("."))
        return last in self._in_own_code(names_in)

    def _in_own_code(self, names_in: Callable[[types.CodeType], Iterable[str]]) -> frozenset[str]:
        """Return the names that are found in any of the user's code that was met."""
        key = names_in, len(self._code)
        if key not in self._names:
            own = (names_in(each.__code__) for each in self.own_functions())
            self._names[key] = frozenset(itertools.chain.from_iterable(own))
        return self._names[key]

    def own_classes(self) -> list[type]:
        """Return the user's classes that were met, with those from which they are derived."""
        return [each for each in self._classes() if is_own(each.__module__)]

    def own_functions(self) -> Iterator[types.FunctionType]:
        """Yield the user's functions that were met, and the methods of classes."""
        of_classes = (vars(kind).values() for kind in self._classes())
        methods = (f for v in itertools.chain.from_iterable(of_classes) for f in functions_of(v))
        functions = (each for each in self._code.values() if isinstance(each, types.FunctionType))
        for each in itertools.chain(methods, functions):
            if is_own(each.__module__):
                yield each

    def _classes(self) -> dict[type, None]:
        """Return the classes that were met, in their order, with those behind them."""
        kinds = (each for each in self._code.values() if isinstance(each, type))
        return dict.fromkeys(owner for kind in kinds for owner in kind.__mro__)

    def _read_global(self, name: str, module: str, value: Any) -> None:
        path = f"{OF_GLOBAL}{name!r} of {module}"
        if isinstance(value, types.FunctionType):
            self._read_held(path, value)
        elif isinstance(value, NAMED):
            self._read_place(path, value)
        elif not is_ours(type(value).__module__):
            self.read(path, value)

    def _read_place(self, path: str, value: Any) -> None:
        """Read what stands there, and holds nothing, or is read elsewhere."""
        if isinstance(value, type | types.FunctionType):
            self.meet(value)
        self.found[path] = place_text(value)

    def _read_class(self, kind: type) -> None:
        told = f"{module_of(kind)}.{kind.__qualname__}"
        self._named[told] += 1
        if (number := self._named[told]) > 1:  # another one that the same function made
            told = f"{told}#{number}"
        self.classes[told] = kind
        for name, value in tuple(vars(kind).items()):
            path = f"{name!r}{OF_CLASS}{told}"
            value = inner if isinstance(inner := getattr(value, "__func__", None), Cache) else value
            if functions := functions_of(value):
                for function in functions:
                    self._read_held(f"method {path}", function)
            elif isinstance(value, type):
                self._read_place(f"attribute {path}", value)
            elif not (name.startswith("__") or isinstance(value, _DESCRIPTORS)):
                self.read(f"attribute {path}", value)
                self.class_attributes[f"attribute {path}"] = Variable(kind, name)

    def _read_held(self, path: str, function: types.FunctionType) -> None:
        """Read what a function holds, and meet it."""
        others = set(function.__code__.co_freevars) - {"__class__"}  # which super() asks for
        held = (others, function.__defaults__, function.__kwdefaults__, vars(function))
        while path in self.found:  # as the getter and the setter of a property
            path += "'"
        if any(held) and id(function) not in self._seen:
            self.read(path, function)
            self.meet(function)
        else:
            self._read_place(path, function)

    def _read_tensor(self, path: str, value: Tensor) -> None:
        self.found[path] = self._once(value, tensor_text)
        if attributes := getattr(value, "__dict__", None):
            self.read_attributes(path, value, attributes)

    def _once(self, value: Any, text: Callable[[Any], T]) -> T:
        """Return the text of an object, which is made once."""
        if id(value) not in self._texts:
            self._texts[id(value)] = value, text(value)
        return self._texts[id(value)][1]  # type: ignore[no-any-return]

    def read_attributes(self, path: str, value: Any, attributes: dict[str, Any]) -> None:
        """Read attributes of an object, but those that its class computes and keeps."""
        if attributes:
            computed = computed_attributes(type(value))  # type: ignore[arg-type]
            shared = is_shared(path) and attributes is getattr(value, "__dict__", None)
            for name, each in tuple(attributes.items()):
                if name not in computed:
                    self.read(f"{path}{PART}.{name}", each)
                    if shared:
                        self.variables[f"{path}{PART}.{name}"] = Variable(attributes, name)

    def _read_object(self, path: str, value: Any) -> None:
        if isinstance(value, dict | set | list | deque) and is_of_process(path):
            self.containers[path] = value
        if (state := _generator_state(value)) is not None:
            self.found[path] = f"{GENERATOR}{state}"
        elif isinstance(value, dict | types.MappingProxyType):
            self._read_entries(path, value)
            if isinstance(value, defaultdict):
                self.read(f"{path}{PART}.default_factory", value.default_factory)
            if isinstance(value, dict):
                self.growing[path] = value
        elif isinstance(value, set | frozenset):
            self._read_members(path, value)
            if isinstance(value, set):
                self.growing[path] = value
        elif isinstance(value, list | tuple | deque):
            self._read_items(path, value)
        elif isinstance(value, np.ndarray):  # of objects, the others are plain
            self._read_items(path, value.reshape(-1).tolist())
        elif isinstance(value, types.FunctionType):
            self._read_function(path, value)
        elif isinstance(value, types.MethodType):
            self.found[path] = f"method {value.__func__.__qualname__}"
            self.read(f"{path}{PART}.__self__", value.__self__)
            self.read(f"{path}{PART}.__func__", value.__func__)
        elif isinstance(value, functools.partial):
            self.found[path] = "partial"
            for name in ("func", "args", "keywords"):
                self.read(f"{path}{PART}.{name}", getattr(value, name))
        elif isinstance(value, types.GeneratorType):
            self._read_generator(path, value)
        elif isinstance(value, itertools.pairwise):  # which pickle can't take
            self.found[path] = f"{OBJECT}{name_of_type(type(value))}"
            self._read_items(path, gc.get_referents(value))
        elif isinstance(value, _WEAK):
            self._read_weak(path, value)
        elif isinstance(value, threading.local):  # as the thread that reads has it
            self.found[path] = f"{OBJECT}{name_of_type(type(value))}"
            self.read_attributes(path, value, vars(value))
        elif isinstance(value, threading.Event | multiprocessing.synchronize.Event):
            self.found[path] = f"event {value.is_set()}"
        elif isinstance(value, multiprocessing.sharedctypes.SynchronizedBase):
            self.found[path] = "shared memory"
            self.read(f"{path}{PART}.get_obj()", value.get_obj())
        elif isinstance(value, contextvars.ContextVar):
            self.found[path] = f"context variable {value.name}"
            self.read(f"{path}{PART}.get()", value.get(None))
        elif isinstance(value, Cache):
            self._read_cache(path, value)
        elif isinstance(value, nn.Module) or self._is_read(value):
            self.found[path] = f"{OBJECT}{name_of_type(type(value))}"
            self.meet(type(value))
            self._read_state(path, value)
        else:
            self._read_of_library(path, value)

    def _read_generator(self, path: str, value: types.GeneratorType[Any, Any, Any]) -> None:
        frame = value.gi_frame  # None at its end
        self.found[path] = f"{ITERATING}{frame and frame.f_lasti}"
        variables = dict(frame.f_locals) if frame else {}
        for name, each in variables.items():
            self.read(f"{path}{PART}.{name}", each)
        known = set(map(id, variables.values()))
        unnamed = (each for each in gc.get_referents(value) if id(each) not in known)
        for number, each in enumerate(each for each in unnamed if isinstance(each, Iterator)):
            self.read(f"{path}{PART}.iterator {number}", each)  # that of a loop has no name

    def _read_weak(self, path: str, value: Any) -> None:
        if isinstance(value, weakref.ref):
            self.found[path] = "weak reference"
            self.read(f"{path}{PART}()", value())
        elif isinstance(value, weakref.WeakSet):
            self._read_members(path, set(value))
        else:
            self._read_entries(path, dict(value.items()))
            self.growing[path] = value

    def _read_cache(self, path: str, value: Cache[Any]) -> None:
        """Read a function with a cache, and the results there whose arguments have names."""
        self.found[path] = "cached function"
        self.read(f"{path}{PART}.__wrapped__", value.__wrapped__)
        if is_own(getattr(value, "__module__", None)):
            self.caches.append(value)
            self.found[f"{path}{CACHED}"] = "filled" if value.cache_info().currsize else NOTHING
            kept = [(self._key(k), each) for k, each in kept_results(value) if self._has_name(k)]
            for name, each in sorted(kept, key=operator.itemgetter(0))[:_LONGEST]:
                self.read(f"{path}{CACHED}[{name}]", each)

    def _has_name(self, key: Any) -> bool:
        if isinstance(key, tuple):
            return all(map(self._has_name, key))
        known = type(key) in ATOMS or type(key) is object or id(key) in self._leaves
        return known or isinstance(key, NAMED)

    def _is_read(self, value: Any) -> bool:
        kind = type(value)
        if kind.__module__.startswith(_OF_TORCH):
            return True
        package = kind.__module__.partition(".")[0]
        if package in sys.stdlib_module_names and package != "__main__":
            return False
        return package in self.packages or not is_installed(package) or are_settings(value)

    def _read_state(self, path: str, value: Any) -> None:
        self.read_attributes(path, value, getattr(value, "__dict__", {}))
        for name, each in slots_of(value):
            self.read(f"{path}{PART}.{name}", each)
            if is_shared(path):
                self.variables[f"{path}{PART}.{name}"] = Variable(value, name)

    def _read_of_library(self, path: str, value: Any) -> None:
        """Read an object of the standard library, if pickle can take it and all that it holds."""
        kind, before = type(value), len(self.found)
        self.found[path] = f"{name_of_type(kind)}, not read"
        package = kind.__module__.partition(".")[0]
        read = package in sys.stdlib_module_names and package not in _STREAMS
        if not read:
            if self._strict:
                raise _Unreadable
        else:
            seen = len(self._seen)
            self._strict += 1
            try:
                self._read_reduced(path, value)
                self.found[path] = f"{OBJECT}{name_of_type(kind)}"
            except Exception:  # whatever the code that pickle calls may raise
                for kept, number in ((self.found, before + 1), (self._seen, seen)):
                    while len(kept) > number:
                        kept.popitem()
                if self._strict > 1:
                    raise
            finally:
                self._strict -= 1

    def _read_reduced(self, path: str, value: Any) -> None:
        reduced = value.__reduce_ex__(2)
        if isinstance(reduced, str):
            return
        _, arguments, state, items, entries = (*reduced, None, None, None)[:5]
        self.read(f"{path}{PART}()", arguments)
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.read_attributes(path, value, part)
            elif part is not None:
                self.read(f"{path}{PART}.state", part)
        if items is not None:
            self._read_items(path, list(items))
        if entries is not None:
            self._read_entries(path, dict(entries))

    def _read_entries(self, path: str, value: Mapping[Any, Any]) -> None:
        self.found[path] = f"{CONTAINER}{name_of_type(type(value))}"
        if len(value) > _LONGEST and are_plain(value) and are_plain(value.values()):
            self.found[path] += f" {len(value)} {digest(repr(value).encode())}"
            return
        pairs = zip(self._keys(value), tuple(value.values()), strict=True)
        self._read_each(path, len(value), pairs)
        if attributes := getattr(value, "__dict__", None):
            self.read_attributes(path, value, attributes)

    def _read_members(self, path: str, value: Collection[Any]) -> None:
        self.found[path] = f"{CONTAINER}{name_of_type(type(value))}"
        if len(value) > _LONGEST and are_plain(value):
            members = repr(sorted(map(repr, value)))
            self.found[path] += f" {len(value)} {digest(members.encode())}"
            return
        self.found |= {f"{path}{PART}{{{name}}}": "" for name in self._keys(value)}

    def _read_items(self, path: str, value: Collection[Any]) -> None:
        self.found[path] = f"{CONTAINER}{name_of_type(type(value))} {len(value)}"
        if isinstance(value, deque) and value.maxlen is not None:
            self.found[path] += f" of {value.maxlen}"
        if len(value) > _LONGEST and are_plain(value):
            self.found[path] += f" {digest_of(value)}"
            return
        self._read_each(path, len(value), enumerate(value))
        if attributes := getattr(value, "__dict__", None):
            self.read_attributes(path, value, attributes)

    def _read_each(self, path: str, count: int, values: Iterable[tuple[object, Any]]) -> None:
        """Read what a container has; of many that trials share, after all else or not at all."""

        def read() -> None:
            for name, each in values:
                self.read(f"{path}{PART}[{name}]", each)

        if count <= MOST_ITEMS or not is_of_process(path):
            read()
        elif count <= _MOST_SHARED:
            self._later.append(read)

    def _read_function(self, path: str, value: types.FunctionType) -> None:
        self.found[path] = function_text(value)
        self.meet(value)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                self.read(f"{path}{PART}.{name}", cell.cell_contents)
                if is_shared(path):
                    self.variables[f"{path}{PART}.{name}"] = Variable(cell, name)
            except ValueError:  # it is empty
                continue
        both = {"defaults": value.__defaults__, "keywords": value.__kwdefaults__}
        for name, defaults in both.items():
            if defaults is not None:
                self.read(f"{path}{PART}.{name}", defaults)
        if is_own(value.__module__):  # torch notes on functions of its own what it did with them
            own = {n: each for n, each in vars(value).items() if not n.startswith("_torchdynamo")}
            self.read_attributes(path, value, own)
            for name in own if is_shared(path) else ():
                self.variables[f"{path}{PART}.{name}"] = Variable(vars(value), name)

    def _keys(self, values: Iterable[Any]) -> Iterator[str]:
        """Yield a name for each key; equal names of objects are numbered in their order."""
        counts: Counter[str] = Counter()
        for value in tuple(values):
            name = self._key(value)
            number = counts[name]
            counts[name] += 1
            yield f"{name}#{number}" if number else name

    def _key(self, value: Any) -> str:
        if type(value) is int and (told := self._addresses.get(value)) is not None:
            return told
        if type(value) in ATOMS:
            return short(repr(value))
        if isinstance(value, tuple):
            return f"({', '.join(map(self._key, value))})"
        if (leaf := self._leaves.get(id(value))) is not None:
            return leaf
        return plain_text(value) or name_of_type(type(value))


def _variables(code: types.FunctionType) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the global variables that a function names: their module, its variables, their name.

    Those of other modules that the user wrote are named behind the module, which it may import
    itself. Some may not be made yet.
    """
    variables, modules = code.__globals__, modules_named(code)
    for name in global_names(code.__code__):
        is_module = any(variables.get(name) is each for each in modules)
        if not is_module and (name in variables or not hasattr(builtins, name)):
            yield module_of(code), variables, name
    seen = set[str]()
    for module in modules:  # to which are added those that are named behind them
        if module.__name__ not in seen:
            seen.add(module.__name__)
            for name in attribute_names(code.__code__) & vars(module).keys():
                value = vars(module)[name]
                if isinstance(value, types.ModuleType) and is_own(value.__name__):
                    modules.append(value)
                else:
                    yield module.__name__, vars(module), name


def _generator_state(value: Any) -> str | None:
    """Return the digest of the state of a generator of random numbers, None if it is none."""
    if isinstance(value, random.Random):
        return digest(repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return _numpy_state(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return _numpy_state(value.get_state(legacy=False))
    if isinstance(value, torch.Generator):
        return tensor_digest(value.get_state())
    return None


def _numpy_state(state: Any) -> str:
    reader = ObjectReader({}, ())
    reader.read("", state)
    return digest(repr(reader.found).encode())


@functools.lru_cache(1000)
def computed_attributes(kind: type) -> frozenset[str]:
    """Return the attributes that a class computes when they are read first, and keeps.

    Those of the user's own classes are left out: they may be computed of weights.
    """
    installed = [owner for owner in kind.__mro__ if not is_own(owner.__module__)]
    caches = {n for owner in installed if owner is not type for n in get_annotations(owner)}
    return frozenset(name for name in caches if name.endswith("_cache")) | frozenset(
        name
        for owner in installed
        for name, each in vars(owner).items()
        if isinstance(each, functools.cached_property)
        or (kind.__module__.startswith(_OF_TORCH) and type(each).__name__ == "lazy_property")
    )
