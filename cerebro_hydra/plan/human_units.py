"""Writes bytes, seconds and lists of numbers for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def bytes_text(nbytes: float) -> str:
    """Return bytes in the largest binary unit that leaves at least 1, with three digits."""
    if nbytes == math.inf:
        return "no limit"
    unit, factor, digits = _form(nbytes)
    return f"{nbytes / factor:.{digits}f} {unit}"


def needed_text(nbytes: int) -> str:
    """Return bytes as `bytes_text` does, but rounded up: who gives so many gives enough."""
    unit, factor, digits = _form(nbytes)
    return f"{-(-nbytes * 10**digits // factor) / 10**digits:.{digits}f} {unit}"


def _form(nbytes: float) -> tuple[str, int, int]:
    """Return the unit of bytes, the bytes of one, and how many digits follow the point."""
    unit, factor = "B", 1
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 * factor:
            break
        unit, factor = larger, 1024 * factor
    digits = 0 if factor == 1 or nbytes >= 100 * factor else 1 if nbytes >= 10 * factor else 2
    return unit, factor, digits


def seconds_text(seconds: float) -> str:
    """Return seconds as seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.{1 if seconds < 10 else 0}f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def numbers_text(numbers: Sequence[int]) -> str:
    """Return numbers in rising order as ranges, such as ``0-3, 7``."""
    breaks = [i for i, (a, b) in enumerate(pairwise(numbers), start=1) if b != a + 1]
    parts = [numbers[a:b] for a, b in pairwise([0, *breaks, len(numbers)])]
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)
