"""What a run is, before its first event: the first record of its journal."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from cerebro_hydra.errors import ConfigurationError

ORDERS = ("dynamic", "seeded")


@dataclass(frozen=True, slots=True)
class TrialConfig:
    """One trial as the decisions see it.

    ``cost`` is the relative work of one sub-epoch (any positive unit, the same for all trials);
    ``nbytes`` the size of its state; ``initial_digests`` one (frozen, trainable) pair per shard;
    ``custom_metrics`` names what the user's code merges after every epoch (``Measure``).
    """

    trial: int
    cost: float
    nbytes: int
    initial_digests: tuple[tuple[str, str], ...]
    custom_metrics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HopConfig:
    """All trials of a run, and the data they visit.

    Raises:
        ConfigurationError: a number or name can't be used.
    """

    trials: tuple[TrialConfig, ...]
    partitions: int
    epochs: int
    order: str = "dynamic"
    seed: int = 0
    evaluate: bool = True

    def __post_init__(self) -> None:
        """Refuse what no run can start with."""
        if self.order not in ORDERS:
            raise ConfigurationError(f"order={self.order!r} is unknown; choose one of {ORDERS}")
        for name in ("partitions", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.trials:
            raise ConfigurationError("a run needs at least one trial")
        for index, trial in enumerate(self.trials):
            if trial.trial != index:
                raise ConfigurationError(f"trial {trial.trial} stands at index {index}")
            if not (isfinite(trial.cost) and trial.cost > 0):
                raise ConfigurationError(f"cost={trial.cost} of trial {index} must be positive")
