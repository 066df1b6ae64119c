"""Reports a cut, shard by shard, as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.layout import TrialLayout
from cerebro_hydra.shards.shard_graph import CrossingValue


@dataclass(frozen=True)
class ShardReport:
    """Reports a shard: its first and last unit, why it begins there, what it holds and receives."""

    first_unit: str
    last_unit: str
    why: str
    trainable_params: int
    frozen_params: int
    state_nbytes: int
    receives: tuple[CrossingValue, ...]


@dataclass(frozen=True)
class FailedAttempt:
    """Tells in which way a model was to be cut, such as "by export", and why it is not."""

    way: str
    reason: str

    def __str__(self) -> str:
        return f"{self.way}: {self.reason}"

    @property
    def summary(self) -> str:
        """Return the attempt in one clause, without what the reason quotes."""
        return f"it is not cut {self.way}, because {re.split(r' [(]|: ', self.reason)[0]}"


@dataclass(frozen=True)
class CutReport:
    """Reports a cut.

    Args:
        fallback: says in a sentence why the model is not cut as was asked, or is None.
        attempts: the details: what was tried before.
    """

    mode: str
    shards: tuple[ShardReport, ...]
    fallback: str | None = None
    attempts: tuple[FailedAttempt, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """Return the report as text, one line per shard."""
        count = len(self.shards)
        lines = [f"{count} shard{'s' * (count != 1)}, cut by {self.mode}"]
        if self.fallback:
            lines.append(f"  note: {self.fallback}")
            lines += [f"    {attempt}" for attempt in self.attempts]
        for number, shard in enumerate(self.shards):
            crossing = ", ".join(
                f"{v.name} {v.dtype}[{_shown(v.shape)}] {v.nbytes:,} B" for v in shard.receives
            )
            lines.append(
                f"  shard {number}: {shard.first_unit} .. {shard.last_unit}, "
                f"{shard.trainable_params:,} trainable and {shard.frozen_params:,} frozen "
                f"parameters, {shard.state_nbytes:,} B of state"
                + (f", receives {crossing}" if crossing else "")
                + f" ({shard.why})"
            )
        return "\n".join(lines)

    @classmethod
    def of(
        cls,
        cut_model: CutModel,
        layout: TrialLayout,
        why: Sequence[str],
        note: str | None,
        attempts: Sequence[FailedAttempt],
    ) -> CutReport:
        """Return the report of a cut model, with the reason for the start of each shard."""
        shards = []
        for k, units in enumerate(cut_model.units):
            names = [unit.removesuffix("@0") for unit in units] or ["(the model)"]
            graphs = cut_model.graphs
            shards.append(
                ShardReport(
                    first_unit=names[0],
                    last_unit=names[-1],
                    why=why[k],
                    trainable_params=_count(cut_model, k, frozen=False),
                    frozen_params=_count(cut_model, k, frozen=True),
                    state_nbytes=layout.shards[k].nbytes,
                    receives=graphs.train[k].crossing if graphs else (),
                )
            )
        notes = [attempt.summary for attempt in attempts[:1]] + ([note] if note else [])
        return cls(cut_model.spec.mode, tuple(shards), "; ".join(notes) or None, tuple(attempts))


def _shown(shape: Sequence[int | None]) -> str:
    free = ["rows", *("any" for _ in shape[1:])]
    return ", ".join(
        name if size is None else str(size) for name, size in zip(free, shape, strict=False)
    )


def _count(cut_model: CutModel, shard: int, frozen: bool) -> int:
    return sum(
        math.prod(p.shape) for p in cut_model.params if p.owner == shard and p.frozen == frozen
    )
