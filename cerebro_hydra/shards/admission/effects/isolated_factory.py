"""Lets each call of a factory find the settings that there were before the first one.

A factory may set what all trials of its process see for some trials alone, such as `if
params["frozen"]: CFG.frozen = True`. For the others it is what a process of their own would have.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from cerebro_hydra.recipe.module_origins import is_own
from cerebro_hydra.shards.admission.effects.as_built import AsBuilt, Found
from cerebro_hydra.shards.admission.effects.filled_caches import (
    ABSENT,
    MOST_ITEMS,
    Cache,
    Variable,
    forget_by_settings,
    is_settings_object,
    kept_results,
    settings_kept,
)
from cerebro_hydra.shards.admission.effects.held_state import package_of, read_factory
from cerebro_hydra.shards.admission.effects.named_by_code import (
    attributes_set,
    constant_texts,
    globals_set,
    modules_named,
    names_read_before_set,
    owners_set,
)
from cerebro_hydra.shards.admission.effects.object_reader import ObjectReader
from cerebro_hydra.shards.admission.effects.readings import (
    OBJECT,
    OF_CLASS,
    OF_GLOBAL,
    PART,
    is_of_process,
)
from cerebro_hydra.shards.admission.effects.shared_values import variables_of
from cerebro_hydra.shards.admission.effects.value_texts import (
    ATOMS,
    PLAIN,
    are_settings,
    module_of,
)

_FLAGS = (bool, type(None), type(ABSENT))
_CODE = (type, types.ModuleType, types.FunctionType)
_OF_PROCESS = random.random.__self__, np.random.mtrand._rand  # type: ignore[attr-defined]
"""The generators of Python and NumPy that functions of their modules draw from."""

_LARGE = 1 << 24
"""Bytes of a tensor that each call of a factory need not make again."""


class IsolatedFactory:
    """Calls a factory with what its code names as before the first call.

    That is variables, what containers, objects and classes have there, what cached functions keep
    of settings, and what functions set of installed modules, as far as factories have changed it,
    and the variables that training has changed, too.

    A flag at which the code that sets it looks before is as before, too, so that what it says is
    done is done again. It stays where a second time fails. What was None stays if it is a model, a
    large tensor or an object of an installed package, such as one that can be made only once.

    As a context it gives all of it back at the end, too.

    Args:
        factory: was not called yet.

    Attributes:
        has_imported: whether the last call has imported modules of the user's.
    """

    def __init__(self, factory: Callable[..., Any]) -> None:
        self.has_imported = False
        self.factory = self.__wrapped__ = factory
        reader = self._reader = ObjectReader({}, {package_of(factory)})
        with suppress(Exception):  # of what can't be read the rest is known
            read_factory(reader, factory)
            reader.read_code()
        variables, containers = variables_of(reader), reader.containers
        self._before = {
            path: Found.of(variables.get(path), containers.get(path)).alone()
            for path in filter(is_of_process, {**containers, **variables})
        }
        self._holders = [*_holders(reader, variables)]
        for told, kind in reader.classes.items():  # methods and classes among its attributes, too
            for name, value in vars(kind).items():
                if not name.startswith("__"):
                    path = f"attribute {name!r}{OF_CLASS}{told}"
                    self._before.setdefault(path, Found(Variable(kind, name), value))
        for function in reader.own_functions():
            for path, found in _set_by(function):
                self._before.setdefault(path, found)
        self._kept = [len(kept_results(function)) for function in reader.caches]
        self._of_modules = dict[str, Found]()
        for path, variable in variables.items():
            if isinstance(variable.value, nn.Module) and is_of_process(path):
                self._of_modules |= dict(_of_module(path, variable.value))
        self._before |= self._of_modules
        self._touched = set[str]()  # what any call has changed
        self._stays = set[str]()  # the names of flags without which a call has failed
        held = {id(each.value): each.value for each in variables.values()}
        self._generators = [*filter(None, map(_generator_kept, held.values()))]

    def __call__(self, params: Any) -> Any:
        """Call the factory."""
        flags = self.give_back()
        modules = set(sys.modules)
        before = {path: found.again() for path, found in {**self._before, **self._new()}.items()}
        built = self._called(params, flags)
        new = sys.modules.keys() - modules
        # Some that are installed make modules that have no place.
        self.has_imported = any(is_own(name) and not name.startswith("_") for name in new)
        if self.has_imported:
            # What one of these has set, and not the factory, is not set again.
            self._before = {
                path: found if found.is_set_by(self._set) else found.again()
                for path, found in self._before.items()
            }
        for path, found in _set_in_caches(self._reader.caches):
            if path in self._before or found.is_other:
                self._before[path] = before[path] = found
        changed = {path for path, found in before.items() if not found.is_there}
        changed |= {path for path in self._new() if path not in before}
        if self.has_imported:
            changed = {path for path in changed if self._at(path).is_set_by(self._set)}
        self._touched |= changed
        AsBuilt.note_changes({p: self._at(p) for p in changed if p not in self._of_modules})
        return built

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back()

    def _called(self, params: Any, flags: Mapping[str, tuple[Variable, object]]) -> Any:
        """Call the factory; if it fails, see whether it does so because something was done before.

        Args:
            flags: what was given back, each with what it said.
        """
        drawn = _Drawn.so_far()
        try:
            return self.factory(params)
        except Exception:
            if not flags:
                raise
            self.give_back()
            for variable, value in flags.values():
                variable.set(value)
            drawn.give_back()
            built = self.factory(params)
            self._stays.update(flags)
            return built

    def give_back(self) -> dict[str, tuple[Variable, object]]:
        """Let all of it be as before the first call.

        Returns:
            the flags among it by their names, each with what it said.
        """
        of_all = {**self._before, **self._new()}.items()
        changed = [e for path, e in of_all if not e.is_there and self._goes_back(path, e)]
        flags = {
            str(each.variable.name): (each.variable, each.variable.value)
            for each in changed
            if each.variable is not None and type(each.value) in _FLAGS
        }
        _give_back(changed)
        for generator in self._generators:
            generator()
        if changed:
            forget_by_settings(self._reader.caches)
        for function in self._reader.caches:
            results = [each for _, each in kept_results(function)]
            if changed and not any(map(_is_for_all, results)) and not settings_kept(function):
                function.cache_clear()  # it may have used what has changed, or set something
        _give_back(found for _, found in _set_in_caches(self._reader.caches) if found.is_other)
        return flags

    @property
    def has_left(self) -> bool:
        """Return whether calls have left something that stays for later ones."""
        of_all = {**self._before, **self._new()}.items()
        stays = any(not (e.is_there or self._goes_back(path, e)) for path, e in of_all)
        return stays or any(len(kept_results(e)) > n for e, n in self._results())

    def undo(self) -> None:
        """Let all of it be as before the first call, also what says that something is done."""
        _give_back([each for each in {**self._before, **self._new()}.values() if not each.is_there])
        for function, known in self._results():
            if len(kept_results(function)) > known:
                function.cache_clear()

    def _results(self) -> Iterator[tuple[Cache[Any], int]]:
        """Yield the cached functions, each with the number of results before the first call."""
        return zip(self._reader.caches, self._kept, strict=True)

    def take_back(self, left: LeftSettings) -> None:
        """Let what calls have changed be as before the first one, where it is as they have left it.

        Args:
            left: what they have left.
        """
        there = [path for path, found in left.found.items() if found.is_there]
        _give_back([self._at(path) for path in there])
        forget_by_settings(self._reader.caches)

    def left(self) -> LeftSettings:
        """Return what calls have changed, as the last one has left it."""
        found = {path: self._at(path).again() for path in sorted(self._touched)}
        return LeftSettings(found, self._reader.caches)

    def _at(self, path: str) -> Found:
        """Return what a path had before the first call."""
        return self._before.get(path) or self._new()[path]

    def _goes_back(self, path: str, found: Found) -> bool:
        variable, before = found.variable, found.value
        if variable is None:
            return path in self._touched
        present = variable.value
        if variable.name in self._stays:
            return False
        if type(before) in _FLAGS and variable.name in self._looked_at:
            return not _is_for_all(present)
        if path in self._touched:
            return True
        if isinstance(variable.owner, list) or isinstance(present, _CODE):
            return False
        is_known = before is not ABSENT or isinstance(variable.owner, type)
        return is_known or variable.name in self._reader.texts_in_code()

    def _new(self) -> dict[str, Found]:
        """Return what was not there at first: attributes, entries, and globals that code sets."""
        found = dict[str, Found]()
        for holder in self._holders:
            for name in holder.names():
                if name not in holder.known and (holder.any_name or name in self._set):
                    variable = Variable(holder.owner, name)
                    found[holder.path_of(name)] = Found(variable, ABSENT)
        return found

    @functools.cached_property
    def _set(self) -> frozenset[str]:
        codes = [each.__code__ for each in self._reader.own_functions()]
        names = (f(code) for code in codes for f in (attributes_set, globals_set, constant_texts))
        return frozenset[str]().union(*names)

    @functools.cached_property
    def _looked_at(self) -> frozenset[str]:
        found = (names_read_before_set(each.__code__) for each in self._reader.own_functions())
        return frozenset[str]().union(*found)


class _Drawn(NamedTuple):
    """Tells where the global generators of random numbers stand."""

    torch: Tensor
    numpy: dict[str, Any]
    python: tuple[Any, ...]

    @classmethod
    def so_far(cls) -> Self:
        return cls(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())

    def give_back(self) -> None:
        """Let them stand there again."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def _set_in_caches(caches: Iterable[Cache[Any]]) -> Iterator[tuple[str, Found]]:
    """Yield what cached functions keep of settings, as each of them makes it anew."""
    for function in caches:
        for arguments, made in settings_kept(function):
            call = f"{function.__qualname__}({', '.join(map(repr, arguments))})"
            drawn, anew = _Drawn.so_far(), made
            with suppress(Exception):  # as where a file is gone
                anew = function.__wrapped__(*arguments)
            drawn.give_back()
            for told, found in _set_in(made, anew):
                yield f"{OF_GLOBAL}{call + told!r} of {function.__module__}", found


