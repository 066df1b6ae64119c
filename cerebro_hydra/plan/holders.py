"""Who holds what: the one table behind hops, redo, bytes already there and garbage collection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

STORE = "store"


@dataclass(frozen=True, slots=True)
class Holder:
    """One segment in one place: a worker's incarnation in "dram", or the "store"."""

    digest: str
    where: str
    tier: str


class Holders:
    """The table of :class:`Holder` rows, asked by state.

    A state is whole where all its segments are, and its cursor, which counts as one more segment
    with a name of its own: two states with equal bytes are still two states.
    """

    def __init__(self) -> None:
        self._segments: dict[tuple[int, int], tuple[str, ...]] = {}
        self._frozen: set[str] = set()
        self._at: dict[str, set[str]] = {STORE: set()}

    def __iter__(self) -> Iterator[Holder]:
        """All rows, sorted."""
        for where in sorted(self._at):
            for digest in sorted(self._at[where]):
                yield Holder(digest, where, STORE if where == STORE else "dram")

    def define(self, trial: int, visit: int, digests: Iterable[tuple[str, str]]) -> None:
        """Say what the state after ``visit`` consists of: (frozen, trainable) per shard."""
        pairs = tuple(digests)
        self._frozen.update(frozen for frozen, _ in pairs)
        segments = (digest for pair in pairs for digest in pair)
        self._segments[trial, visit] = (_cursor(trial, visit), *dict.fromkeys(segments))

    def add(self, trial: int, visit: int, where: str) -> None:
        """The state is whole there now."""
        self._at.setdefault(where, set()).update(self._segments[trial, visit])

    def drop(self, trial: int, visit: int, where: str) -> None:
        """Take the state away; its frozen segments stay, and segments that others there name."""
        there = self._at[where]
        there.discard(_cursor(trial, visit))
        named: set[str] = set()
        for (other, at), segments in self._segments.items():
            if _cursor(other, at) in there:
                named.update(segments)
        there.difference_update(set(self._segments[trial, visit]) - named - self._frozen)

    def forget_worker(self, incarnation: str) -> None:
        """All that this incarnation held is gone."""
        self._at.pop(incarnation, None)

    def forget_state(self, trial: int, visit: int) -> None:
        """The state is void or dropped everywhere; nothing may refer to it again."""
        self._segments.pop((trial, visit), None)

    def holds(self, trial: int, visit: int, where: str) -> bool:
        """Whether the state is known and whole there."""
        segments = self._segments.get((trial, visit))
        return segments is not None and self._at.get(where, frozenset()).issuperset(segments)

    def where(self, trial: int, visit: int) -> list[str]:
        """Every place that holds the state whole, in the order in which the places joined."""
        return [place for place in self._at if self.holds(trial, visit, place)]

    def visits(self, trial: int) -> list[int]:
        """The known states of a trial, oldest first."""
        return sorted(visit for other, visit in self._segments if other == trial)

    def share(self, trial: int, visit: int, where: str) -> float:
        """How much of the state is already there, as a share of its segments."""
        segments = self._segments[trial, visit]
        there = self._at.get(where, set())
        return sum(segment in there for segment in segments) / len(segments)


def _cursor(trial: int, visit: int) -> str:
    return f"cursor/{trial}/{visit}"
