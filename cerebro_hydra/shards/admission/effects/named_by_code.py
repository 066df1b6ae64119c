"""Finds what code names beside what it is given: global variables, functions of classes, caches."""

from __future__ import annotations

import dis
import functools
import gc
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cerebro_hydra.shards.admission.effects.readings import containers_of

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_OURS = __name__.partition(".")[0]
_LOAD = dis.opmap["LOAD_GLOBAL"]  # its argument has a bit beside the number of the name
_OF_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "putenv", "unsetenv"})
_SETS = {dis.opmap["STORE_SUBSCR"]}
_ADDS = frozenset({"setdefault", "update"})
_OF_GLOBALS = {_LOAD, dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}


@functools.lru_cache(1000)
def is_installed(package: str) -> bool:
    """Return whether a package is not the user's own code: installed, built in or of Python.

    Where Spark brings an environment along, it is in no folder that this Python knows as its own.
    """
    module = sys.modules.get(package)
    if module is None or package == "__main__":
        return False
    places = list(getattr(module, "__path__", ())) or [getattr(module, "__file__", None)]
    if places == [None]:
        return package in sys.builtin_module_names
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    roots.add(Path(torch.__file__).parents[1])  # what lies beside torch was installed like it
    paths = [Path(place) for place in places if place]
    named = any(_INSTALLED.intersection(path.parts) for path in paths)
    return named or any(path.is_relative_to(root) for path in paths for root in roots)


def is_own(module: str | None) -> bool:
    """Return whether the user wrote a module: it is none of Python's, of ours, or installed."""
    package = str(module).partition(".")[0]
    of_python = package in sys.stdlib_module_names and package != "__main__"
    return not (of_python or is_ours(module) or is_installed(package))


def is_ours(module: str | None) -> bool:
    """Return whether a module is one of this package."""
    return str(module).partition(".")[0] == _OURS


