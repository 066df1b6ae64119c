"""Compares readings of what objects hold, value by value; `ObjectReader` makes them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

PART = "\0"
"""Parts the components of a path."""

Reading = dict[str, str]
"""What stands for each value, by its path."""

CACHED = f"{PART}.cache"
"""Comes before what `functools` keeps of a function's results, which may come and go, and stands
for whether it keeps any."""

NOTHING = "None"
"""What is read of None."""

CONTAINER = "<"
"""Begins what is read of a container."""

OBJECT = "object "
"""Begins what is read of an object with attributes."""

ITERATING = "generator "
"""Begins what is read of the frame of a generator function."""

GENERATOR = "a generator of random numbers "
"""Begins what is read of one."""

OF_GLOBAL, OF_CLASS, OF_ENVIRONMENT = "global variable ", " of class ", "environment variable "
"""Begin, or are in, the names of what belongs to its process."""

_GROWING = ("dict", "Dict", "Dictionary", "Counter", "Set", "set")
"""End what is read of containers whose new entries are read as such, by the names of types."""

_LISTS = ("list ", "collections.deque ")
"""Begin what is read of containers whose entries have no keys of their own."""

_TENSORS = ("tensor torch.", "ndarray ")
_FUNCTIONS = ("function ", "builtin_function_or_method ", "torch.dtype ")
_MADE = (
    "float ",
    "bool ",
    "int ",
    "str ",
    "enum ",
    *_TENSORS,
    *_FUNCTIONS,
)  # what the first step may make
_ATTRIBUTES = ("attribute ", "buffer ", "method ")
_FIXED = (".defaults", ".keywords")  # of functions

_SHARED = (" of the loss", " of loss ", " of the collate")
_COUNTING = ("int ", f"{CONTAINER}list ", f"{CONTAINER}collections.deque ", "count(", ITERATING)
"""Begin what is read of a value that counts, if a step changes it."""
_TURNING = ("bool ", f"{CONTAINER}tuple ", "int64 ", "int32 ", "int16 ", "int8 ", "uint")
"""Begin it likewise, if each step does; one may set a flag."""


def is_of_process(path: str) -> bool:
    """Return whether a value belongs to its process, so that other trials may change it, too."""
    name = name_of(path)
    return name.startswith((OF_GLOBAL, OF_ENVIRONMENT)) or OF_CLASS in name


def is_shared(path: str) -> bool:
    """Return whether trials may share what has a value, so that their first steps found it."""
    return is_of_process(path) or any(holder in name_of(path) for holder in _SHARED)


def containers_of(path: str) -> Iterator[str]:
    """Yield the paths of what a value is in, and its own."""
    end = path.find(PART)
    while end >= 0:
        yield path[:end]
        end = path.find(PART, end + 1)
    yield path


AS = "as "
"""Begins what a reading has of an object that it has met by another path, which follows."""


def name_of(path: str) -> str:
    """Return the name that a path begins with."""
    return path.partition(PART)[0]


def told(path: str) -> str:
    """Return a path in words: the name, and where in it the value is."""
    name, *parts = path.split(PART)
    return f"{name} at {''.join(parts)}" if parts else name


def attribute_of(path: str) -> str | None:
    """Return the name of the attribute that a path ends with, None if it ends with another part."""
    whole, _, last = path.rpartition(PART)
    if whole:
        return last[1:] if last.startswith(".") else None
    return last.split("'")[1] if last.startswith(_ATTRIBUTES) and "'" in last else None


def entry_of(path: str) -> str | None:
    """Return the text by which a dict has the value that a path ends with, None for any other."""
    last = path.rpartition(PART)[2]
    return last[2:-2] if last.startswith("['") and last.endswith("']") else None


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    """Return the paths of values that were made, deleted or changed between two readings.

    A dict has changed, too, if entries that it had and has stand in another order. A result that a
    cache has gained or lost is no change, unless it is the first one there.
    """
    found = set() if before == after else {path for path, _ in before.items() ^ after.items()}
    found = {p for p in found if _counts(p, before, after)}
    if all(map(operator.eq, before, after)):  # what only grew at its end has the old order
        return found
    was, now = _orders(before, after), _orders(after, before)
    return found | {path for path, entries in was.items() if entries != now[path]}


def _counts(path: str, before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    if path.endswith(CACHED):
        return before.get(path) == NOTHING and path in after
    return CACHED not in path or (path in before and path in after)


def _orders(reading: Mapping[str, str], other: Mapping[str, str]) -> dict[str, list[str]]:
    """Return each dict's entries that are in both readings, in their order in this one."""
    orders: dict[str, list[str]] = {}
    for path in reading:
        container, _, part = path.rpartition(PART)
        if part.startswith("[") and path in other and not is_of_process(path):
            orders.setdefault(container, []).append(part)
    return orders


