"""Keeps the table of which place holds which segment.

Hops, redo, the count of bytes already there and garbage collection all read this table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

STORE = "store"

State = tuple[int, int]  # trial, visit


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
        self._known: dict[int, dict[int, _KnownState]] = {}  # by trial and visit
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

    def define(self, trial: int, visit: int, digests: Iterable[tuple[str, str]]) -> None:
        """Define the state after ``visit`` by its (frozen, trainable) digests per shard."""
        pairs = tuple(digests)
        self._frozen.update(frozen for frozen, _ in pairs)
        segments = (digest for pair in pairs for digest in pair)
        cursor = f"cursor/{trial}/{visit}"
        state = _KnownState((cursor, *dict.fromkeys(segments)), {})
        self._known.setdefault(trial, {})[visit] = state

    def fork(self, parent: int, visit: int, trial: int) -> None:
        """Define the state of a fork after ``visit`` by the segments of its parent's."""
        segments = self._known[parent][visit].segments[1:]
        state = _KnownState((f"cursor/{trial}/{visit}", *segments), {})
        self._known.setdefault(trial, {})[visit] = state

    def add(self, trial: int, visit: int, where: str) -> None:
        """Note that this place holds the state whole."""
        state = self._known[trial][visit]
        if where in state.places:
            return
        state.places[where] = None
        self._whole.setdefault(where, {})[trial, visit] = None
        there = self._at.setdefault(where, {})
        for segment in state.segments:
            there[segment] = there.get(segment, 0) + 1

    def drop(self, trial: int, visit: int, where: str) -> tuple[str, ...]:
        """Take the state away from this place, which holds it whole; return the segments that go.

        Its frozen segments stay, and so do segments that other states there share, or that are
        being written there.
        """
        state, there = self._known[trial][visit], self._at[where]
        del state.places[where], self._whole[where][trial, visit]
        gone = []
        for segment in state.segments:
            there[segment] -= 1
            if not there[segment] and segment not in self._frozen:
                del there[segment]
                if where != STORE or segment not in self._written:
                    gone.append(segment)
        return tuple(gone[1:])  # without the cursor, which no other state has

    def recut(self, trial: int, visit: int, digests: Iterable[tuple[str, str]]) -> None:
        """Define a state anew that only the store holds, by the segments of another cut.

        The segments of the former cut stay there until files that nobody names are swept.
        """
        places = [*self.where(trial, visit)]
        assert places == [STORE], f"state {visit} of trial {trial} is at {places}"
        self.drop(trial, visit, STORE)
        self.define(trial, visit, digests)
        self.add(trial, visit, STORE)

    def begin_write(self, trial: int, visit: int, where: str) -> None:
        """Note that this place writes the state to the store, whose segments must stay there."""
        self._writers[where] = self._writers.get(where, 0) + 1
        for segment in self._known[trial][visit].segments:
            self._written[segment] = self._written.get(segment, 0) + 1

    def end_write(self, trial: int, visit: int, where: str) -> None:
        """Note that the state is written, or can't be."""
        _uncount(self._writers, where)
        for segment in self._known[trial][visit].segments:
            _uncount(self._written, segment)

    def least_busy_writer(self, trial: int, visit: int) -> str:
        """Return a place that holds the state whole, of those that write the fewest states now."""
        return min(self._known[trial][visit].places, key=lambda each: self._writers.get(each, 0))

    def segments(self, trial: int, visit: int) -> tuple[str, ...]:
        """Return the digests of the state's segments; none if it is not known any more."""
        state = self._known.get(trial, {}).get(visit)
        return () if state is None else state.segments[1:]

    def forget_worker(self, incarnation: str) -> None:
        """Remove everything that this incarnation held."""
        self._at.pop(incarnation, None)
        for trial, visit in self._whole.pop(incarnation, ()):
            del self._known[trial][visit].places[incarnation]

    def forget_state(self, trial: int, visit: int) -> None:
        """Remove a state that no place holds any more; it must not be named again."""
        del self._known[trial][visit]

    def holds(self, trial: int, visit: int, where: str) -> bool:
        """Return whether the state is known and this place holds it whole."""
        return where in self.where(trial, visit)

    def where(self, trial: int, visit: int) -> Collection[str]:
        """Return every place that holds the state whole, in the order in which they got it."""
        state = self._known.get(trial, {}).get(visit)
        return () if state is None else state.places

    def visits(self, trial: int) -> list[int]:
        """Return the visits of a trial's known states, oldest first."""
        return sorted(self._known.get(trial, ()))

    def states_at(self, where: str) -> Collection[State]:
        """Return the states that this place holds whole."""
        return self._whole.get(where, ())

    def share(self, trial: int, visit: int, where: str) -> float:
        """Return the share of the state's segments that this place already has."""
        segments = self._known[trial][visit].segments
        there = self._at.get(where, {})
        return sum(map(there.__contains__, segments)) / len(segments)

    def check(self, written: Iterable[tuple[int, int, str]]) -> None:
        """Raise AssertionError if an index is not what the places of the known states give.

        ``written`` has (trial, visit, place) of each state that is being written to the store.
        """
        segments: dict[str, int] = {}
        writers: dict[str, int] = {}
        for trial, visit, place in written:
            writers[place] = writers.get(place, 0) + 1
            for segment in self._known[trial][visit].segments:
                segments[segment] = segments.get(segment, 0) + 1
        assert self._written == segments, f"{self._written} are written, and not {segments}"
        assert self._writers == writers, f"{self._writers} write, and not {writers}"
        whole: dict[str, set[State]] = {}
        counts: dict[str, dict[str, int]] = {}
        for trial, known in self._known.items():
            for visit, state in known.items():
                for place in state.places:
                    whole.setdefault(place, set()).add((trial, visit))
                    there = counts.setdefault(place, {})
                    for segment in state.segments:
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
