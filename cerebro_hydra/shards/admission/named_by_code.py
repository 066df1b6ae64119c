"""Finds what code names beside what it is given: global variables, functions of classes, caches.

And where it was written, so that it can be read what the code does with them.
"""

from __future__ import annotations

import ast
import dis
import functools
import gc
import inspect
import linecache
import sys
import sysconfig
import types
from collections.abc import (
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from pathlib import Path
from typing import Any

import torch

from cerebro_hydra.shards.admission.readings import containers_of
from cerebro_hydra.shards.code.only_logged import SourceFile

_PLAIN = {int, float, bool, str, bytes, type(None), torch.dtype, torch.device}
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_OURS = __name__.partition(".")[0]
_LOAD = dis.opmap["LOAD_GLOBAL"]  # its argument has a bit beside the number of the name
_OF_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "putenv", "unsetenv"})
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


@functools.lru_cache(1000)
def names_in_libraries(kind: type) -> frozenset[str]:
    """Return the names that the code of a class's installed bases has or uses."""
    names: set[str] = set()
    for owner in kind.__mro__:
        if not is_own(owner.__module__):
            names |= vars(owner).keys()
            for value in vars(owner).values():
                for function in functions_of(value):
                    names |= attribute_names(function.__code__)
    return frozenset(names)


def sources_of(code: Iterable[type | types.FunctionType]) -> list[SourceFile] | None:
    """Return the files in which the user wrote some code, and those of what they import.

    None if one is not to be had, or no longer has the code that runs.
    """
    functions: list[types.FunctionType] = []
    for each in code:
        if isinstance(each, types.FunctionType):
            functions.append(each)
            continue
        for owner in (owner for owner in each.__mro__ if is_own(owner.__module__)):
            made = hasattr(owner, "__dataclass_fields__")  # with methods that have no source
            for name, value in vars(owner).items():
                if not (made and name.startswith("__")):
                    functions += functions_of(value)
    found: dict[str, SourceFile] = {}
    known: set[_CodeKey] = set()
    functions = [f for f in map(inspect.unwrap, functions) if is_own(f.__globals__.get("__name__"))]
    left = [(f.__code__.co_filename, f.__globals__["__name__"], f.__globals__) for f in functions]
    while left:
        path, module, variables = left.pop()
        if path in found:
            continue
        text = "".join(linecache.getlines(path, variables))
        try:
            imported, written = _read_source(text, path, str(variables.get("__package__") or ""))
        except SyntaxError:
            return None
        known |= written
        found[path] = SourceFile.of(module, text, variables)
        for name in imported:
            place = getattr(sys.modules.get(name), "__file__", None)
            if place is not None and is_own(name):
                left.append((place, name, vars(sys.modules[name])))
    runs = {_code_key(f.__code__) for f in functions if f.__code__.co_filename in found}
    return list(found.values()) if runs <= known else None


_CodeKey = tuple[str, str, int, bytes]


def _code_key(code: types.CodeType) -> _CodeKey:
    return code.co_filename, code.co_name, code.co_firstlineno, code.co_code


@functools.lru_cache(256)
def _read_source(text: str, path: str, package: str) -> tuple[frozenset[str], frozenset[_CodeKey]]:
    """Return the modules that a file may import, wherever it does, and the code that is in it.

    Raises:
        SyntaxError: it is empty, or no Python.
    """
    if not text:
        raise SyntaxError("there is no source")
    imported: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parents = package.split(".")
                module = ".".join([*parents[: len(parents) - node.level + 1], module]).strip(".")
            imported |= {module, *(f"{module}.{each.name}" for each in node.names)}
    compiled = compile(text, path, "exec", dont_inherit=True)
    return frozenset(imported), frozenset(map(_code_key, _inner_code(compiled)))


def _inner_code(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _inner_code(constant)


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


def knows_only_arguments(function: Any, known: frozenset[int] = frozenset()) -> bool:
    """Return whether a function names nothing that holds a state, but installed code and numbers.

    Args:
        known: the ids of functions that call it.
    """
    function = inspect.unwrap(function)
    if id(function) in known or isinstance(function, type | types.BuiltinFunctionType):
        return True
    if isinstance(function, types.ModuleType):
        return not is_own(function.__name__)
    if not isinstance(function, types.FunctionType):
        return type(function) in _PLAIN
    if not is_own(function.__globals__.get("__name__")):
        return True
    if function.__closure__ or function.__kwdefaults__ or vars(function):
        return False
    values = [function.__globals__.get(name) for name in global_names(function.__code__)]
    values += function.__defaults__ or ()
    return all(knows_only_arguments(each, known | {id(function)}) for each in values)


def calls_of(cache: Cache[Any]) -> list[tuple[tuple[Any, ...], dict[str, Any], Any]] | None:
    """Return the arguments and the result of each call that a cached function keeps.

    None if some arguments are no numbers, texts or the like, or can't be told.
    """
    kept, found = kept_results(cache), []
    if cache.cache_parameters()["typed"] or len(kept) != cache.cache_info().currsize:
        return None
    for key, result in kept:
        parts = list(key) if isinstance(key, tuple | list) else [key]
        place = next((n for n, each in enumerate(parts) if type(each) is object), len(parts))
        named = parts[place + 1 :]
        if not all(type(each) in _PLAIN for each in parts[:place] + named):
            return None
        keywords = dict(zip(named[::2], named[1::2], strict=True))
        found.append((tuple(parts[:place]), keywords, result))
    return found


class FilledCaches:
    """Takes out of caches what they were filled with, for a while.

    Args:
        functions: those with a cache; what they are asked for again, they compute again.
        dicts: by path, each with the keys that it had before.
    """

    def __init__(
        self,
        functions: Sequence[Cache[Any]],
        dicts: Mapping[str, tuple[MutableMapping[Any, Any], Collection[Any]]],
    ) -> None:
        self._functions = [each for each in functions if each.cache_info().currsize]
        self._dicts = {
            name: (mapping, {key: mapping[key] for key in mapping if key not in known})
            for name, (mapping, known) in dicts.items()
        }

    @property
    def are_filled(self) -> bool:
        """Return whether there is anything to take out."""
        return bool(self._functions) or any(added for _, added in self._dicts.values())

    def hold(self, path: str) -> bool:
        """Return whether a value is in one of the dicts."""
        return not self._dicts.keys().isdisjoint(containers_of(path))

    def empty(self) -> None:
        """Take it out."""
        for function in self._functions:
            function.cache_clear()
        for mapping, added in self._dicts.values():
            for key in added:
                mapping.pop(key, None)

    def fill(self) -> None:
        """Put back what was in the dicts."""
        for mapping, added in self._dicts.values():
            mapping.update(added)