class KnownChanges:
    """Tells which changes were seen in a trial's first steps, where they depended on no history.

    A container that then gained or lost entries may do so again, and its new entries may change.
    What trials share may grow though these steps did not change it, as others may have filled it
    before, unless it was still empty after them.

    Args:
        marks: a path that changed; with `MADE` as its last part, one that the first step made for
            good; with `ANEW`, one that each step sets before it computes with it, and what it then
            holds; with `ANY`, a
            container for all that is below; with `ONCE`, a list that the first step made or
            lengthened and no other changed; with `SAME`, a value there that did not change; with
            `EMPTY`, what is shared and was empty to the end; with `FILLED`, what is shared and was
            filled; with `THERE`, a shared value that code makes, which was there before these
            steps or is made in them or in evaluations.
    """

    MADE = f"{PART}!"
    ANEW = f"{PART}~"
    ANY = f"{PART}*"
    ONCE = f"{PART}["
    SAME = f"{PART}="
    EMPTY = f"{PART}0"
    FILLED = f"{PART}1"
    THERE = f"{PART}+"
    _NO_CHANGES = (MADE, ANEW, ONCE, SAME, EMPTY, FILLED, THERE)

    _filled: ClassVar[set[str]] = set()  # in the first steps of any trial of this process
    _there: ClassVar[set[str]] = set()  # at admission of any trial of this process
    _moved: ClassVar[set[str]] = set()  # likewise, of what the process has

    MOST = 256
    """Marks for one name; if there were more, everything below it is known."""

    def __init__(self, marks: Collection[str]) -> None:
        self._marks = frozenset(marks)
        self.names = frozenset(map(name_of, marks))
        """What changed, or is shared."""
        self.made = {mark.removesuffix(self.MADE) for mark in marks if mark.endswith(self.MADE)}
        """The values that the first step made, and no later one changed."""
        self.anew = {mark.removesuffix(self.ANEW) for mark in marks if mark.endswith(self.ANEW)}
        """What each step sets before it computes with it: attributes, and what trials share."""
        self._open = {mark.removesuffix(self.ANY) for mark in marks if mark.endswith(self.ANY)}
        self._once = {mark.removesuffix(self.ONCE) for mark in marks if mark.endswith(self.ONCE)}
        self._empty = {mark.removesuffix(self.EMPTY) for mark in marks if mark.endswith(self.EMPTY)}
        filled = (mark.removesuffix(self.FILLED) for mark in marks if mark.endswith(self.FILLED))
        self._filled.update(filled)
        there = (mark.removesuffix(self.THERE) for mark in marks if mark.endswith(self.THERE))
        self._there.update(there, filter(is_shared, marks))
        moved = {mark.removesuffix(self.ANY) for mark in marks if is_of_process(mark)} | self.anew
        self._moved.update(each for each in moved if not each.endswith(self._NO_CHANGES))

    def told(self, most: int) -> list[str]:
        """Return what changed, in words, the first of it."""
        changes = (mark for mark in self._marks if not mark.endswith(self._NO_CHANGES))
        paths = (mark.removesuffix(self.ANY) for mark in changes)
        return sorted(set(map(told, paths)))[:most]

    def may_grow(self, path: str, before: Reading, texts: Callable[[], Collection[str]]) -> bool:
        """Return whether a value that is new may be a cache's, which trials share.

        What code makes by one name is none, if no trial's first steps or evaluations made it.

        Args:
            before: what there was before it was made.
            texts: returns the keys that stand in the code.
        """
        if not is_shared(path):
            return False
        if path not in self._there and self._is_named(path, before, texts):
            return False
        found = self._empty.intersection(containers_of(path))
        return not found or not self._filled.isdisjoint(found)

    def _is_named(self, path: str, before: Reading, texts: Callable[[], Collection[str]]) -> bool:
        """Return whether a new value has a name of its own in an object that was there before."""
        holder = path.rpartition(PART)[0]
        if holder:
            text = before.get(holder, "")
            if attribute_of(path) is not None:
                return text.startswith(OBJECT)
            entry = entry_of(path)
            return entry is not None and text.startswith(CONTAINER) and entry in texts()
        _, of_class, kind = path.partition(OF_CLASS)
        known = not of_class or any(name_of(p).partition(OF_CLASS)[2] == kind for p in before)
        return known and attribute_of(path) is not None

    @classmethod
    def moved_by_any(cls, path: str) -> bool:
        """Return whether the first steps of any trial of this process changed what it has there."""
        return not cls._moved.isdisjoint(containers_of(path))

    @classmethod
    def shared_marks(
        cls, before: Reading, after: Reading, made_by_code: Collection[str]
    ) -> tuple[str, ...]:
        """Return the marks of what is shared, of a reading before the first steps and the last."""
        empty = _empty(after)
        # An admission empties those of functions, though others have filled them before.
        functions = {p for p, text in after.items() if p.endswith(CACHED) and text != NOTHING}
        filled = (_empty(before) - empty) | {path for path in functions if is_shared(path)}
        return (
            *(path + cls.EMPTY for path in sorted(empty)[: cls.MOST]),
            *(path + cls.FILLED for path in sorted(filled)[: cls.MOST]),
            *(path + cls.THERE for path in sorted(made_by_code)[: cls.MOST]),
        )

    def covers(self, path: str, texts: Collection[str] = ()) -> bool:
        """Return whether a change of this value was seen, or one of its kind.

        Args:
            texts: of entries by these keys nothing is known but what was seen.
        """
        if path in self._marks or not self.anew.isdisjoint(containers_of(path)):
            return True
        if not self._open or path + self.SAME in self._marks:
            return False
        parts = path.split(PART)
        for n in range(1, len(parts) + 1):
            if (container := PART.join(parts[:n])) in self._open:
                entry = "".join(parts[n : n + 1])
                return container not in self._once and entry[1:-1] not in map(repr, texts)
        return False

    @classmethod
    def marks_of(cls, readings: Iterable[Reading]) -> tuple[str, ...]:
        """Return the marks of readings, one before the first steps and one after each."""
        latest: Reading = {}
        moved: set[str] = set()
        opened: set[str] = set()
        once: set[str] = set()
        for number, reading in enumerate(readings):
            if number:
                moved |= (found := changed(latest, reading))
                both = [(path, latest.get(path), reading.get(path)) for path in found]
                now = set[str]().union(*itertools.starmap(_opened, both))
                opened |= now
                if number == 1:
                    once = {path for path in now if _is_list(reading.get(path))}
                once -= {path.rpartition(PART)[0] for path in found} if number > 1 else set()
            latest = reading
        marks: dict[str, list[str]] = {}
        for path in moved:
            marks.setdefault(name_of(path), []).append(path)
        for path in opened:
            marks.setdefault(name_of(path), []).append(path + cls.ANY)
        for path in once:
            marks.setdefault(name_of(path), []).append(path + cls.ONCE)
        below = tuple(path + PART for path in opened)
        for path in latest.keys() - moved if below else ():
            if path.startswith(below):
                marks.setdefault(name_of(path), []).append(path + cls.SAME)
        few = (m if len(m) <= cls.MOST else [n + cls.ANY] for n, m in marks.items())
        return tuple(sorted(itertools.chain.from_iterable(few)))


