"""Defines what is fixed for a run, which is the first record of its journal, and its trials."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from cerebro_hydra.errors import ConfigurationError

ORDERS = ("dynamic", "seeded")
DIRECTIONS = ("min", "max")
KEEPS = ("best", "last")
CHECKPOINTS = ("epoch", "sub-epoch", "end")


@dataclass(frozen=True, slots=True)
class TrialConfig:
    """Holds the facts about one trial that decisions depend on.

    ``trial`` is its number, the place in which it was proposed. ``cost`` is the relative work of
    one sub-epoch, in any positive unit that all trials share. ``nbytes`` is the size of its state.
    ``initial_digests`` has one (frozen, trainable) pair per shard; a fork has its parent's.
    ``custom_metrics`` names the metrics that the user's code merges after every epoch
    (``MergeMetrics``). A trial with a ``patience`` ends when that many epochs in a row were not
    better; with None it trains all epochs. Its result is the state after its best epoch if it
    keeps the "best", and the newest state if it keeps the "last". A trial that may be cut ``finer``
    is, once, when it runs out of memory. A sub-epoch of a trial with ``replicas`` goes over so many
    partitions at once, each at a worker of its own. One with a ``tail`` does so as soon as its
    search has more workers than trials.

    Raises:
        ConfigurationError: a number can't be used.
    """

    trial: int
    cost: float
    nbytes: int
    initial_digests: tuple[tuple[str, str], ...]
    custom_metrics: tuple[str, ...] = ()
    patience: int | None = None
    keep: str = "last"
    finer: bool = False
    replicas: int = 1
    tail: bool = False

    def __post_init__(self) -> None:
        """Refuse a trial that no run can train."""
        if self.trial < 0:
            raise ConfigurationError(f"trial={self.trial} is negative; number the trials from 0")
        if not (isfinite(self.cost) and self.cost > 0):
            raise ConfigurationError(
                f"cost={self.cost} of trial {self.trial} must be finite and positive"
            )
        patience = self.patience
        if patience is not None and (type(patience) is not int or patience < 1):
            raise ConfigurationError(
                f"patience={patience!r} of trial {self.trial} must be a whole number of epochs "
                "from 1"
            )
        if self.replicas < 1:
            raise ConfigurationError(
                f"replicas={self.replicas} of trial {self.trial} must be at least 1"
            )
        if self.keep not in KEEPS:
            raise ConfigurationError(
                f"keep={self.keep!r} of trial {self.trial} is unknown; choose one of {KEEPS}"
            )

    @property
    def compares_epochs(self) -> bool:
        """Return whether the metric of its epochs decides something about the trial."""
        return self.patience is not None or self.keep == "best"


@dataclass(frozen=True, slots=True)
class HopConfig:
    """Holds what is the same for all trials of a run.

    ``metric`` is a name in the metrics of an epoch, such as "val_loss", and ``direction`` is "min"
    or "max"; together they define which epoch of a trial is its best. ``checkpoint``
    says after what the newest state of a trial is written to the store: "epoch", "sub-epoch", or
    only the "end" of the trial.

    Raises:
        ConfigurationError: a number or a name can't be used.
    """

    partitions: int
    order: str = "dynamic"
    seed: int = 0
    evaluate: bool = True
    metric: str = "train_loss"
    direction: str = "min"
    checkpoint: str = "epoch"

    def __post_init__(self) -> None:
        """Refuse a configuration that no run can start with."""
        if self.order not in ORDERS:
            raise ConfigurationError(f"order={self.order!r} is unknown; choose one of {ORDERS}")
        if self.direction not in DIRECTIONS:
            raise ConfigurationError(
                f"direction={self.direction!r} is unknown; choose one of {DIRECTIONS}"
            )
        if self.checkpoint not in CHECKPOINTS:
            raise ConfigurationError(
                f"checkpoint={self.checkpoint!r} is unknown; choose one of {CHECKPOINTS}"
            )
        if self.partitions < 1:
            raise ConfigurationError(f"partitions={self.partitions} must be at least 1")

    def check_trial(self, trial: TrialConfig) -> None:
        """Refuse a trial that this run can't train.

        Raises:
            ConfigurationError: it compares epochs by a metric that none will have, or has more
                replicas than there are partitions.
        """
        if trial.replicas > self.partitions:
            raise ConfigurationError(
                f"replicas={trial.replicas} of trial {trial.trial} are more than the "
                f"{self.partitions} partitions; take replicas={self.partitions} at most"
            )
        if trial.compares_epochs and not self.evaluate and self.metric != "train_loss":
            raise ConfigurationError(
                f"trial {trial.trial} compares epochs by metric={self.metric!r}, which needs "
                "validation data; add validation data, or use metric='train_loss'"
            )
