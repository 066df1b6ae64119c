"""Keeps the table of which place holds which segment.

Hops, redo, the count of bytes already there and garbage collection all read this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

STORE = "store"


@dataclass(frozen=True, slots=True)
class Holder:
    """Notes one segment in one place: the "dram" of a worker's incarnation, or the "store"."""

    digest: str
    where: str
    tier: str


class Holders:
    """Keeps a table of :class:`Holder` rows and answers questions about states.

    A place holds a state whole if it has all its segments and its cursor. The cursor counts as one
    more segment with a name of its own, so two states with equal bytes are still two states.
    """

    def __init__(self) -> None:
        self._segments: dict[int, dict[int, tuple[str, ...]]] = {}  # by trial and visit
        self._frozen: set[str] = set()
        # By place and segment, how many states that are whole there name the segment.
        self._at: dict[str, dict[str, int]] = {STORE: {}}

    def __iter__(self) -> Iterator[Holder]:
        """Iterate over all rows, sorted by place and digest."""
        for where in sorted(self._at):
            for digest in sorted(self._at[where]):
                yield Holder(digest, where, STORE if where == STORE else "dram")

    def define(self, trial: int, visit: int, digests: Iterable[tuple[str, str]]) -> None:
        """Define the state after ``visit`` by its (frozen, trainable) digests per shard."""
        pairs = tuple(digests)
        self._frozen.update(frozen for frozen, _ in pairs)
        segments = (digest for pair in pairs for digest in pair)
        cursor = f"cursor/{trial}/{visit}"
        self._segments.setdefault(trial, {})[visit] = (cursor, *dict.fromkeys(segments))

    def add(self, trial: int, visit: int, where: str) -> None:
        """Note that this place holds the state whole."""
        there = self._at.setdefault(where, {})
        segments = self._segments[trial][visit]
        if segments[0] not in there:
            for segment in segments:
                there[segment] = there.get(segment, 0) + 1

    def drop(self, trial: int, visit: int, where: str) -> None:
        """Take the state away from this place, which holds it whole.

        Its frozen segments stay, and so do segments that other states there share.
        """
        there = self._at[where]
        for segment in self._segments[trial][visit]:
            there[segment] -= 1
            if not there[segment] and segment not in self._frozen:
                del there[segment]

    def forget_worker(self, incarnation: str) -> None:
        """Remove everything that this incarnation held."""
        self._at.pop(incarnation, None)

    def forget_state(self, trial: int, visit: int) -> None:
        """Remove a state that is void or dropped everywhere; it must not be named again."""
        self._segments.get(trial, {}).pop(visit, None)

    def holds(self, trial: int, visit: int, where: str) -> bool:
        """Return whether the state is known and this place holds it whole."""
        segments = self._segments.get(trial, {}).get(visit)
        return segments is not None and segments[0] in self._at.get(where, {})

    def where(self, trial: int, visit: int) -> list[str]:
        """Return every place that holds the state whole, in the order in which places joined."""
        segments = self._segments.get(trial, {}).get(visit)
        if segments is None:
            return []
        return [place for place, there in self._at.items() if segments[0] in there]

    def visits(self, trial: int) -> list[int]:
        """Return the visits of a trial's known states, oldest first."""
        return sorted(self._segments.get(trial, ()))

    def share(self, trial: int, visit: int, where: str) -> float:
        """Return the share of the state's segments that this place already has."""
        segments = self._segments[trial][visit]
        there = self._at.get(where, {})
        return sum(map(there.__contains__, segments)) / len(segments)