def _opened(path: str, before: str | None, after: str | None) -> set[str]:
    """Return the containers that are seen to change in size, or to be made, by a changed value."""
    opened = set()
    container, _, part = path.rpartition(PART)
    if container and part.startswith(("[", "{")) and None in (before, after):
        opened.add(container)
    texts = (before, after)
    if before != after and any(text and text.startswith(CONTAINER) for text in texts):
        opened.add(path)
    return opened


def _is_list(text: str | None) -> bool:
    return text is not None and text.startswith(tuple(CONTAINER + kind for kind in _LISTS))


def _empty(reading: Reading) -> set[str]:
    """Return what is shared and may grow, and has nothing yet."""
    inside = {path.rpartition(PART)[0] for path in reading}
    found = set()
    for path, text in reading.items():
        if text.startswith(CONTAINER) and text.endswith(_GROWING):
            found |= {path} - inside
        elif text == NOTHING and not path.rpartition(PART)[0].endswith(_FIXED):
            found.add(path)
    return {path for path in found if is_shared(path)}


def made_for_good(readings: Sequence[Reading]) -> set[str]:
    """Return the numbers, texts and tensors that the first step set and no other changed.

    A whole number or a text within an object is left out, as it can't be seen whether it acts.

    Args:
        readings: one before the first steps and one after each.
    """
    built, first, *later = readings
    return {
        path
        for path, text in first.items()
        if path.startswith(("attribute ", "buffer "))
        and text.startswith(_MADE)
        and built.get(path) != text
        and not (is_key(text) and path != name_of(path))
        and all(other.get(path) == text for other in later)
    }


