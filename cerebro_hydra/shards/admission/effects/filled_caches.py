"""Takes out of caches what the first steps of a trial have filled them with, or fills them more."""

from __future__ import annotations

import functools
import gc
import itertools
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cerebro_hydra.shards.admission.effects.readings import containers_of
from cerebro_hydra.shards.admission.effects.value_texts import are_settings
from cerebro_hydra.shards.cut.values import Contents

Cache = functools._lru_cache_wrapper

MOST_ITEMS = 1000
"""Of a container or an array with more items nothing is given back."""


def kept_results(cache: Cache[Any]) -> list[tuple[Any, Any]]:
    """Return the keys and results that a cached function has now, in no order that tells.

    A key is a single number or text, or a sequence of arguments. The list is empty if this Python
    keeps them in another way.
    """
    parts: list[Any] = gc.get_referents(cache)
    size = cache.cache_info().currsize
    own = vars(cache)
    (kept,) = [e for e in parts if type(e) is dict and e is not own and len(e) == size][:1] or [{}]
    if cache.cache_info().maxsize is None:
        return list(kept.items())
    # A cache with a limit has them as links of a list, each a key and its result.
    links = type(next(iter(kept.values()), None))
    flat = [each for each in parts if each is not type(cache) and each is not links]
    pairs = list(zip(flat[: 2 * size : 2], flat[1 : 2 * size : 2], strict=False))
    try:
        return pairs if len(pairs) == size and all(key in kept for key, _ in pairs) else []
    except TypeError:  # what stands there is no key
        return []


Growing = MutableMapping[Any, Any] | set[Any]
"""Has entries by keys, or members, of which steps may add some."""

Items = list[Any] | deque[Any]
"""Has items in an order, to which steps may add some."""

ABSENT = object()
"""Stands for a variable that its owner does not have."""


@dataclass(frozen=True)
class Variable:
    """Is an attribute of an object or a class, a global variable, an item, or one of a closure.

    Args:
        owner: has it: a mapping, a cell, a class, a list, or an object with slots.
        name: by which a mapping has it; the number of an item.
    """

    owner: Any
    name: Any

    def set(self, value: object) -> None:
        """Give it a value, or let its owner have it no more."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, list):
            self.owner[self.name : self.name + 1] = [] if value is ABSENT else [value]
        elif isinstance(self.owner, type) and value is ABSENT:
            type.__delattr__(self.owner, self.name)
        elif isinstance(self.owner, type):
            type.__setattr__(self.owner, self.name, value)
        elif isinstance(self.owner, Tensor):
            setattr(self.owner, self.name, value)
        elif not isinstance(self.owner, MutableMapping):
            object.__setattr__(self.owner, self.name, value)  # also of a frozen one
        elif value is ABSENT:
            self.owner.pop(self.name, None)
        else:
            self.owner[self.name] = value

    @property
    def value(self) -> object:
        """Return its value."""
        if isinstance(self.owner, types.CellType):
            return self.owner.cell_contents
        if isinstance(self.owner, list):
            return next(iter(self.owner[self.name :]), ABSENT)
        if isinstance(self.owner, type):
            return vars(self.owner).get(self.name, ABSENT)
        if isinstance(self.owner, MutableMapping):
            return self.owner.get(self.name, ABSENT)
        return getattr(self.owner, self.name, ABSENT)


class FilledCaches:
    """Takes out of caches what they were filled with, for a while.

    Args:
        functions: those with a cache; what they are asked for again, they compute again.
        containers: dicts and sets, by path.
        known: the keys that each had before, by path.
        written: says of a path whether code writes there, so that its first entries may be of one,
            too.
        variables: those that got another value, by path, each with the one of before, or `ABSENT`.
        lists: those that became longer, each with the items of before.
    """

    def __init__(
        self,
        functions: Sequence[Cache[Any]],
        containers: Mapping[str, Growing],
        known: Mapping[str, Collection[Any]],
        written: Callable[[str], bool],
        variables: Mapping[str, tuple[Variable, object]],
        lists: Sequence[tuple[Items, Sequence[Any]]],
    ) -> None:
        self._functions = [each for each in functions if each.cache_info().currsize]
        self._containers = {
            path: _Filled(container, known.get(path, ()), written(path))
            for path, container in containers.items()
        }
        self._variables = {
            path: (variable, variable.value, before)
            for path, (variable, before) in variables.items()
        }
        self._lists = [(held, list(held), before) for held, before in lists]

    @property
    def are_filled(self) -> bool:
        """Return whether there is anything to take out."""
        return bool(self._functions or self._variables or self._lists) or self.have_entries

    @property
    def have_entries(self) -> bool:
        """Return whether there is anything to take out of the dicts and sets."""
        return any(each.is_filled for each in self._containers.values())

    def hold(self, path: str) -> bool:
        """Return whether a value is in one of the dicts."""
        return not self._containers.keys().isdisjoint(containers_of(path))

    def lack(self) -> list[str]:
        """Return the dicts and sets without an entry that they were filled with."""
        return [path for path, each in self._containers.items() if each.lacks]

    def crowd(self, paths: Collection[str]) -> None:
        """Let these dicts and sets have what they were filled with, and many entries more.

        Of many, such as rows in a list, some are taken, and first those that have grown.
        """
        grown_first = sorted(paths, key=lambda path: not self._containers[path].has_grown)
        for path in grown_first[:_MOST_CROWDED]:
            self._containers[path].set(self._containers[path].all)
            crowd(self._containers[path].container)

    def empty(self) -> None:
        """Take it out."""
        self._forget(lambda each: each.left)

    def give_back(self) -> None:
        """Let the dicts, sets and variables be as they were before."""
        self._forget(lambda each: each.before)

    def fill(self) -> None:
        """Put back what was there."""
        for each in self._containers.values():
            each.set(each.all)
        for variable, value, _ in self._variables.values():
            variable.set(value)
        for held, items, _ in self._lists:
            _set_items(held, items)

    def _forget(self, left: Callable[[_Filled], Mapping[Any, Any]]) -> None:
        for function in self._functions:
            _clear(function)
        for each in self._containers.values():
            each.set(left(each))
        for variable, _, before in self._variables.values():
            variable.set(before)
        for held, _, items in self._lists:
            _set_items(held, items)


def settings_kept(function: Cache[Any]) -> list[tuple[Sequence[Any], Any]]:
    """Return the settings that a cached function has made, with the arguments of each."""
    made = [(key, each) for key, each in kept_results(function) if is_settings_object(each)]
    calls = [(key if isinstance(key, list | tuple) else [key], each) for key, each in made]
    return [(key, e) for key, e in calls if object not in map(type, key)]  # which parts named ones


def forget_by_settings(functions: Iterable[Cache[Any]]) -> None:
    """Empty the caches of functions to which settings were given, which have changed since then."""
    for function in functions:
        keys = (key for key, _ in kept_results(function) if isinstance(key, list | tuple))
        if any(is_settings_object(part) for key in keys for part in key):
            function.cache_clear()


def _clear(function: Cache[Any]) -> None:
    """Empty the cache of a function, but for settings, which are as those are that were there."""
    made = settings_kept(function)
    function.cache_clear()
    for arguments, before in made:
        with suppress(Exception):
            Contents.of(before).fill(function(*arguments))


def is_settings_object(value: object) -> bool:
    """Return whether it has numbers, texts and code that can be set, as a program's settings do."""
    if isinstance(value, type | types.FunctionType | types.ModuleType | nn.Module | Tensor):
        return False
    return (isinstance(value, dict) or hasattr(value, "__dict__")) and are_settings(
        value, code=True
    )


