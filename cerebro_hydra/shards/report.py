"""What a cut made of a model, shard by shard, for people and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.layout import TrialLayout


@dataclass(frozen=True)
class CrossingValue:
    """A value that goes from one shard to the next."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    """None stands for the rows of a batch, or another size that differs between batches."""
    nbytes: int
    """For one batch of the largest size."""


@dataclass(frozen=True)
class ShardReport:
    """One shard: where it begins and ends and why, what it holds, what comes in from before."""

    first_unit: str
    last_unit: str
    why: str
    trainable_params: int
    frozen_params: int
    state_nbytes: int
    receives: tuple[CrossingValue, ...]


@dataclass(frozen=True)
class CutReport:
    """A cut model. `fallback` says why it is not cut as was asked, or is None."""

    mode: str
    shards: tuple[ShardReport, ...]
    fallback: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def text(self) -> str:
        """A table, one line per shard."""
        count = len(self.shards)
        lines = [f"{count} shard{'s' * (count != 1)}, cut by {self.mode}"]
        if self.fallback:
            lines.append(f"  note: {self.fallback}")
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
        fallback: str | None,
    ) -> CutReport:
        shards = []
        for k, program in enumerate(cut_model.train):
            names = [unit.removesuffix("@0") for unit in program.units] or ["(the model)"]
            shards.append(
                ShardReport(
                    first_unit=names[0],
                    last_unit=names[-1],
                    why=why[k],
                    trainable_params=_count(cut_model, k, frozen=False),
                    frozen_params=_count(cut_model, k, frozen=True),
                    state_nbytes=layout.shards[k].nbytes,
                    receives=tuple(CrossingValue(*value) for value in program.crossing),
                )
            )
        return cls(cut_model.spec.mode, tuple(shards), fallback)


def _shown(shape: Sequence[int | None]) -> str:
    free = ["rows", *("any" for _ in shape[1:])]
    return ", ".join(
        name if size is None else str(size) for name, size in zip(free, shape, strict=False)
    )


def _count(cut_model: CutModel, shard: int, frozen: bool) -> int:
    return sum(
        math.prod(p.shape) for p in cut_model.params if p.owner == shard and p.frozen == frozen
    )
