"""Profiles a model's units: their order in a forward, their times, and what overwrites inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cerebro_hydra.recipe import units
from cerebro_hydra.shards.cut_spec import module_of


@dataclass
class UnitProfile:
    """Holds what forwards have shown of each unit's first call.

    Args:
        seconds: the least time from the entry of a unit to that of the next, in order of the calls.
        overwritten: the units with an input into which the forward writes later, so that they can't
            be run again from it.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    overwritten: set[str] = field(default_factory=set)

    @contextmanager
    def measured(self, model: nn.Module) -> Iterator[None]:
        """Look at every forward of the model."""
        entries: list[tuple[str, float, list[tuple[Tensor, int]]]] = []

        def entering(unit: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                entries.append((unit, time.perf_counter(), [(x, x._version) for x in inputs]))

            return hook

        def left(*_: object) -> None:
            ends = [begun for _, begun, _ in entries[1:]] + [time.perf_counter()]
            for (unit, begun, inputs), end in zip(entries, ends, strict=True):
                spent = end - begun
                self.seconds[unit] = min(spent, self.seconds.get(unit, spent))
                if any(x._version != version for x, version in inputs):
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
