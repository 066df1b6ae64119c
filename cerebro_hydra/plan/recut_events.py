"""Events of a trial that ran out of memory, and that is laid out in more shards.

``CutFiner`` asks for that, and one of these answers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cerebro_hydra.plan.hop_config import TrialConfig


@dataclass(frozen=True, slots=True)
class RecutState:
    """Holds a state in the shards of a finer cut, whose segments are in the store.

    ``digests`` has one (frozen, trainable) pair per shard, and all shards have the same ``cursor``,
    which is None for state 0.
    """

    visit: int
    digests: tuple[tuple[str, str], ...]
    cursor: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TrialRecut:
    """A trial was admitted again with a finer cut, in which these states are laid out.

    ``document`` describes the trial from now on. Nothing of it is written before this is decided.
    """

    config: TrialConfig
    states: tuple[RecutState, ...]
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecutRefused:
    """A trial can't be cut finer, so it fails with this reason."""

    trial: int
    error: str
