"""Watches what the trials of a process share: global variables, attributes of classes, and more.

Where devices are small, layers of another trial may compute between two shards. What a shard leaves
there for the next one is then what the other trial has left.
"""

from __future__ import annotations

import itertools
import os
import types
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import itemgetter
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.effects.filled_caches import (
    ABSENT,
    MOST_ITEMS,
    Variable,
    kept_results,
)
from cerebro_hydra.shards.admission.effects.held_state import (
    HeldState,
    SetBefore,
    not_computed_with,
)
from cerebro_hydra.shards.admission.effects.object_reader import Container, ObjectReader
from cerebro_hydra.shards.admission.effects.readings import (
    OF_CLASS,
    OF_ENVIRONMENT,
    PART,
    KnownChanges,
    attribute_of,
    containers_of,
    entry_of,
    is_of_process,
    told,
)
from cerebro_hydra.shards.admission.effects.value_texts import (
    ATOMS,
    atom_text,
    plain_text,
    tensor_text,
)
from cerebro_hydra.shards.cut.values import Contents, held_by

_NOT_SHARED = (type, types.ModuleType, types.FunctionType, nn.Module, Optimizer)
_MOST_HELD = 500
"""Of a value with more objects nothing is given back."""

_MOST_CELLS = 8
"""Items of a list, or entries by numbers, each of which may be set as a variable is."""

_MOST, _MOST_CONTAINERS = 64, 8  # that are tried, all values at once
_KEY = "\0"  # of an entry that no code has made


def set_anew(
    reader: ObjectReader, changed: Collection[str], run: Callable[[], list[str]]
) -> set[str]:
    """Return the paths of shared values with which no run computes unless it has set them itself.

    Args:
        reader: has read the values.
        changed: the paths of those that steps have changed.
        run: takes a step and evaluates; it returns what that gave.
    """
    values, kept = dict(itertools.islice(_values(reader), _MOST)), set[str]()

    def bits(paths: Collection[str]) -> list[str]:
        stand_ins = {path: SetBefore(path) for path in paths}
        try:
            for path, stand_in in stand_ins.items():
                values[path].put(stand_in)
            found = run()
            kept.update(path for path, each in stand_ins.items() if values[path].has(each))
            return found
        finally:
            for path in paths:
                values[path].give_back()

    found = set[str]()
    with suppress(Exception):  # a step fails by itself
        found = not_computed_with(set(values), SetBefore, bits) - kept
        containers = [
            (path, items)
            for path, items in itertools.islice(_containers(reader, changed), _MOST_CONTAINERS)
            if found.isdisjoint(containers_of(path))
        ]
        plain = run() if containers else []
        for path, items in containers:
            if items.are_set_by(run, plain):
                found.add(path)
    return found


def check_evaluations(
    reader: ObjectReader, paths: Collection[str], run: Callable[[], list[str]]
) -> None:
    """Refuse evaluations that compute with what training has left of what trials share.

    Args:
        reader: has read the values.
        paths: what each step sets anew.
        run: evaluates; it returns what that gave.

    Raises:
        ConfigurationError: they do; the message names it.
    """
    if (path := _computed_with(reader, paths, run)) is not None:
        raise ConfigurationError(
            f"evaluations compute with {told(path)}, which training sets and all trials of a "
            "process share; set it in each evaluation, too, or keep it in the model"
        )


def _computed_with(
    reader: ObjectReader, paths: Collection[str], run: Callable[[], list[str]]
) -> str | None:
    """Return the first path with whose value a run computes as it finds it."""
    values = dict(_values(reader)) if paths else {}
    plain = run() if paths else []
    for path in sorted(paths):
        found = plain
        if path in values:
            values[path].put(SetBefore(path))
            try:
                found = run()
            except Exception:
                return path
            finally:
                values[path].give_back()
        elif (held := reader.containers.get(path)) is not None:
            found, _ = _Items(held).with_more(run)
        if found != plain:
            return path
    return None


def _values(reader: ObjectReader) -> Iterator[tuple[str, _Value]]:
    """Yield the variables, attributes and entries that code sets."""
    for path in sorted(reader.set_by_code()):
        variable = variable_at(path, reader)
        if variable is not None and variable.value is not ABSENT:
            yield path, _Value(variable)
    for path, held in sorted(reader.containers.items(), key=itemgetter(0)):
        if isinstance(held, dict | list) and len(held) <= _MOST_CELLS and reader.is_written(path):
            for key in [*held] if isinstance(held, dict) else range(len(held)):
                if type(key) is not str:
                    yield f"{path}{PART}[{key!r}]", _Value(Variable(held, key))


def variables_of(reader: ObjectReader) -> dict[str, Variable]:
    """Return variables, attributes of objects and classes, entries of dicts and items of lists."""
    found = {**reader.class_attributes, **reader.variables}
    for path, held in reader.containers.items():
        if len(held) <= MOST_ITEMS and isinstance(held, dict | list):
            keys = held if isinstance(held, dict) else range(len(held))
            entries = {f"{path}{PART}[{key!r}]": Variable(held, key) for key in keys}
            found |= {each: entry for each, entry in entries.items() if each in reader.found}
    names = ((p, p.split("'")[1]) for p in reader.found if p.startswith(OF_ENVIRONMENT))
    return found | {path: Variable(os.environ, name) for path, name in names}


