"""A cut spec says where a model is cut, as data that travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

CutMode = Literal["export", "layers", "whole"]


@dataclass(frozen=True)
class CutSpec:
    """Describes a cut of a model: its mode, and where its shards begin.

    Args:
        mode: "export" cuts the flat graph of `torch.export`, "layers" cuts between the children of
            a `Sequential`, and "whole" keeps the model as one shard.
        at: the unit calls, `module@call`, at which shards 1, 2, ... begin.
    """

    mode: CutMode
    at: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"mode": self.mode, "at": list(self.at)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CutSpec:
        return cls(document["mode"], tuple(document["at"]))
