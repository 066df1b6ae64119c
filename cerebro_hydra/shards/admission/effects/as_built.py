"""Knows what trials share as their factories have left it, and as it was before any steps.

A factory may set what all trials of its process see, for its own trial. What steps set anew there
is as it was before for trials whose steps don't.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.effects.filled_caches import MOST_ITEMS, Variable
from cerebro_hydra.shards.admission.effects.held_state import HeldState
from cerebro_hydra.shards.admission.effects.object_reader import Container, ObjectReader
from cerebro_hydra.shards.admission.effects.readings import (
    OF_CLASS,
    OF_GLOBAL,
    PART,
    KnownChanges,
    containers_of,
    is_of_process,
    name_of,
)
from cerebro_hydra.shards.admission.effects.shared_values import (
    settings_text,
    variable_at,
    variables_of,
)
from cerebro_hydra.shards.admission.effects.value_texts import (
    ATOMS,
    are_settings,
    atom_text,
    function_text,
    name_of_type,
    plain_text,
    tensor_text,
)
from cerebro_hydra.shards.cut.values import Contents


class AsBuilt:
    """Holds what trials share as a factory has left it for one: variables, entries, items.

    Args:
        readers: have read the trial, which was just built; the first one as its visits do.
        anew: what each of its steps or evaluations sets anew.

    Attributes:
        settings: what tells it, for trials of this process to be told apart.
        caches: of the user's functions that its code names.
    """

    _all: ClassVar[weakref.WeakSet[AsBuilt]] = weakref.WeakSet()
    _left: ClassVar[dict[str, set[str | int]]] = {}  # by any factory of this process
    _differ: ClassVar[set[str]] = set()  # the paths where factories have left several values
    _anew: ClassVar[dict[str, Found]] = {}  # what steps set anew, as it was before any of them
    _changed: ClassVar[dict[str, Found]] = {}  # what factories change, as it was before any of them

    def __init__(self, readers: Sequence[ObjectReader] = (), anew: Collection[str] = ()) -> None:
        variables = dict(ChainMap(*map(variables_of, readers)))
        containers = dict(ChainMap(*(each.containers for each in readers)))
        self._values = {
            path: Found.of(variables.get(path), containers.get(path))
            for path in filter(is_of_process, {**containers, **variables})
        }
        for path, before in self._changed.items():
            self._values.setdefault(path, before.again())
        self._texts = ChainMap(*(each.found for each in readers))
        self.caches = [cache for each in readers for cache in each.caches]
        self._classes = frozenset[str]().union(*(each.classes for each in readers))
        self.settings = settings_text(variables) + self._changed_texts()
        for path, found in self._values.items():
            self._note(path, found.value)
        for path in filter(is_of_process, anew):
            if readers and path not in self._anew:
                self._anew[path] = Found.at(path, readers[0])
        self._all.add(self)

    @classmethod
    def _note(cls, path: str, value: object) -> None:
        left = cls._left.setdefault(path, set())
        left.add(mark(value))
        if len(left) > 1:
            cls._differ.add(path)

    @classmethod
    def note_changes(cls, before: Mapping[str, Found]) -> None:
        """Note what a factory has just changed, as it was before any factory did."""
        for path, found in before.items():
            first = cls._changed.setdefault(path, found)
            for each in (first, found.again()):
                cls._note(path, each.value)

    @classmethod
    def _changed_texts(cls) -> tuple[tuple[str, str], ...]:
        """Return what stands now for what factories change, in this process."""
        return tuple((path, found.again().text) for path, found in sorted(cls._changed.items()))

    @classmethod
    def settings_of(cls, recipe: Recipe) -> tuple[tuple[str, str], ...]:
        """Return what tells the settings of a trial that was just built, in this process."""
        with suppress(Exception):  # admission looks at it again, and tells why it can't be read
            variables = variables_of(HeldState(recipe).read_whole())
            return settings_text(variables) + cls._changed_texts()
        return ()

    @classmethod
    @contextmanager
    def building(cls) -> Iterator[None]:
        """Let the body build a trial, and note what its factory leaves where others look.

        What steps set anew is as before them.
        """
        for found in cls._anew.values():
            with suppress(Exception):  # a class may refuse it
                found.give_back()
        known = {
            path: found.variable
            for each in cls._all
            for path, found in each._values.items()
            if found.variable is not None
        }
        before = {path: mark(variable.value) for path, variable in known.items()}
        yield
        for path, variable in known.items():
            if mark(variable.value) != before[path]:
                cls._note(path, variable.value)

    @classmethod
    def now(
        cls,
        recipe: Recipe,
        marks: Collection[str] = (),
        evaluated: Collection[str] = (),
        factory: Callable[..., Any] | None = None,
    ) -> AsBuilt:
        """Return what there is when a recipe was just built.

        Args:
            marks: those of what its trial's first steps changed; see `KnownChanges`.
            evaluated: what admission's evaluations changed.
            factory: has built it.
        """
        known, readers, held = KnownChanges(marks), list[ObjectReader](), HeldState(recipe)
        anew = known.anew | {name for name in evaluated if not known.covers(name)}
        with suppress(Exception):  # what it has can't be read, which admission has told
            readers.append(held.read_whole())
            readers += [] if factory is None else [held.read_shared(factory)]
        return cls(readers, anew)

    def of_others(self, known: KnownChanges, evaluated: Collection[str]) -> dict[str, Found]:
        """Return what other trials' factories or steps may set, as it is to be for this one.

        Args:
            known: the changes that this one's own steps make.
            evaluated: the names of what its evaluations change.
        """
        built = dict[str, Found]()
        for path in self._differ | self._changed.keys():
            found = self._values.get(path) or self._changed.get(path)
            if found is not None and known.anew.isdisjoint(containers_of(path)):
                built[path] = found.alone(lists=known.covers(path))
        anew = (
            (path, each)
            for path, each in self._anew.items()
            if path not in known.anew and name_of(path) not in evaluated
        )
        return built | {path: self._values.get(path) or before for path, before in anew}

    def has(self, path: str) -> bool:
        """Return whether the trial's code names a value, or what it is in."""
        of_class = name_of(path).partition(OF_CLASS)[2]
        if path in self._changed and path.startswith(OF_GLOBAL) and PART not in path:
            return True  # code may ask for it by its text
        return of_class in self._classes or any(each in self._texts for each in containers_of(path))

    @classmethod
    def is_known(cls, path: str, text: str) -> bool:
        """Return whether factories leave several values there, of which this is one.

        Args:
            text: what is read of the value.
        """
        known = path in cls._differ or not cls._changed.keys().isdisjoint(containers_of(path))
        return known and (
            text in cls._left.get(path, ())
            or any(each._texts.get(path) == text for each in cls._all)
        )


