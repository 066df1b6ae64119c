"""Profiles a model's units: their order in a forward, their times, and what overwrites inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from cerebro_hydra.recipe import units
from cerebro_hydra.shards.cut_spec import module_of


@dataclass
class UnitProfile:
    """Holds what forwards have shown of each unit's first call.

    Args:
        seconds: the least time from the entry of a unit to that of the next, in order of the calls.
        overwritten: the units with an argument that they or the rest of the forward change, as a
            cache of keys and values, so that they can't be run again from it.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    overwritten: set[str] = field(default_factory=set)

    @contextmanager
    def measured(self, model: nn.Module) -> Iterator[None]:
        """Look at every forward of the model."""
        entries: list[tuple[str, float, Any, list[tuple[Any, int]]]] = []

        def entering(unit: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                arguments = (args, kwargs)
                content = list(content_of(arguments))
                entries.append((unit, time.perf_counter(), arguments, content))

            return hook

        def left(*_: object) -> None:
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
        handles.append(model.register_forward_hook(left))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def order(self) -> tuple[str, ...]:
        """Return the first call of each unit that ran, in order."""
        return tuple(self.seconds)

    def starts(self, model: nn.Module, by_number: bool) -> tuple[str, ...]:
        """Return the unit calls at which a shard may begin.

        Args:
            by_number: whether each shard shall have parameters.
        """
        if not by_number:
            return self.order[1:]
        modules = dict(model.named_modules())
        with_params = [u for u in self.order if [*modules[module_of(u)].parameters()]]
        return tuple(with_params[1:])

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
        yield value, value._version
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
