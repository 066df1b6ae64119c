"""Keeps the table of which place holds which segment.

Hops, redo, the count of bytes already there and garbage collection all read this table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

STORE = "store"

State = tuple[int, int]  # trial, number of the state


@dataclass(frozen=True, slots=True)
class Holder:
    """Notes one segment in one place: the "dram" of a worker's incarnation, or the "store"."""

    digest: str
    where: str
    tier: str


@dataclass(slots=True)
class _KnownState:
    """Holds the segments of a state, its cursor first, and the places that hold all of them."""

    segments: tuple[str, ...]
    places: dict[str, None]


class Holders:
    """Keeps a table of :class:`Holder` rows and answers questions about states.

    A place holds a state whole if it has all its segments and its cursor. The cursor counts as one
    more segment with a name of its own, so two states with equal bytes are still two states.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[int, _KnownState]] = {}  # by trial and number
        self._frozen: set[str] = set()
        # By place and segment, how many states that are whole there name the segment.
        self._at: dict[str, dict[str, int]] = {}
        self._whole: dict[str, dict[State, None]] = {}  # the states that are whole, by place
        self._written: dict[str, int] = {}  # how many states being written name a segment
        self._writers: dict[str, int] = {}  # how many states a place writes to the store now

    def __iter__(self) -> Iterator[Holder]:
        """Iterate over all rows, sorted by place and digest."""
        for where in sorted(self._at):
            for digest in sorted(self._at[where]):
                yield Holder(digest, where, STORE if where == STORE else "dram")

    def define(self, trial: int, state: int, digests: Iterable[tuple[str, str]]) -> None:
        """Define ``state`` by its (frozen, trainable) digests per shard."""
        pairs = tuple(digests)
        self._frozen.update(frozen for frozen, _ in pairs)
        segments = (digest for pair in pairs for digest in pair)
        cursor = f"cursor/{trial}/{state}"
        entry = _KnownState((cursor, *dict.fromkeys(segments)), {})
        self._known.setdefault(trial, {})[state] = entry

    def fork(self, parent: int, state: int, trial: int) -> None:
        """Define ``state`` of a fork by the segments of its parent's."""
        segments = self._known[parent][state].segments[1:]
        entry = _KnownState((f"cursor/{trial}/{state}", *segments), {})
        self._known.setdefault(trial, {})[state] = entry

    def add(self, trial: int, state: int, where: str) -> None:
        """Note that this place holds the state whole."""
        entry = self._known[trial][state]
        if where in entry.places:
            return
        entry.places[where] = None
        self._whole.setdefault(where, {})[trial, state] = None
        there = self._at.setdefault(where, {})
        for segment in entry.segments:
            there[segment] = there.get(segment, 0) + 1

    def drop(self, trial: int, state: int, where: str) -> tuple[str, ...]:
        """Take the state away from this place, which holds it whole; return the segments that go.

        Its frozen segments stay, and so do segments that other states there share, or that are
        being written there.
        """
        entry, there = self._known[trial][state], self._at[where]
        del entry.places[where], self._whole[where][trial, state]
        gone = []
        for segment in entry.segments:
            there[segment] -= 1
            if not there[segment] and segment not in self._frozen:
                del there[segment]
                if where != STORE or segment not in self._written:
                    gone.append(segment)
        return tuple(gone[1:])  # without the cursor, which no other state has

    def recut(self, trial: int, state: int, digests: Iterable[tuple[str, str]]) -> None:
        """Define a state anew that only the store holds, by the segments of another cut.

        The segments of the former cut stay there until files that nobody names are swept.
        """
        places = [*self.where(trial, state)]
        assert places == [STORE], f"state {state} of trial {trial} is at {places}"
        self.drop(trial, state, STORE)
        self.define(trial, state, digests)
        self.add(trial, state, STORE)

    def begin_write(self, trial: int, state: int, where: str) -> None:
        """Note that this place writes the state to the store, whose segments must stay there."""
        self._writers[where] = self._writers.get(where, 0) + 1
        for segment in self._known[trial][state].segments:
            self._written[segment] = self._written.get(segment, 0) + 1

    def end_write(self, trial: int, state: int, where: str) -> None:
        """Note that the state is written, or can't be."""
        _uncount(self._writers, where)
        for segment in self._known[trial][state].segments:
            _uncount(self._written, segment)

    def least_busy_writer(self, trial: int, state: int) -> str:
        """Return a place that holds the state whole, of those that write the fewest states now."""
        return min(self._known[trial][state].places, key=lambda each: self._writers.get(each, 0))

    def segments(self, trial: int, state: int) -> tuple[str, ...]:
        """Return the digests of the state's segments; none if it is not known any more."""
        entry = self._known.get(trial, {}).get(state)
        return () if entry is None else entry.segments[1:]

    def forget_worker(self, incarnation: str) -> None:
        """Remove everything that this incarnation held."""
        self._at.pop(incarnation, None)
        for trial, state in self._whole.pop(incarnation, ()):
            del self._known[trial][state].places[incarnation]

    def forget_state(self, trial: int, state: int) -> None:
        """Remove a state that no place holds any more; it must not be named again."""
        del self._known[trial][state]

    def holds(self, trial: int, state: int, where: str) -> bool:
        """Return whether the state is known and this place holds it whole."""
        return where in self.where(trial, state)

    def where(self, trial: int, state: int) -> Collection[str]:
        """Return every place that holds the state whole, in the order in which they got it."""
        entry = self._known.get(trial, {}).get(state)
        return () if entry is None else entry.places

    def states(self, trial: int) -> list[int]:
        """Return a trial's known states, oldest first."""
        return sorted(self._known.get(trial, ()))

    def states_at(self, where: str) -> Collection[State]:
        """Return the states that this place holds whole."""
        return self._whole.get(where, ())

    def share(self, trial: int, state: int, where: str) -> float:
        """Return the share of the state's segments that this place already has."""
        segments = self._known[trial][state].segments
        there = self._at.get(where, {})
        return sum(map(there.__contains__, segments)) / len(segments)

    def check(self, written: Iterable[tuple[int, int, str]]) -> None:
        """Raise AssertionError if an index is not what the places of the known states give.

        ``written`` has (trial, state, place) of each state that is being written to the store.
        """
        segments: dict[str, int] = {}
        writers: dict[str, int] = {}
        for trial, state, place in written:
            writers[place] = writers.get(place, 0) + 1
            for segment in self._known[trial][state].segments:
                segments[segment] = segments.get(segment, 0) + 1
        assert self._written == segments, f"{self._written} are written, and not {segments}"
        assert self._writers == writers, f"{self._writers} write, and not {writers}"
        whole: dict[str, set[State]] = {}
        counts: dict[str, dict[str, int]] = {}
        for trial, known in self._known.items():
            for state, entry in known.items():
                for place in entry.places:
                    whole.setdefault(place, set()).add((trial, state))
                    there = counts.setdefault(place, {})
                    for segment in entry.segments:
                        there[segment] = there.get(segment, 0) + 1
        kept = {place: set(states) for place, states in self._whole.items() if states}
        assert kept == whole, f"places hold {whole}, and the index says {kept}"
        for place, there in self._at.items():
            named = {segment: count for segment, count in there.items() if count}
            assert named == counts.get(place, {}), f"{place} counts {named} for its segments"
            left = there.keys() - named.keys()
            assert left <= self._frozen, f"{place} keeps {left}, which no state there names"


def _uncount(counts: dict[str, int], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
