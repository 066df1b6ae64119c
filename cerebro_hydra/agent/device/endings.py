"""Says in words how processes of devices end, and when a trial's code is the cause."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from cerebro_hydra.available_memory import usable_memory

MOST_DEATHS = 3  # of devices that run the same code, until that is the cause


def ending_of(exitcode: int | None, memory_ran_out: bool = False) -> str:
    """Return how a process ended.

    Args:
        exitcode: is negative for a signal.
        memory_ran_out: whether the kernel has ended processes for their memory since it began.
    """
    if exitcode is None or exitcode >= 0:
        return f"it ended with exit code {exitcode}"
    if exitcode == -signal.SIGKILL and memory_ran_out:
        return (
            "it was ended by SIGKILL, as memory ran out, of which all processes here may take "
            f"{usable_memory() / 2**30:,.2f} GiB: use a smaller batch_size, or fewer devices"
        )
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