def _set_in(made: Any, anew: Any) -> Iterator[tuple[str, Found]]:
    """Yield the entries or attributes of settings, and of settings in them, as others have them."""
    is_dict = isinstance(made, dict)
    holder, other = (made, anew) if is_dict else (vars(made), vars(anew))
    for name in {**other, **holder}:
        told = f"[{name!r}]" if is_dict else f".{name}"
        value, before = holder.get(name, ABSENT), other.get(name, ABSENT)
        if type(value) is type(before) and is_settings_object(value):
            for behind, found in _set_in(value, before):
                yield told + behind, found
        else:
            yield told, Found(Variable(holder, name), before)


def _generator_kept(value: Any) -> Callable[[], object] | None:
    """Return what lets a generator of random numbers stand where it does now, None for others."""
    if any(value is each for each in (torch.default_generator, *_OF_PROCESS)):
        return None  # it is seeded for each build
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    return partial(value.setstate, value.getstate()) if isinstance(value, random.Random) else None


def _set_by(function: types.FunctionType) -> Iterator[tuple[str, Found]]:
    """Yield what a function may set of modules and of installed classes, as it is now."""
    names = globals_set(function.__code__)
    places: list[tuple[Any, str, str]] = [
        (function.__globals__, name, module_of(function)) for name in names
    ]
    for owner, name in owners_set(function):
        if isinstance(owner, types.ModuleType):
            places.append((vars(owner), name, owner.__name__))
        elif isinstance(owner, type) and not is_own(owner.__module__):
            places.append((owner, name, f"{owner.__module__}.{owner.__qualname__}"))
    for holder, name, place in places:
        yield f"{OF_GLOBAL}{name!r} of {place}", Found.of(Variable(holder, name), None)