def _set_items(held: Items, items: Sequence[Any]) -> None:
    held.clear()
    held.extend(items)


class _Filled:
    """Has the entries of a dict or a set that are there, that were there before, and may be left.

    A set has members as a dict has keys.
    """

    def __init__(self, container: Growing, known: Collection[Any], written: bool) -> None:
        self.container = container
        self.all = dict(container.items() if isinstance(container, MutableMapping) else ())
        self.all |= dict.fromkeys(container) if isinstance(container, set) else {}
        self.before = {key: each for key, each in self.all.items() if key in known}
        kept = {
            key: each
            for key, each in self.before.items()
            if isinstance(each, nn.Module) or is_settings_object(each)
        }
        self.left = kept if written else self.before
        self.is_filled = self.all.keys() != self.left.keys()
        self.has_grown = self.all.keys() != self.before.keys()

    @property
    def lacks(self) -> bool:
        """Return whether an entry is missing that may be taken out."""
        return self.is_filled and any(key not in self.container for key in self.all)

    def set(self, entries: Mapping[Any, Any]) -> None:
        """Let the container have these entries, in their order, if some may be taken out."""
        if self.is_filled:
            self.container.clear()
            self.container.update(entries)


_MOST_CROWDED = 16
_MANY = 1 << 14  # more entries than what counts them waits for, as a rule


def crowd(container: Growing) -> None:
    """Put many entries more into a dict or a set, such as are there, if their keys are plain."""
    keys = _more_keys(list(container))
    if isinstance(container, set):
        container.update(keys)
    else:
        container.update(zip(keys, itertools.cycle(list(container.values())), strict=False))


def _more_keys(known: Sequence[Any]) -> list[Any]:
    """Return other keys of the kind of the first one."""
    kind, number = type(known[0]) if known else None, range(1, _MANY + 1)
    if kind in (int, float):
        largest = max(key for key in known if type(key) is kind)
        return [largest + n for n in number]
    if kind is str:
        return [f"{known[0]}?{n}" for n in number]
    if kind is tuple:
        return [(first, *known[0][1:]) for first in _more_keys(known[0][:1])]
    return []
