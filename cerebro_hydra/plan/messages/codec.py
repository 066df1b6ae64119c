"""Turns events, instructions and configurations into JSON and back.

The JSON form of each is ``{"type": name, field: value, ...}``.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_args

from cerebro_hydra.documents import decode
from cerebro_hydra.errors import JournalError, StoreError
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.messages.events import Assignment, Event, Hop, RecutState
from cerebro_hydra.plan.messages.instructions import Instruction, StateSource

_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *get_args(Event),
        *get_args(Instruction),
        Assignment,
        Hop,
        RecutState,
        StateSource,
        HopConfig,
        TrialConfig,
    )
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


def from_json(doc: Any) -> Any:
    """Return the event, instruction or configuration that ``doc`` describes.

    Raises:
        JournalError: the type is unknown, or a field is missing, unknown or of a wrong type.
    """
    name = doc.get("type") if isinstance(doc, dict) else doc
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise JournalError(f"unknown record type {name!r}; known: {', '.join(sorted(_TYPES))}")
    try:
        return decode(kind, doc, kind.__name__)
    except StoreError as error:
        raise JournalError(str(error)) from error


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        encoded = {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__, **encoded}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    return value
