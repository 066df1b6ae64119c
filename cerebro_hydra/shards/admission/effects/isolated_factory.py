"""Lets each call of a factory find the settings that there were before the first one.

A factory may set what all trials of its process see for some trials alone, such as `if
params["frozen"]: CFG.frozen = True`. For the others it is what a process of their own would have.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Self

from cerebro_hydra.shards.admission.effects.as_built import MOST_ITEMS
from cerebro_hydra.shards.admission.effects.filled_caches import ABSENT, Variable
from cerebro_hydra.shards.admission.effects.held_state import (
    are_settings,
    package_of,
    read_factory,
)
from cerebro_hydra.shards.admission.effects.named_by_code import (
    attributes_set,
    constant_texts,
    globals_set,
    is_own,
    names_read_before_set,
)
from cerebro_hydra.shards.admission.effects.object_reader import ObjectReader
from cerebro_hydra.shards.admission.effects.readings import is_of_process
from cerebro_hydra.shards.admission.effects.shared_values import variables_of

_FLAGS = (bool, type(None), type(ABSENT))
_CODE = (type, types.ModuleType, types.FunctionType)


class IsolatedFactory:
    """Calls a factory with the variables that its code names as before the first call.

    What says that something is done stays: a flag, or what was None, at which the code that sets it
    looks before, as where something can be registered only once. An object that has numbers and
    texts alone is made again, as where settings are made by whoever asks first.

    As a context it gives all of it back at the end, too.

    Args:
        factory: was not called yet.
    """

    def __init__(self, factory: Callable[..., Any]) -> None:
        self.factory = factory
        reader = self._reader = ObjectReader({}, {package_of(factory)})
        with suppress(Exception):  # of what can't be read the rest is known
            read_factory(reader, factory)
            reader.read_code()
        self._before = [
            (variable, variable.value)
            for path, variable in variables_of(reader).items()
            if is_of_process(path) and not isinstance(variable.owner, list)
        ]
        self._names = [(held, {*_names(held)}) for held in self._holders()]

    def __call__(self, params: Any) -> Any:
        """Call the factory."""
        self.give_back()
        modules = set(sys.modules)
        built = self.factory(params)
        if any(map(is_own, sys.modules.keys() - modules)):
            # What one of these has set, and not the factory, is not set again.
            self._before = [
                (each, before if each.name in self._set else each.value)
                for each, before in self._before
            ]
        return built

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Let all of it be as before the first call."""
        for variable, before in itertools.chain(self._before, self._new()):
            present = variable.value
            if present is before or isinstance(present, _CODE):
                continue
            is_flag = type(before) in _FLAGS and variable.name in self._looked_at
            if is_flag and not (is_own(type(present).__module__) and are_settings(present)):
                continue
            with suppress(Exception):  # a class may refuse it
                variable.set(before)

    def _holders(self) -> Iterator[type | dict[Any, Any]]:
        yield from self._reader.classes.values()
        for path, held in self._reader.containers.items():
            if isinstance(held, dict) and is_of_process(path):
                yield held

    def _new(self) -> Iterator[tuple[Variable, object]]:
        """Yield attributes of classes and entries of dicts that were not there, with `ABSENT`."""
        for held, names in self._names:
            for name in [each for each in _names(held) if each not in names]:
                if isinstance(held, type) or name in self._reader.texts_in_code():
                    yield Variable(held, name), ABSENT

    @functools.cached_property
    def _set(self) -> frozenset[str]:
        codes = [each.__code__ for each in self._reader.own_functions()]
        names = (f(code) for code in codes for f in (attributes_set, globals_set, constant_texts))
        return frozenset[str]().union(*names)

    @functools.cached_property
    def _looked_at(self) -> frozenset[str]:
        found = (names_read_before_set(each.__code__) for each in self._reader.own_functions())
        return frozenset[str]().union(*found)


def _names(held: type | dict[Any, Any]) -> list[str]:
    """Return the names of a class's attributes, or the texts that are keys of a small dict."""
    found = [*(vars(held) if isinstance(held, type) else held)]
    names = [each for each in found if type(each) is str and not each.startswith("__")]
    return names if len(found) <= MOST_ITEMS else []