@functools.lru_cache(4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of the global variables that code reads or writes, also in inner code."""
    names, argument = set(), 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = argument << 8 | low
        if operation in _OF_GLOBALS:
            names.add(code.co_names[argument >> 1 if operation == _LOAD else argument])
        if operation != dis.EXTENDED_ARG:
            argument = 0
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(global_names(constant))
    return tuple(sorted(names))


@functools.lru_cache(4096)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Return the names in code, attributes among them, also in inner code."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(code.co_names).union(*map(attribute_names, inner))


@functools.lru_cache(4096)
def constant_texts(code: types.CodeType) -> frozenset[str]:
    """Return the texts that stand in code, also in inner code."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    own = frozenset(each for each in code.co_consts if isinstance(each, str))
    return own.union(*map(constant_texts, inner))


@functools.lru_cache(4096)
def names_where_written(code: types.CodeType) -> frozenset[str]:
    """Return the names in code that sets entries of what it names, as far as one can see."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    found = frozenset[str]().union(*map(names_where_written, inner))
    if _SETS.isdisjoint(code.co_code[::2]) and _ADDS.isdisjoint(code.co_names):
        return found
    return found.union(code.co_names, code.co_freevars)


@functools.lru_cache(4096)
def environment_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of environment variables that code may read or write, also in inner code."""
    names: set[str] = set()
    uses = not _OF_ENVIRONMENT.isdisjoint(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(environment_names(constant))
        elif uses and isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return tuple(sorted(names))


def functions_of(value: Any) -> tuple[types.FunctionType, ...]:
    """Return the functions of what a class has as an attribute, none if it is no method."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        found = (value.fget, value.fset, value.fdel)
    elif isinstance(value, functools.cached_property | functools.partialmethod):
        found = (value.func, None, None)
    else:
        found = (value, None, None)
    return tuple(each for each in found if isinstance(each, types.FunctionType))


Cache = functools._lru_cache_wrapper


def kept_results(cache: Cache[Any]) -> list[tuple[Any, Any]]:
    """Return the keys and results that a cached function has now, in no order that tells.

    A key is a single number or text, or a sequence of arguments. The list is empty if this Python
    keeps them in another way.
    """
    parts: list[Any] = gc.get_referents(cache)
    size = cache.cache_info().currsize
    own = vars(cache)
    (kept,) = [e for e in parts if type(e) is dict and e is not own and len(e) == size][:1] or [{}]
    if cache.cache_info().maxsize is None:
        return list(kept.items())
    # A cache with a limit has them as links of a list, each a key and its result.
    links = type(next(iter(kept.values()), None))
    flat = [each for each in parts if each is not type(cache) and each is not links]
    pairs = list(zip(flat[: 2 * size : 2], flat[1 : 2 * size : 2], strict=False))
    try:
        return pairs if len(pairs) == size and all(key in kept for key, _ in pairs) else []
    except TypeError:  # what stands there is no key
        return []


ABSENT = object()
"""Stands for a variable that its owner does not have."""


@dataclass(frozen=True)
class Variable:
    """Is an attribute of an object, a global variable, or one of a closure.

    Args:
        owner: has it.
        name: by which a mapping has it.
    """

    owner: MutableMapping[str, Any] | types.CellType
    name: str

    def set(self, value: object) -> None:
        """Give it a value, or let its owner have it no more."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif value is ABSENT:
            self.owner.pop(self.name, None)
        else:
            self.owner[self.name] = value

    @property
    def value(self) -> object:
        """Return its value."""
        if isinstance(self.owner, types.CellType):
            return self.owner.cell_contents
        return self.owner.get(self.name, ABSENT)


class FilledCaches:
    """Takes out of caches what they were filled with, for a while.

    Args:
        functions: those with a cache; what they are asked for again, they compute again.
        dicts: by path.
        known: the keys that each had before, by path.
        written: says of a path whether code writes there, so that its first entries may be of one,
            too.
        variables: those that got another value, by path, each with the one of before, or `ABSENT`.
    """

    def __init__(
        self,
        functions: Sequence[Cache[Any]],
        dicts: Mapping[str, MutableMapping[Any, Any]],
        known: Mapping[str, Collection[Any]],
        written: Callable[[str], bool],
        variables: Mapping[str, tuple[Variable, object]],
    ) -> None:
        self._functions = [each for each in functions if each.cache_info().currsize]
        self._dicts = {
            path: _FilledDict(mapping, known.get(path, ()), written(path))
            for path, mapping in dicts.items()
        }
        self._variables = {
            path: (variable, variable.value, before)
            for path, (variable, before) in variables.items()
        }

    @property
    def are_filled(self) -> bool:
        """Return whether there is anything to take out."""
        dicts = any(each.is_filled for each in self._dicts.values())
        return bool(self._functions or self._variables) or dicts

    def hold(self, path: str) -> bool:
        """Return whether a value is in one of the dicts."""
        return not self._dicts.keys().isdisjoint(containers_of(path))

    def empty(self) -> None:
        """Take it out."""
        self._forget(lambda each: each.left)

    def give_back(self) -> None:
        """Let the dicts and the variables be as they were before."""
        self._forget(lambda each: each.before)

    def fill(self) -> None:
        """Put back what was there."""
        for each in self._dicts.values():
            each.set(each.all)
        for variable, value, _ in self._variables.values():
            variable.set(value)

    def _forget(self, left: Callable[[_FilledDict], Mapping[Any, Any]]) -> None:
        for function in self._functions:
            function.cache_clear()
        for each in self._dicts.values():
            each.set(left(each))
        for variable, _, before in self._variables.values():
            variable.set(before)


class _FilledDict:
    """Has the entries of a dict that are there, that were there before, and that may be left."""

    def __init__(
        self, mapping: MutableMapping[Any, Any], known: Collection[Any], written: bool
    ) -> None:
        self._mapping = mapping
        self.all = dict(mapping.items())
        self.before = {key: each for key, each in self.all.items() if key in known}
        self.left = {} if written else self.before
        self.is_filled = self.all.keys() != self.left.keys()

    def set(self, entries: Mapping[Any, Any]) -> None:
        """Let the dict have these entries, in their order, if some may be taken out."""
        if self.is_filled:
            self._mapping.clear()
            self._mapping.update(entries)