def settings_text(variables: Mapping[str, Variable]) -> tuple[tuple[str, str], ...]:
    """Return the numbers and texts that trials share, for those to be told apart that set them."""
    values = ((p, each.value) for p, each in sorted(variables.items()) if is_of_process(p))
    return tuple((path, atom_text(value)) for path, value in values if type(value) in ATOMS)


def variable_at(path: str, reader: ObjectReader) -> Variable | None:
    """Return the variable, attribute or entry that a path names, which need not be there."""
    variables = ChainMap(reader.variables, reader.class_attributes)
    holder, attribute, key = path.rpartition(PART)[0], attribute_of(path), entry_of(path)
    container, owner = reader.containers.get(holder), None
    if holder in variables:
        owner = getattr(variables[holder].value, "__dict__", None)
    kind = reader.classes.get(path.partition(OF_CLASS)[2])
    if path in variables:
        return variables[path]
    if isinstance(container, dict) and key is not None:
        return Variable(container, key)
    if isinstance(container, dict | list) and (last := path.rpartition(PART)[2])[1:-1].isdigit():
        return Variable(container, int(last[1:-1]))
    if isinstance(owner, dict) and attribute is not None:
        return Variable(owner, attribute)
    return None if holder or kind is None or attribute is None else Variable(kind, attribute)


def _containers(reader: ObjectReader, changed: Collection[str]) -> Iterator[tuple[str, _Items]]:
    """Yield the containers of which steps have changed what they hold."""
    for path in sorted({each.rpartition(PART)[0] for each in changed}):
        if is_of_process(path) and (held := reader.containers.get(path)) is not None:
            yield path, _Items(held)


class SharedState:
    """Holds what trials share as it was before a trial, for its shards to begin with.

    What was nothing, and the first step made for good, stays: each process makes that once.

    Args:
        reader: has read it, before any step.
    """

    def __init__(self, reader: ObjectReader) -> None:
        found = {**reader.variables, **reader.class_attributes}
        self._places = {
            path: variable
            for path, variable in found.items()
            if is_of_process(path) and not isinstance(variable.value, _NOT_SHARED)
            # What objects have is given back with them.
            if PART not in path
            or reader.found.get(path.rpartition(PART)[0], "").startswith("function ")
        }
        self._noted = [self._now()]
        self._caches = reader.caches
        self._results = [{key for key, _ in kept_results(cache)} for cache in self._caches]
        self.changed: set[str] = set()
        """The names of what was given back."""

    def note(self) -> None:
        """Note what there is after a step, of the first two."""
        if len(self._noted) < 3:
            self._noted.append(self._now())

    def give_back(self) -> None:
        """Let all of it be as it was."""
        built, first, second = self._noted
        for path, place in self._places.items():
            value, *later = (each.values[path] for each in (built, first, second))
            if (value is None or value is ABSENT) and later[0] is later[1]:
                value = later[1]
            if place.value is not value:
                self.changed.add(path)
                place.set(value)
        for key, (path, holder, contents) in (second.held | built.held).items():
            later = [each.held[key][-1] for each in (first, second) if key in each.held]
            if len(later) == 2:
                contents = contents.with_made(*later)
            if not Contents.of(holder).is_same(contents):
                self.changed.add(path)
                contents.fill(holder)

    def made(self) -> Iterator[tuple[str, int, object]]:
        """Yield the path, the number of its holder, and the value of what is where nothing was.

        That is variables, attributes, entries of dicts, items of lists that were empty, and results
        that cached functions keep.
        """
        built = self._noted[0]
        for path, value in built.values.items():
            if value is None or value is ABSENT:
                yield path, 0, self._places[path].value
        for number, (path, holder, contents) in enumerate(built.held.values()):
            if isinstance(holder, dict) and len(holder) <= MOST_ITEMS:
                for key in [key for key in holder if key not in (contents.items or {})]:
                    yield f"{path}{PART}[{key!r}]", number, holder[key]
            elif isinstance(holder, list) and not contents.items and len(holder) <= MOST_ITEMS:
                yield path, number, [*holder]
            for name, each in Contents.of(holder).attributes.items():
                if contents.attributes.get(name) is None:
                    yield f"{path}{PART}.{name}", number, each
        for number, (cache, before) in enumerate(zip(self._caches, self._results, strict=True)):
            for key, each in kept_results(cache)[:MOST_ITEMS]:
                if key not in before:  # a factory has made that
                    yield f"what {cache.__qualname__} keeps{PART}[{key!r}]", number, each

    def check_made(self, made: dict[str, str], known: KnownChanges) -> None:
        """Refuse what trials make once for all that come after, if another one makes it otherwise.

        Args:
            made: what others have made, which gets what this one has.
            known: the changes that this one's first steps have made.

        Raises:
            ConfigurationError: another one does.
        """
        for path, number, value in self.made():
            if not known.anew.isdisjoint(containers_of(path)):
                continue  # each step makes it
            form, text = _table_text(value)
            if text and made.setdefault(f"{path}{PART}{number}{PART}{form}", text) != text:
                raise ConfigurationError(
                    f"the first steps of another trial make {told(path)} otherwise, and in a "
                    "process the first one that trains makes it for all; keep it in an attribute "
                    "of the model, or in a dict by what it depends on"
                )

    def restore(self) -> None:
        """Let all of it be as it was, also where nothing was: the next trial makes its own."""
        built = self._noted[0]
        for path, place in self._places.items():
            if place.value is not built.values[path]:
                place.set(built.values[path])
        for _, holder, contents in built.held.values():
            if not Contents.of(holder).is_same(contents):
                contents.fill(holder)
        for cache, results in zip(self._caches, self._results, strict=True):
            if len(kept_results(cache)) > len(results):
                cache.cache_clear()

    @property
    def told(self) -> str:
        """Return in words what other trials may do between shards, nothing if that is no harm."""
        if not self.changed:
            return ""
        return (
            "; between shards the other trials of a process may change what they share, such as "
            f"{told(min(self.changed))}: keep it in an attribute of the model"
        )

    def _now(self) -> _Noted:
        return _Noted({path: place.value for path, place in self._places.items()})


