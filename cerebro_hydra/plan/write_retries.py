"""Decides how long to wait before a write that failed is tried again."""

from __future__ import annotations

WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds between the tries of one write: a minute in all."""

LONGEST_WAIT = WAITS[-1]
"""Seconds between the tries of a write that is never given up."""


def wait_after(failures: int) -> float | None:
    """Return the seconds to wait after so many failures in a row, or None to give up."""
    return WAITS[failures - 1] if failures <= len(WAITS) else None