def _is_for_all(value: Any) -> bool:
    """Return whether it is too much for each trial to have one, or can't be made twice."""
    if type(value) in ATOMS or isinstance(value, _CODE):
        return False
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes > _LARGE
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, dict | list | tuple | set):
        held = value.values() if isinstance(value, dict) else value
        return len(value) > MOST_ITEMS or any(map(_is_for_all, held))
    if is_own(type(value).__module__):
        held = getattr(value, "__dict__", {}).values()
        return any(isinstance(e, Tensor | nn.Module) and _is_for_all(e) for e in held)
    return not are_settings(value)


def _of_module(path: str, module: nn.Module) -> Iterator[tuple[str, Found]]:
    """Yield the settings of the layers of a module, and whether its parameters are trained."""
    for place, layer in module.named_modules():
        of_layer = ((name, Variable(vars(layer), name)) for name in vars(layer))
        for name, variable in of_layer:
            if type(variable.value) in PLAIN and name != "training" and not name.startswith("_"):
                yield f"{path}{PART}.{place}{PART}.{name}", Found(variable, variable.value)
    for name, parameter in module.named_parameters():
        found = Found(Variable(parameter, "requires_grad"), parameter.requires_grad)
        yield f"{path}{PART}.{name}{PART}.requires_grad", found


