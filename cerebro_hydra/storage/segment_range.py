"""Names the files of a journal, each of which holds one segment or several that were merged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_NAME = re.compile(r"(\d{8,})(?:-(\d{8,}))?\.jsonl")


class SegmentRange(NamedTuple):
    """Names the file of the segments from `first` to `last`: `00000007.jsonl`, `0...0-0...7.jsonl`.

    The ranges of a journal are disjoint or one contains the other, because a file is merged once.
    """

    first: int
    last: int

    @property
    def name(self) -> str:
        """Return the file's name."""
        end = "" if self.first == self.last else f"-{self.last:08d}"
        return f"{self.first:08d}{end}.jsonl"


def in_order(names: Iterable[str]) -> list[SegmentRange]:
    """Return the ranges of a folder's files by their first segment, the widest of these first."""
    found = (match for match in map(_NAME.fullmatch, names) if match)
    ranges = (SegmentRange(int(each[1]), int(each[2] or each[1])) for each in found)
    return sorted(ranges, key=lambda each: (each.first, -each.last))