def moved_on(made: str, after: str | None, built: str | None = None) -> bool:
    """Return whether what was made for good has another value, and not the one of before.

    A tensor of another shape is no harm, as a table that is made for larger batches.

    Args:
        built: the value in a model that was built anew, None if it has none.
    """
    if after is None or after in (made, built):
        return False
    tensors = made.startswith(_TENSORS) and after.startswith(_TENSORS)
    return not tensors or _form(made) == _form(after)


def is_key(text: str) -> bool:
    """Return whether a value may be one by which a forward looks whether a table still serves."""
    return text.startswith(("int ", "str "))


def _form(text: str) -> str:
    """Return the type and the shape of a tensor."""
    return text.rpartition(" ")[0]


def have_grown(paths: Iterable[str], before: Reading, after: Reading) -> set[str]:
    """Return which changed paths are entries that were added, or values where there were none."""
    return {path for path in paths if path not in before or before[path] == NOTHING}


def counts_of(paths: Collection[str], reading: Mapping[str, str]) -> set[str]:
    """Return which changed values are integers, lengths of lists, or places of iterators."""
    return {path for path in paths if reading.get(path, "").startswith(_COUNTING)}


def moving_of(readings: Sequence[Reading]) -> set[str]:
    """Return the values that each of two steps has changed, as one does that goes on and on.

    A float that is no whole number, a text and a tensor are left out, as steps may set them anew.

    Args:
        readings: one before the steps and one after each.
    """
    built, first, second = readings
    moved = changed(built, first) & changed(first, second)
    turned = {path for path in moved if second.get(path, "").startswith(_TURNING)}
    counted = {path for path in moved if all(_is_whole(each.get(path)) for each in (first, second))}
    return turned | counted


def _is_whole(text: str | None) -> bool:
    return text is not None and text.startswith("float ") and text.endswith(".0")
