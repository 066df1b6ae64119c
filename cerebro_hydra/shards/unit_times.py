"""Measures in which order a model's forward enters its units, and how long each of them takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from cerebro_hydra.recipe.randomness import FORWARD, unit_hooks
from cerebro_hydra.shards.cut_spec import module_of


@dataclass
class UnitTimes:
    """Holds, by unit, the least seconds from its first call to the entry of the next unit."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measured(self, model: nn.Module) -> Iterator[None]:
        """Measure every forward of the model."""
        entries: list[tuple[str, float]] = []

        def entered(unit: str) -> None:
            if unit == FORWARD:
                entries.clear()
            entries.append((unit, time.perf_counter()))

        def left(*_: object) -> None:
            ends = [begun for _, begun in entries[1:]] + [time.perf_counter()]
            for (unit, begun), end in zip(entries, ends, strict=True):
                if unit != FORWARD and unit.endswith("@0"):
                    spent = end - begun
                    self.seconds[unit] = min(spent, self.seconds.get(unit, spent))

        handle = model.register_forward_hook(left)
        try:
            with unit_hooks(model, entered):
                yield
        finally:
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
        with_params = [
            u for u in self.order if any(True for _ in modules[module_of(u)].parameters())
        ]
        return tuple(with_params[1:])

    def between(self, starts: Sequence[str]) -> list[float]:
        """Return the seconds before, between and after the starts."""
        parts = [0.0]
        for unit, spent in self.seconds.items():
            if unit in starts:
                parts.append(0.0)
            parts[-1] += spent
        return parts
