"""Chooses a cut: it turns what `shards=` asks for into unit calls, each with its reason.

A profile of a model's units has their order in a forward, their times, and what overwrites inputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.sizing.cuts import balance
from cerebro_hydra.recipe import units
from cerebro_hydra.shards.cut.spec import CutMode, CutSpec, module_of


@dataclass(frozen=True)
class CutPoints:
    """Lists the places where a model may be cut.

    Args:
        mode: how the model would be cut.
        allowed: the unit calls at which a shard may begin, in order.
        units: every unit call of the model, in order.
        overwritten: the units whose input the forward overwrites.
        written: see `CutSpec`.
        rows: the numbers of rows for each of which a graph is exported, if one does not do.
    """

    mode: CutMode
    allowed: tuple[str, ...]
    units: tuple[str, ...]
    overwritten: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()

    def spec(self, at: tuple[str, ...]) -> CutSpec:
        """Return the spec of a cut at some of these places."""
        if self.mode == "export":
            return CutSpec("export", at, (), self.overwritten, self.written, self.rows)
        return CutSpec("modules", at, self.units, self.overwritten, self.written)


@dataclass(frozen=True)
class CutChoice:
    """Holds a cut, the reason for the start of each shard, and a note on what was asked in vain."""

    spec: CutSpec
    why: tuple[str, ...]
    note: str | None = None


def choose_whole(points: CutPoints) -> CutChoice:
    """Keep the model as one shard."""
    return CutChoice(points.spec(()), ("it is the whole model",))


def choose_given(spec: CutSpec) -> CutChoice:
    """Keep the cut of another trial."""
    why = "it begins the model", *(f"it begins at {unit!r}, as its parent's" for unit in spec.at)
    return CutChoice(spec, why)


def choose_by_time(points: CutPoints, seconds: Sequence[float], number: int) -> CutChoice:
    """Choose shards that take times as equal as possible.

    Args:
        seconds: measured times between the allowed cuts, one more than there are cuts.
        number: how many shards were asked for. There are fewer if the model has fewer places.
    """
    count = min(number, len(seconds))
    note = None
    if count < number:
        note = f"{number} shards were asked for, the model has blocks with parameters for {count}"
    return choose_groups(points, seconds, balance(seconds, count), note)


def choose_groups(
    points: CutPoints, seconds: Sequence[float], groups: Sequence[range], note: str | None = None
) -> CutChoice:
    """Choose shards that have these parts of what lies between the allowed cuts."""
    at = tuple(points.allowed[group.start - 1] for group in groups[1:])
    total = sum(seconds) or 1.0
    parts = [sum(seconds[i] for i in group) for group in groups]
    why = tuple(
        f"{part / total:.0%} of a step's measured time, {1e3 * part:.1f} of {1e3 * total:.1f} ms"
        for part in parts
    )
    return CutChoice(points.spec(at), why, note)


def choose_by_name(points: CutPoints, names: Sequence[str]) -> CutChoice:
    """Let a shard begin at each named module.

    Raises:
        ConfigurationError: the model can't be cut at one of them.
    """
    starts = {_start(name, points): name for name in reversed(names)}
    at = tuple(unit for unit in points.allowed if unit in starts)
    why = ["it begins the model"]
    why += [_named(starts[unit], unit) for unit in at]
    return CutChoice(points.spec(at), tuple(why))


def choose_by_blocks(points: CutPoints, blocks: Sequence[Sequence[str]]) -> CutChoice:
    """Let each shard hold the blocks listed for it and begin with the first of them.

    Raises:
        ConfigurationError: the model can't be cut there, or runs its blocks in another order.
    """
    at = tuple(_start(shard[0], points) for shard in blocks[1:])
    bounds = [-1, *(points.units.index(unit) for unit in at), len(points.units)]
    for number, shard in enumerate(blocks):
        for name in shard:
            inside = [i for i, unit in enumerate(points.units) if _belongs(unit, name)]
            if inside and not bounds[number] <= inside[0] < bounds[number + 1]:
                raise ConfigurationError(
                    f"shards puts {name!r} into shard {number}, but the model runs it elsewhere; "
                    f"it runs in this order: {[_plain(unit) for unit in points.units]}"
                )
    why = ["it begins the model"]
    why += [_named(shard[0], unit) for shard, unit in zip(blocks[1:], at, strict=True)]
    return CutChoice(points.spec(at), tuple(why))


def _start(name: str, points: CutPoints) -> str:
    """Return the cut that a module name means: at the module itself or at its first unit."""
    inside = [unit for unit in points.allowed if _belongs(unit, name)]
    if not inside:
        raise ConfigurationError(
            f"shards names {name!r}, where this model can't be cut; choose among the places "
            f"{[_plain(unit) for unit in points.allowed]}"
        )
    return inside[0]


def _belongs(unit: str, name: str) -> bool:
    path = unit.rpartition("@")[0]
    return unit == name or path == name or path.startswith(f"{name}.")


def _named(name: str, unit: str) -> str:
    plain = _plain(unit)
    if plain == name:
        return f"{name!r} was named"
    return f"{name!r} was named, whose first place to cut is {plain!r}"


def _plain(unit: str) -> str:
    return unit.removesuffix("@0")


@dataclass
class UnitProfile:
    """Holds what forwards have shown of each unit's first call.

    Args:
        seconds: the least time from the entry of a unit to that of the next, in order of the calls.
        overwritten: the units with an argument that they or the rest of the forward change, as a
            cache of keys and values, so that they can't be run again from it.
        nested: the units that another one calls, as a module that blocks share.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    overwritten: set[str] = field(default_factory=set)
    nested: set[str] = field(default_factory=set)

    @contextmanager
    def measured(self, model: nn.Module) -> Iterator[None]:
        """Look at every forward of the model."""
        entries: list[tuple[str, float, Any, list[tuple[Any, int]]]] = []
        within: list[nn.Module] = []

        def entering(unit: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                if torch.compiler.is_dynamo_compiling():
                    return
                arguments = (args, kwargs)
                content = list(content_of(arguments))
                entries.append((unit, time.perf_counter(), arguments, content))
                if within and unit not in self.seconds:
                    self.nested.add(unit)
                within.append(module)

            return hook

        def leaving(module: nn.Module, *_: object) -> None:
            if within and within[-1] is module and not torch.compiler.is_dynamo_compiling():
                within.pop()

        def left(*_: object) -> None:
            within.clear()
            self._place([unit for unit, *_ in entries])
            # A model that is one layer has no units.
            ends = [begun for _, begun, _, _ in entries[1:]] + [time.perf_counter()]
            for (unit, begun, arguments, content), end in zip(entries, ends, strict=False):
                spent = end - begun
                self.seconds[unit] = min(spent, self.seconds.get(unit, spent))
                if not same_content(content, list(content_of(arguments))):
                    self.overwritten.add(unit)
            entries.clear()

        modules = dict(model.named_modules())
        handles = [
            modules[name].register_forward_pre_hook(entering(f"{name}@0"), with_kwargs=True)
            for name in units(model)
        ]
        handles += [modules[name].register_forward_hook(leaving) for name in units(model)]
        handles.append(model.register_forward_hook(left))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _place(self, entered: Sequence[str]) -> None:
        """Put units that no forward before has run, as experts, before what this one runs next."""
        order, calls = list(self.seconds), list(dict.fromkeys(entered))
        for place, unit in enumerate(calls):
            if unit not in order:
                next_known = next((each for each in calls[place + 1 :] if each in order), None)
                order.insert(order.index(next_known) if next_known else len(order), unit)
        self.seconds = {unit: self.seconds.get(unit, math.inf) for unit in order}

    @property
    def order(self) -> tuple[str, ...]:
        """Return the first call of each unit that ran, in an order in which forwards run them."""
        return tuple(self.seconds)

    def starts(self, model: nn.Module, by_number: bool) -> tuple[str, ...]:
        """Return the unit calls at which a shard may begin.

        Args:
            by_number: whether each shard shall have parameters.
        """
        places = [unit for unit in self.order if unit not in self.nested]
        if by_number:
            modules = dict(model.named_modules())
            places = [u for u in places if [*modules[module_of(u)].parameters()]]
        return tuple(places[1:])

    def between(self, starts: Sequence[str]) -> list[float]:
        """Return the seconds before, between and after the starts."""
        parts = [0.0]
        for unit, spent in self.seconds.items():
            if unit in starts:
                parts.append(0.0)
            parts[-1] += spent
        return parts


def content_of(value: Any, seen: set[int] | None = None) -> Iterator[tuple[Any, int]]:
    """Yield each object inside of a value, with the version of its memory if it is a tensor."""
    seen = set() if seen is None else seen
    parts: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield value, 0 if value.is_inference() else value._version
        return
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type | FunctionType):
        parts = vars(value).values()
    yield value, 0
    if id(value) not in seen:
        seen.add(id(value))
        for part in parts:
            yield from content_of(part, seen)


def same_content(before: Sequence[tuple[Any, int]], now: Sequence[tuple[Any, int]]) -> bool:
    """Tell whether nothing in a value was replaced or written to."""
    return len(before) == len(now) and all(
        a is b and version == later for (a, version), (b, later) in zip(before, now, strict=True)
    )
