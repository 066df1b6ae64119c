"""Says how long a run waits for agents that are silent or missing, and how many it may lose."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from cerebro_hydra.errors import ConfigurationError


@dataclass(frozen=True)
class LossLimits:
    """Holds what `SparkBackend` says of the losses that a run outlasts.

    Args:
        join_timeout: seconds that a worker may be missing before the others take over its
            partitions; without any other the run ends.
        heartbeat_interval: seconds between two heartbeats, which driver and agents send each other.
        missed_heartbeats: how many in a row may be missed; then an agent is given up and replaced.
        max_failures: how many agents of one worker may be lost in a row of which none began a task;
            then that worker gets no more.

    Raises:
        ConfigurationError: a number can't be used.
    """

    join_timeout: float = 300.0
    heartbeat_interval: float = 0.5
    missed_heartbeats: int = 20
    max_failures: int = 8

    def __post_init__(self) -> None:
        """Refuse numbers that no run can work with."""
        for name in ("join_timeout", "heartbeat_interval"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 < value < inf):
                raise ConfigurationError(f"{name} is {value!r}; it is a number of seconds above 0")
        for name in ("missed_heartbeats", "max_failures"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"{name} is {value!r}; it is a whole number from 1")

    @property
    def silence_seconds(self) -> float:
        """Return how long an agent may be silent."""
        return self.heartbeat_interval * self.missed_heartbeats


DEFAULT_LIMITS = LossLimits()
