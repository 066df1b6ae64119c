"""Turns events, instructions and configurations into JSON and back.

The JSON form of each is ``{"type": name, field: value, ...}``.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from cerebro_hydra.errors import JournalError
from cerebro_hydra.plan.events import Event, Hop
from cerebro_hydra.plan.hop_config import HopConfig, TrialConfig
from cerebro_hydra.plan.instructions import Instruction, StateSource

_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (*get_args(Event), *get_args(Instruction), Hop, StateSource, HopConfig, TrialConfig)
}


def to_json(obj: object) -> dict[str, Any]:
    """Return a dict that ``json`` writes and :func:`from_json` turns back into an equal object.

    Raises:
        TypeError: the object is of another type.
    """
    if type(obj) is not _TYPES.get(type(obj).__name__):
        raise TypeError(f"{obj!r} is neither an event, an instruction nor a configuration")
    encoded: dict[str, Any] = _encode(obj)
    return encoded


def from_json(doc: dict[str, Any]) -> Any:
    """Return the event, instruction or configuration that ``doc`` describes.

    Raises:
        JournalError: the type is unknown, or a field is missing, unknown or of a wrong type.
    """
    name = doc.get("type")
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise JournalError(f"unknown record type {name!r}; known: {', '.join(sorted(_TYPES))}")
    hints = _hints(kind)
    if differing := (doc.keys() - {"type"}) ^ hints.keys():
        raise JournalError(f"{name} has missing or unknown fields: {', '.join(sorted(differing))}")
    return kind(**{field: _decode(hints[field], doc[field], f"{name}.{field}") for field in hints})


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        encoded = {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__, **encoded}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    return value


def _decode(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is UnionType:
        if value is None and NoneType in args:
            return None
        (hint,) = (arg for arg in args if arg is not NoneType)
        return _decode(hint, value, where)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = (args[0],) * len(value) if args[-1] is Ellipsis else args
        if len(kinds) == len(value):
            return tuple(_decode(k, item, where) for k, item in zip(kinds, value, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {str(key): _decode(args[1], item, where) for key, item in value.items()}
    elif is_dataclass(hint) and isinstance(value, dict):
        decoded = from_json(value)
        if type(decoded) is hint:
            return decoded
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif type(value) is hint:
        return value
    raise JournalError(f"{where} can't be read from {value!r}")
