"""Defines the configuration of a run, which is the first record of its journal."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from cerebro_hydra.errors import ConfigurationError

ORDERS = ("dynamic", "seeded")
DIRECTIONS = ("min", "max")


@dataclass(frozen=True, slots=True)
class TrialConfig:
    """Holds the facts about one trial that decisions depend on.

    ``cost`` is the relative work of one sub-epoch, in any positive unit that all trials share.
    ``nbytes`` is the size of its state. ``initial_digests`` has one (frozen, trainable) pair per
    shard. ``custom_metrics`` names the metrics that the user's code merges after every epoch
    (``MergeMetrics``). A trial with a ``patience`` ends when that many epochs in a row were not
    better, and its result is the state after its best epoch. With None it trains all epochs, and
    its result is the newest state.
    """

    trial: int
    cost: float
    nbytes: int
    initial_digests: tuple[tuple[str, str], ...]
    custom_metrics: tuple[str, ...] = ()
    patience: int | None = None


@dataclass(frozen=True, slots=True)
class HopConfig:
    """Holds all trials of a run, and the partitions and epochs they train.

    ``metric`` is a name in the metrics of an epoch, such as "val_loss", and ``direction`` is "min"
    or "max"; together they define which epoch of a trial with patience is its best.

    Raises:
        ConfigurationError: a number or a name can't be used.
    """

    trials: tuple[TrialConfig, ...]
    partitions: int
    epochs: int
    order: str = "dynamic"
    seed: int = 0
    evaluate: bool = True
    metric: str = "train_loss"
    direction: str = "min"

    def __post_init__(self) -> None:
        """Refuse a configuration that no run can start with."""
        if self.order not in ORDERS:
            raise ConfigurationError(f"order={self.order!r} is unknown; choose one of {ORDERS}")
        if self.direction not in DIRECTIONS:
            raise ConfigurationError(
                f"direction={self.direction!r} is unknown; choose one of {DIRECTIONS}"
            )
        for name in ("partitions", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.trials:
            raise ConfigurationError("there are no trials; a run needs at least one trial")
        for index, trial in enumerate(self.trials):
            if trial.trial != index:
                raise ConfigurationError(
                    f"trial {trial.trial} stands at index {index}; number the trials from 0"
                )
            if not (isfinite(trial.cost) and trial.cost > 0):
                raise ConfigurationError(
                    f"cost={trial.cost} of trial {index} must be finite and positive"
                )
            if trial.patience is not None:
                self._check_patience(index, trial.patience)

    def _check_patience(self, index: int, patience: int) -> None:
        if type(patience) is not int or patience < 1:
            raise ConfigurationError(
                f"patience={patience!r} of trial {index} must be a whole number of epochs from 1"
            )
        if not self.evaluate and self.metric != "train_loss":
            raise ConfigurationError(
                f"trial {index} has patience with metric={self.metric!r}, which needs validation "
                "data; add validation data, or use metric='train_loss'"
            )