def mark(value: object) -> str | int:
    """Return what tells a value: its text, or which object it is, as long as that lives."""
    if _is_small_array(value):
        return tensor_text(value) if isinstance(value, Tensor) else repr(plain_text(value))
    return atom_text(value) if type(value) in ATOMS else id(value)


_told = dict[int, object]()
"""Functions and classes that are told by their ids, which no others are to get."""


def _told_for_good(value: object) -> str | int:
    """Return what tells a setting; of what else there is, such as a model, the class alone."""
    if type(value) not in ATOMS and are_settings(value):
        reader = ObjectReader({}, ())
        reader.read("", value)
        return repr(sorted(reader.found.items()))
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *itertools.chain(*sorted(value.keywords.items())))
        return repr([*map(_told_for_good, parts)])
    if isinstance(value, Tensor | np.ndarray):
        return tensor_text(value) if isinstance(value, Tensor) else repr(plain_text(value))
    if isinstance(value, types.FunctionType) and (text := _text_of_code(value)) is not None:
        return text
    if isinstance(value, types.FunctionType | type):
        _told[id(value)] = value
        return id(value)
    return atom_text(value) if type(value) in ATOMS else name_of_type(type(value))


def _text_of_code(value: types.FunctionType) -> str | None:
    """Return what tells a function by its code, None if it closes over more than plain values."""
    try:
        held = [each.cell_contents for each in value.__closure__ or ()]
    except ValueError:  # one is empty
        return None
    held += [*(value.__defaults__ or ()), *sorted((value.__kwdefaults__ or {}).items())]
    known = all(type(each) in ATOMS or isinstance(each, types.BuiltinFunctionType) for each in held)
    return f"{function_text(value)} {held}" if known else None


def _is_small_array(value: object) -> bool:
    """Return whether it has numbers that may be set in place, as weights of classes are."""
    if type(value) is Tensor:
        plain = value.device.type == "cpu" and value.layout is torch.strided and value.is_leaf
        return plain and value.numel() <= MOST_ITEMS
    is_array = isinstance(value, np.ndarray) and value.size <= MOST_ITEMS
    return is_array and not cast("np.ndarray[Any, Any]", value).dtype.hasobject


@dataclass(frozen=True)
class Found:
    """Is a variable or a container as it was found, or both, or neither.

    Args:
        value: of the variable.
        contents: of the container.
    """

    variable: Variable | None
    value: object
    held: Any = None
    contents: Contents | None = None

    @classmethod
    def at(cls, path: str, reader: ObjectReader) -> Found:
        """Return what a path names, as far as one can see.

        Args:
            reader: has read what there is.
        """
        return cls.of(variable_at(path, reader), reader.containers.get(path))

    @classmethod
    def of(cls, variable: Variable | None, held: Container | None) -> Found:
        """Return what a variable and a container have now, of a large one nothing."""
        if _is_small_array(held) or (held is not None and len(held) > MOST_ITEMS):
            held = None
        value = None if variable is None else variable.value
        if held is None and _is_small_array(value):
            return cls(variable, value, value, Contents.of(value))
        return cls(variable, value, held, None if held is None else Contents.of(held))

    def again(self) -> Found:
        """Return what there is now in the same place."""
        return self.of(self.variable, self.held)

    def alone(self, lists: bool = False) -> Found:
        """Return the same without what a dict has, whose entries are known by themselves.

        Args:
            lists: without what any container has.
        """
        of_array = self.contents is not None and self.contents.block is not None
        if of_array or not (lists or isinstance(self.held, dict)):
            return self
        return replace(self, held=None, contents=None)

    def is_set_by(self, names: Collection[str]) -> bool:
        """Return whether it is a variable by one of these names."""
        return self.variable is not None and self.variable.name in names

    @property
    def text(self) -> str:
        """Return what tells it in this process, where what it is told by stays alive."""
        items = () if self.contents is None else self.contents.values()
        return f"{_told_for_good(self.value)} {[*map(_told_for_good, items)]}"

    @property
    def is_other(self) -> bool:
        """Return whether settings say something else now."""
        return self.text != self.again().text

    @property
    def is_there(self) -> bool:
        """Return whether it is as it was."""
        same = self.variable is None or mark(self.variable.value) == mark(self.value)
        return same and (self.contents is None or Contents.of(self.held).is_same(self.contents))

    def give_back(self) -> None:
        """Let it be as it was."""
        if self.variable is not None and self.variable.value is not self.value:
            self.variable.set(self.value)
        if self.contents is not None and not Contents.of(self.held).is_same(self.contents):
            self.contents.fill(self.held)