@dataclass(frozen=True)
class LeftSettings:
    """Holds what a factory has set for one model, which computes with it.

    Args:
        found: by path.
        caches: of functions, which may have been given settings.
    """

    found: Mapping[str, Found]
    caches: Sequence[Cache[Any]] = ()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let it be there while the body runs."""
        before = [each.again() for each in self.found.values()]
        self._give_back(self.found.values())
        try:
            yield
        finally:
            self._give_back(before)

    def _give_back(self, found: Collection[Found]) -> None:
        if not all(each.is_there for each in found):
            _give_back(found)
            forget_by_settings(self.caches)


def _give_back(found: Iterable[Found]) -> None:
    for each in found:
        with suppress(Exception):  # a class may refuse it
            each.give_back()


@dataclass(frozen=True)
class _Holder:
    """Has attributes or entries by names, to which factories may add some.

    Args:
        form: of the path of one, whose name stands in the place of {}.
        known: the names that are there at first.
        any_name: of what counts, not only those that code sets.
    """

    form: str
    owner: type | dict[Any, Any]
    known: frozenset[Any] = frozenset()
    any_name: bool = True

    def names(self) -> list[Any]:
        """Return the names, of a large dict none."""
        found = [*(vars(self.owner) if isinstance(self.owner, type) else self.owner)]
        own = (each for each in found if not str(each).startswith("__"))
        return [*own] if len(found) <= MOST_ITEMS or not self.any_name else []

    def path_of(self, name: Any) -> str:
        """Return the path of what it has by a name."""
        return self.form.replace("{}", str(name)).replace("{!r}", repr(name))


def _holders(reader: ObjectReader, variables: Mapping[str, Variable]) -> Iterator[_Holder]:
    """Yield the classes, dicts, objects and modules that were read."""
    found = [_Holder(f"attribute {{!r}}{OF_CLASS}{told}", e) for told, e in reader.classes.items()]
    for path, held in reader.containers.items():
        if isinstance(held, dict) and is_of_process(path):
            found.append(_Holder(f"{path}{PART}[{{!r}}]", held))
    for path, variable in variables.items():
        name, owner = f"{PART}.{{}}", getattr(variable.value, "__dict__", None)
        if isinstance(owner, dict) and reader.found.get(path, "").startswith(OBJECT):
            found.append(_Holder(path + name, owner))
        if path.startswith(OF_GLOBAL) and PART not in path and isinstance(variable.owner, dict):
            form = f"{OF_GLOBAL}{{!r}} of{path.rpartition(' of')[2]}"
            found.append(_Holder(form, variable.owner, any_name=False))
    for module in {e for function in reader.own_functions() for e in modules_named(function)}:
        form = f"{OF_GLOBAL}{{!r}} of {module.__name__}"
        found.append(_Holder(form, vars(module), any_name=False))
    for each in {id(each.owner): each for each in found}.values():
        yield replace(each, known=frozenset(each.names()))
