"""Finds what the trials of a process share and each step sets anew, before it reads it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from cerebro_hydra.shards.admission.effects.filled_caches import Variable
from cerebro_hydra.shards.admission.effects.held_state import SetBefore
from cerebro_hydra.shards.admission.effects.object_reader import ObjectReader
from cerebro_hydra.shards.admission.effects.readings import (
    PART,
    containers_of,
    entry_of,
    is_of_process,
    told,
)

_MOST = 16  # values that are tried
_KEY = "\0"  # of an entry that no code has made


def set_anew(
    reader: ObjectReader, changed: Collection[str], run: Callable[[], list[str]]
) -> set[str]:
    """Return the paths of shared values with which no run computes unless it has set them itself.

    Args:
        reader: has read the values.
        changed: the paths of those that steps have changed.
        run: takes a step and evaluates; it returns what that gave, and nothing if it fails.
    """
    found: set[str] = set()
    places = list(itertools.islice(_places(reader, changed), _MOST))
    plain = run() if places else []
    for path, place in places if plain else ():
        if found.isdisjoint(containers_of(path)):
            place.put(stand_in := SetBefore(told(path)))
            if run() == plain and not place.has(stand_in):
                found.add(path)
            place.give_back()
    return found


def _places(reader: ObjectReader, changed: Collection[str]) -> Iterator[tuple[str, _Place]]:
    """Yield what code sets, and the lists and dicts of which steps have changed what they hold."""
    for path in sorted(reader.set_by_code()):
        container = reader.containers.get(path.rpartition(PART)[0])
        if (variable := reader.variables.get(path)) is not None:
            yield path, _Value(variable)
        elif isinstance(container, dict) and (key := entry_of(path)) in container:
            yield path, _Value(Variable(container, str(key)))
    for path in sorted({each.rpartition(PART)[0] for each in changed}):
        if is_of_process(path) and (held := reader.containers.get(path)) is not None:
            yield path, _Items(held)


class _Value:
    """Lets a variable or an entry have another value for a while."""

    def __init__(self, variable: Variable) -> None:
        self._variable, self._before = variable, variable.value

    def put(self, value: object) -> None:
        self._variable.set(value)

    def has(self, value: object) -> bool:
        return self._variable.value is value

    def give_back(self) -> None:
        self._variable.set(self._before)


class _Items:
    """Lets a list or a dict have one more item for a while."""

    def __init__(self, held: dict[Any, Any] | list[Any] | deque[Any]) -> None:
        self._held, self._before = held, held.copy()

    def put(self, value: object) -> None:
        if isinstance(self._held, dict):
            self._held[_KEY] = value
        else:
            self._held.append(value)

    def has(self, value: object) -> bool:
        items = self._held.values() if isinstance(self._held, dict) else self._held
        return any(each is value for each in items)

    def give_back(self) -> None:
        self._held.clear()
        if isinstance(self._held, dict):
            self._held.update(self._before)
        else:
            self._held.extend(self._before)


_Place = _Value | _Items
