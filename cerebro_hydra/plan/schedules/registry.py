"""The schedules by name: in which order a trial does its own shard tasks."""

from __future__ import annotations

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.schedules.pick import PICKS

SCHEDULES = ("sequential",)
"""The names that the schedule of a trial may have."""


def check_schedule(name: object) -> None:
    """Check what a user gave as the schedule of a trial.

    Raises:
        ConfigurationError: there is no such schedule; the message says what to give instead.
    """
    if isinstance(name, str) and name in PICKS:
        raise ConfigurationError(
            f"schedule is {name!r}, which is how devices choose among trials; leave schedule out, "
            f"and give the backend pick={name!r}"
        )
    if name not in SCHEDULES:
        raise ConfigurationError(f"schedule is {name!r}; it is one of {list(SCHEDULES)}")
