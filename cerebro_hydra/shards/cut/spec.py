"""A cut spec says where a model is cut, as data that travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

CutMode = Literal["export", "modules"]

_LISTS = ("at", "units", "overwritten", "written", "rows")


@dataclass(frozen=True)
class CutSpec:
    """Describes a cut of a model: its mode, and where its shards begin.

    Args:
        mode: "export" cuts the flat graph of `torch.export`, "modules" runs the model's own forward
            and stops it between units.
        at: the unit calls, `module@call`, at which shards 1, 2, ... begin. Without any, the model
            is one shard.
        units: the first call of each unit in the order in which they come, where mode is "modules".
        overwritten: the units whose input the forward overwrites; they are never run again.
        written: the buffers and frozen parameters to which training writes, or may begin to write
            in any step. Where mode is "export", those to which a graph writes need no name.
        rows: the numbers of rows for each of which a graph is exported. Without any, one graph
            holds for every number.
    """

    mode: CutMode
    at: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"mode": self.mode} | {name: list(getattr(self, name)) for name in _LISTS}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CutSpec:
        return cls(document["mode"], *(tuple(document[name]) for name in _LISTS))


def module_of(unit: str) -> str:
    """Return the module's name in a unit call, `module@call`."""
    return unit.rpartition("@")[0]
