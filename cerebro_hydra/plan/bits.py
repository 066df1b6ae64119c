"""Sets of small numbers as ints: bit n of a mask stands for the number n.

Sets of trials or of partitions are compared and combined all the time; as masks a thousand
members take 125 bytes and a fraction of a microsecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def members(mask: int) -> Iterator[int]:
    """Iterate over the members, smallest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def mask_of(numbers: Iterable[int]) -> int:
    """Return the set of these numbers."""
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask
