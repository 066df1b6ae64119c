"""Finds what code names beside what it is given: global variables, functions of classes."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from cerebro_hydra.recipe.module_origins import is_own

_LOAD = dis.opmap["LOAD_GLOBAL"]  # its argument has a bit beside the number of the name
_OF_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "putenv", "unsetenv"})
_SETS = {dis.opmap["STORE_SUBSCR"]}
_DELETES = {dis.opmap["DELETE_SUBSCR"]}
_ADDS = frozenset({"setdefault", "update"})
_CHANGES = frozenset(
    {"append", "appendleft", "extend", "extendleft", "insert", "add", "clear", "discard", "pop"}
    | {"popitem", "popleft", "remove", "reverse", "rotate", "sort"}
)
"""Methods by which containers change."""
_READS = ("LOAD_ATTR", "LOAD_METHOD")
_OUTER = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME", "LOAD_CLASSDEREF")
_STORE = dis.opmap["STORE_ATTR"]
_IMPORT = dis.opmap["IMPORT_NAME"]
_STORES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR"}
_BY_NAME = {"STORE_ATTR", "STORE_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL"}
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_SETTERS = frozenset({"setattr", "register_buffer", "register_parameter", "add_module"})
MOST_CODE = 1 << 16
"""Functions of which is kept what their code names; a large project has some ten thousand."""
_OF_GLOBALS = {_LOAD, dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}


T = TypeVar("T")


def kept_by_code(function: Callable[[types.CodeType], T]) -> Callable[[types.CodeType], T]:
    """Let a function keep what it returns for each code, whose hash takes longer than its id."""
    kept: dict[int, tuple[types.CodeType, T]] = {}  # with the code, which keeps its id

    @functools.wraps(function)
    def found(code: types.CodeType) -> T:
        if (known := kept.get(id(code))) is None:
            if len(kept) >= MOST_CODE:
                kept.clear()
            known = kept[id(code)] = code, function(code)
        return known[1]

    return found


def operations(code: types.CodeType) -> Iterator[tuple[int, int]]:
    """Yield each operation of code with its argument."""
    argument = 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = argument << 8 | low
        yield operation, argument
        if operation != dis.EXTENDED_ARG:
            argument = 0


@kept_by_code
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of the global variables that code reads or writes, also in inner code."""
    names = {
        code.co_names[argument >> 1 if operation == _LOAD else argument]
        for operation, argument in operations(code)
        if operation in _OF_GLOBALS
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(global_names(constant))
    return tuple(sorted(names))


@kept_by_code
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Return the names in code, attributes among them, also in inner code."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(code.co_names).union(*map(attribute_names, inner))


@kept_by_code
def constant_texts(code: types.CodeType) -> frozenset[str]:
    """Return the texts that stand in code, also in inner code."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    own = frozenset(each for each in code.co_consts if isinstance(each, str))
    return own.union(*map(constant_texts, inner))


@kept_by_code
def _names_imported(code: types.CodeType) -> frozenset[str]:
    """Return the names of modules that code imports, also in inner code."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    found = frozenset(code.co_names[n] for each, n in operations(code) if each == _IMPORT)
    return found.union(*map(_names_imported, inner))


def modules_imported(function: types.FunctionType) -> list[types.ModuleType]:
    """Return the user's modules that a function imports when it is called, and which are there."""
    found = []
    for name in sorted(_names_imported(function.__code__)):
        package = str(function.__globals__.get("__package__") or "")
        names = [name]
        while package:  # a relative name begins at one of these
            names.append(f"{package}.{name}".rstrip("."))
            package = package.rpartition(".")[0]
        there = (each for each in map(sys.modules.get, names) if each is not None)
        found += [each for each in there if is_own(each.__name__)]
    return found


def modules_named(function: types.FunctionType) -> list[types.ModuleType]:
    """Return the user's modules that a function imports, or that are global variables it names."""
    held = map(function.__globals__.get, global_names(function.__code__))
    named = [each for each in held if isinstance(each, types.ModuleType) and is_own(each.__name__)]
    return modules_imported(function) + named


@kept_by_code
def attributes_set(code: types.CodeType) -> frozenset[str]:
    """Return the names of attributes that code may set once an object is built, also inner code."""
    if code.co_name == "__init__":
        return frozenset()
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    found = frozenset(code.co_names[n] for operation, n in operations(code) if operation == _STORE)
    texts = frozenset() if _SETTERS.isdisjoint(code.co_names) else constant_texts(code)
    return found.union(texts, *map(attributes_set, inner))


@kept_by_code
def globals_set(code: types.CodeType) -> frozenset[str]:
    """Return the names of global variables that code sets, also in inner code."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    stored = (n for each, n in operations(code) if each == _STORE_GLOBAL)
    found = frozenset(code.co_names[n] for n in stored)
    return found.union(*map(globals_set, inner))


@kept_by_code
def names_read_before_set(code: types.CodeType) -> frozenset[str]:
    """Return the names and keys that code looks at, and sets further below, also in inner code.

    Of attributes, global variables, and entries of dicts; `CFG.deep = params["deep"]` looks at no
    attribute of `CFG`.
    """
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    read, found = set[tuple[str, str]](), set[str]()
    steps = [*dis.get_instructions(code)]
    for number, each in enumerate(steps):
        is_key = each.opname == "LOAD_CONST" and type(each.argval) is str
        if not (is_key or each.opname in _BY_NAME):
            continue
        of = "" if "GLOBAL" in each.opname else _holder(steps, number, is_key)
        after = steps[number + 1].opname if is_key else each.opname
        if after not in _STORES:
            read.add((of, each.argval))
        elif (of, each.argval) in read:
            found.add(each.argval)
    return frozenset(found).union(*map(names_read_before_set, inner))


def owners_set(function: types.FunctionType) -> Iterator[tuple[Any, str]]:
    """Yield that of which a function sets attributes, with their names.

    So it is in `F.relu = wrapped(F.relu)`, as far as it stands there by names.
    """
    yield from _attributes_set_of(function.__code__, function.__globals__)


def _attributes_set_of(
    code: types.CodeType, variables: Mapping[str, Any]
) -> Iterator[tuple[Any, str]]:
    """Yield what code sets attributes of, and by which names."""
    steps = [*dis.get_instructions(code)]
    imported = dict[str, Any]()  # by their local names
    module, is_base = None, False
    for number, each in enumerate(steps):
        if each.opname == "IMPORT_NAME":
            is_base = steps[number - 1].argval is not None  # `from a.b import c`
            name = str(each.argval)
            module = sys.modules.get(name if is_base else name.partition(".")[0])
        elif each.opname == "IMPORT_FROM":
            value = getattr(module, each.argval, None)
            imported[str(steps[number + 1].argval)] = value
            module = module if is_base else value
        elif each.opname == "STORE_FAST" and steps[number - 1].opname == "IMPORT_NAME":
            imported[str(each.argval)] = module
        elif each.opname == "STORE_ATTR":
            begin = number - 1
            while begin and steps[begin].opname == "LOAD_ATTR":
                begin -= 1
            yield _named_there(steps[begin:number], variables, imported)[0], str(each.argval)
        elif each.opname == "LOAD_GLOBAL" and each.argval == "setattr":
            owner, behind = _named_there(steps[number + 1 :], variables, imported)
            if behind is not None and type(behind.argval) is str:
                yield owner, behind.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _attributes_set_of(inner, variables)


def _named_there(
    steps: Iterable[dis.Instruction], variables: Mapping[str, Any], imported: Mapping[str, Any]
) -> tuple[Any, dis.Instruction | None]:
    """Return what a name, and attributes behind it, stand for at present, where code begins so.

    With it comes the instruction behind.
    """
    found: Any = None
    for number, each in enumerate(steps):
        if each.opname in ("LOAD_GLOBAL", "LOAD_FAST") and number == 0:
            found = imported.get(each.argval, variables.get(each.argval))
        elif each.opname == "LOAD_ATTR" and isinstance(found, types.ModuleType | type):
            found = vars(found).get(each.argval)
        else:
            return found, each
    return found, None


def _holder(steps: list[dis.Instruction], number: int, is_key: bool) -> str:
    """Return the name of what has the attribute, or the entry by the key, of an instruction."""
    before, after = steps[max(number - 2, 0) : number], steps[number + 1 : number + 3]
    if is_key and len(after) == 2 and after[1].opname == "CONTAINS_OP":
        return str(after[0].argval)
    if before and before[-1].opname == "LOAD_METHOD":  # as in `CFG.get("ready")`
        before.pop()
    return str(before[-1].argval) if before else ""


@kept_by_code
def names_where_written(code: types.CodeType) -> frozenset[str]:
    """Return the names of that of which code sets entries.

    Where it sets those of a local variable, that may be anything that the code names.
    """
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    found = frozenset[str]().union(*map(names_where_written, inner))
    if _SETS.isdisjoint(code.co_code[::2]) and _ADDS.isdisjoint(code.co_names):
        return found
    done = [*dis.get_instructions(code)]
    for at, each in enumerate(done):
        behind = at  # the container and, unless a method is called, the key before it
        if each.opname == "STORE_SUBSCR":
            behind = _begin_of_value(done, at)
        elif each.argval not in _ADDS or each.opname not in _READS:
            continue
        container = done[_begin_of_value(done, behind) : behind]
        if not container or container[-1].opname not in (*_READS, *_OUTER):
            return found.union(code.co_names, code.co_freevars)
        found |= {str(each.argval) for each in container if each.opname in (*_READS, *_OUTER)}
    return found


def _begin_of_value(done: Sequence[dis.Instruction], end: int) -> int:
    """Return where that begins what computes the value on the stack; the end if one can't see."""
    left = 1
    for at in reversed(range(end)):
        if done[at].opcode in dis.hasjrel or done[at].is_jump_target:
            return end
        left -= dis.stack_effect(done[at].opcode, done[at].arg, jump=False)
        if left <= 0:
            return at if left == 0 else end
    return end


@kept_by_code
def names_where_changed(code: types.CodeType) -> frozenset[str]:
    """Return the names in code that changes containers or tensors, as far as one can see."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    found = names_where_written(code).union(*map(names_where_changed, inner))
    in_place = any(name.endswith("_") and not name.startswith("_") for name in code.co_names)
    deletes = not _DELETES.isdisjoint(code.co_code[::2])
    if in_place or deletes or not _CHANGES.isdisjoint(code.co_names):
        return found.union(code.co_names, code.co_freevars)
    return found


@kept_by_code
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