@contextmanager
def shared_kept(
    recipe: Recipe, factory: Callable[..., Any] | None = None
) -> Iterator[SharedState | None]:
    """Let what trials share be afterwards as before the body, in which a trial takes first steps.

    A flag that these set once is then there to be set by those of the next trial, as in an agent.
    The body gets what knows it, but of a trial that can't be read.

    Args:
        factory: has built the recipe; models may hold what it names.
    """
    shared, held = list[SharedState](), HeldState(recipe)
    with suppress(Exception):  # admission looks at it again, and tells why it can't be read
        shared.append(SharedState(held.read_whole()))
        shared += [] if factory is None else [SharedState(held.read_shared(factory))]
    try:
        yield shared[0] if shared else None
    finally:
        for each in shared:
            each.restore()


def _table_text(value: object) -> tuple[str, str]:
    """Return what a table has that may grow with the rows, such as shapes, and what it says.

    That is nothing of what has neither numbers that are not whole, nor tensors, nor code, or has a
    graph.
    """
    leaves, form, text = tree_leaves(value), list[str](), ""
    for each in leaves:
        if isinstance(each, Tensor) and not each.requires_grad:
            form.append(f"{each.dtype} {tuple(each.shape)}")
            text += tensor_text(each)
        elif isinstance(each, np.ndarray) and not each.dtype.hasobject:
            form.append(f"{each.dtype} {each.shape}")
            text += plain_text(each) or ""
        elif isinstance(each, float):
            text += repr(each)
        elif isinstance(each, types.FunctionType | types.BuiltinFunctionType | type):
            text += f"{each.__module__}.{each.__qualname__} "
        elif type(each) in ATOMS:
            form.append(atom_text(each))
        else:
            return "", ""
    return f"{len(leaves)} {form}", text


class _Noted:
    """Holds values, and what each container and object has to which they refer."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.held: dict[int, tuple[str, Any, Contents]] = {}
        for path, value in values.items():
            self._left = _MOST_HELD
            found = held_by(value, self._is_left_out)
            for holder, contents in found if self._left >= 0 else ():
                self.held.setdefault(id(holder), (path, holder, contents))

    def _is_left_out(self, value: Any) -> bool:
        is_data = isinstance(value, dict | list | set | deque) and len(value) > MOST_ITEMS
        self._left -= not isinstance(value, str | int | float)
        known = self._left < 0 or id(value) in self.held
        return is_data or known or isinstance(value, _NOT_SHARED)


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
    """Has one more item than a container has, for a while."""

    def __init__(self, held: Container) -> None:
        self._held, self._before = held, held.copy()
        self._more = object()

    def are_set_by(self, run: Callable[[], list[str]], plain: list[str]) -> bool:
        """Return whether a run gives the same with one item more, and has taken it away."""
        found, stays = self.with_more(run)
        return found == plain and not stays

    def with_more(self, run: Callable[[], list[str]]) -> tuple[list[str], bool]:
        """Return what a run gives with one item more, and whether it has left that."""
        found = list[str]()
        if isinstance(self._held, dict):
            self._held[_KEY] = self._more
        elif isinstance(self._held, set):
            self._held.add(self._more)
        else:
            self._held.append(self._more)
        with suppress(Exception):  # it computes with that item
            found = run()
        items = self._held.values() if isinstance(self._held, dict) else self._held
        stays = any(each is self._more for each in items)
        self._held.clear()
        if isinstance(self._held, dict | set):
            self._held.update(self._before)
        else:
            self._held.extend(self._before)
        return found, stays
