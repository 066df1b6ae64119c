"""Reads JSON documents that anybody may have written: strict JSON, then each field by its type."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from cerebro_hydra.errors import CerebroHydraError, StoreError

DEEPEST = 50
"""How deep values of no fixed form may nest, such as the parameters of a trial."""

INTEGERS = range(-(2**63), 2**64)
"""The whole numbers that a document may hold: seeds and checksums take up to 64 bits."""

Check = Callable[[Any, str], None]
"""Refuses a value with a StoreError that says where it stands; it is named in `Annotated`."""


def parse(content: bytes, where: str) -> Any:
    """Return the value of a JSON text, in which NaN and infinities are numbers.

    Raises:
        StoreError: the bytes are not JSON in UTF-8, or nest too deep.
    """
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where} is not JSON ({error}); restore it from a copy") from error


def decode(hint: Any, value: Any, where: str) -> Any:
    """Return a JSON value as what a type hint describes.

    Hints may be numbers, text, Any, unions with None, tuples, lists, mappings with text as keys,
    TypedDicts, dataclasses, and `Annotated` types with a `Check`. A dataclass with the field `type`
    in its JSON must be of that name.

    Raises:
        StoreError: a field is missing, unknown or of a wrong type; the message names it.
    """
    return _decoder(hint)(value, where)


Decoder = Callable[[Any, str], Any]


@cache
def _decoder(hint: Any) -> Decoder:
    """Return what decodes the values of a hint, which is looked at once."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return _plain
    if origin is Annotated:
        return _checked(_decoder(args[0]), args[1])
    if origin in (UnionType, Union):
        (some,) = (arg for arg in args if arg is not NoneType)
        return _optional(_decoder(some)) if NoneType in args else _decoder(some)
    if origin is list:
        return _list_of(_decoder(args[0]))
    if origin is tuple:
        if args[-1] is Ellipsis:
            return _several(_decoder(args[0]))
        return _tuple_of([_decoder(arg) for arg in args])
    if origin in (dict, Mapping):
        return _mapping_to(_decoder(args[1]))
    if is_typeddict(hint):
        return lambda value, where: _fields(hint, _of_kind(dict, value, where), where)
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(_instance, hint)
    return partial(_number if hint in (int, float) else _of_kind, hint)


def _checked(decoder: Decoder, check: Check) -> Decoder:
    def decode(value: Any, where: str) -> Any:
        decoded = decoder(value, where)
        check(decoded, where)
        return decoded

    return decode


def _optional(decoder: Decoder) -> Decoder:
    return lambda value, where: None if value is None else decoder(value, where)


def _list_of(decoder: Decoder) -> Decoder:
    return lambda value, where: [decoder(each, where) for each in _of_kind(list, value, where)]


def _several(decoder: Decoder) -> Decoder:
    return lambda value, where: tuple(decoder(each, where) for each in _of_kind(list, value, where))


def _tuple_of(decoders: Sequence[Decoder]) -> Decoder:
    def decode(value: Any, where: str) -> Any:
        if len(_of_kind(list, value, where)) != len(decoders):
            raise unreadable(where, value)
        return tuple(each(item, where) for each, item in zip(decoders, value, strict=True))

    return decode


def _mapping_to(decoder: Decoder) -> Decoder:
    def decode(value: Any, where: str) -> Any:
        found = _of_kind(dict, value, where)
        return {key: decoder(each, f"{where}[{key!r}]") for key, each in found.items()}

    return decode


def _instance(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict) or value.get("type", kind.__name__) != kind.__name__:
        raise unreadable(where, value)
    return kind(**_fields(kind, value, where))


def _number(kind: Any, value: Any, where: str) -> Any:
    if type(value) is int and value in INTEGERS:
        return kind(value)
    if kind is int:
        raise unreadable(where, value)
    return _of_kind(float, value, where)


def _of_kind(kind: Any, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise unreadable(where, value)
    return value


def unreadable(where: str, value: Any) -> StoreError:
    """Return the error for a value that can't stand where it does."""
    return StoreError(
        f"{where} can't be read from {reprlib.repr(value)}; restore the file from a copy"
    )


def matching(pattern: str) -> Check:
    """Return a check that text is of a pattern as a whole."""
    compiled = re.compile(pattern)

    def check(value: Any, where: str) -> None:
        if not compiled.fullmatch(value):
            raise unreadable(where, value)

    return check


def one_of(*allowed: str) -> Check:
    """Return a check that text is one of a few words."""

    def check(value: Any, where: str) -> None:
        if value not in allowed:
            raise unreadable(where, value)

    return check


def within(least: int, most: int = 2**63 - 1) -> Check:
    """Return a check that a number is neither below `least` nor above `most`."""

    def check(value: Any, where: str) -> None:
        if not least <= value <= most:
            raise unreadable(where, value)

    return check


Count = Annotated[int, within(0)]
"""A whole number from 0."""

Positive = Annotated[int, within(1)]
"""A whole number from 1."""


@contextmanager
def consistent(what: str, error: type[CerebroHydraError] = StoreError) -> Iterator[None]:
    """Raise `error` where well-formed documents contradict each other, such as by a missing trial.

    It serves folds over documents, whose every step would else need a check of its own.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as fault:
        if isinstance(fault, CerebroHydraError):
            raise
        raise error(f"{what} contradicts itself ({fault!r}); restore it from a copy") from fault


def _fields(kind: Any, document: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the decoded fields of a dataclass or TypedDict."""
    decoders, required = _form(kind)
    names = document.keys() - ({"type"} if is_dataclass(kind) else set())
    if wrong := (names - decoders.keys()) | (required - names):
        raise StoreError(
            f"{where} has missing or unknown fields: {reprlib.repr(sorted(wrong))}; restore the "
            "file from a copy"
        )
    return {name: decoders[name](document[name], f"{where}.{name}") for name in names}


@cache
def _form(kind: Any) -> tuple[dict[str, Decoder], frozenset[str]]:
    """Return what decodes each field, and the names of those that must be there."""
    hints = get_type_hints(kind, include_extras=True)
    decoders = {name: _decoder(hint) for name, hint in hints.items()}
    if is_typeddict(kind):
        return decoders, kind.__required_keys__
    return decoders, frozenset(
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    )


def _plain(value: Any, where: str, left: int = DEEPEST) -> Any:
    """Return a value of any form that does not nest too deep."""
    if not left:
        raise StoreError(f"{where} nests deeper than {DEEPEST} levels; restore it from a copy")
    if isinstance(value, list | dict):
        for item in value if isinstance(value, list) else value.values():
            _plain(item, where, left - 1)
    return value


def part_of(kind: Any, document: dict[str, Any], where: str) -> Any:
    """Return the fields of a dataclass that a document holds among others.

    Raises:
        StoreError: one is missing or of a wrong type.
    """
    names = kind.__dataclass_fields__.keys() & document.keys()
    return decode(kind, {name: document[name] for name in names}, where)
