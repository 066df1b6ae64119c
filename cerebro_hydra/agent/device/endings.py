"""Says in words how processes of devices end, and when a trial's code is the cause."""

from __future__ import annotations

import signal
from collections.abc import Sequence

MOST_DEATHS = 3  # of devices that run the same code, until that is the cause


def ending_of(exitcode: int | None) -> str:
    """Return how a process ended; `exitcode` is negative for a signal."""
    if exitcode is None or exitcode >= 0:
        return f"it ended with exit code {exitcode}"
    if exitcode == -signal.SIGKILL:
        return "it was ended by SIGKILL, as the system does where memory runs out"
    try:
        return f"it was ended by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"it was ended by signal {-exitcode}"


def no_life(seconds: float) -> str:
    """Return how a process ended that was silent for as long as it may."""
    return (
        f"it showed no life for {seconds:g} s, as if it was stopped or its code held Python's "
        "lock, and was killed"
    )


def deadly(endings: Sequence[str]) -> str:
    """Return what is said of code that devices died of, whose processes ended like this."""
    first = f"its code ended the process of a device {len(endings)} times"
    return "\n".join((first, *(f"  {number}. {each}" for number, each in enumerate(endings, 1))))
