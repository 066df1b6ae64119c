"""Makes an entry into a unit a node of a graph, and restarts a shard's random numbers there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from cerebro_hydra.recipe import RandomKey

_library = torch.library.Library("cerebro_hydra", "DEF")
_library.define("enter_unit(str unit) -> ()")
_library.impl("enter_unit", lambda unit: None, "CompositeExplicitAutograd")

# It stands for an entry in an exported graph, and marks the place of a reseed and of a cut.
MARKER = torch.ops.cerebro_hydra.enter_unit.default
torch.fx.node.has_side_effect(MARKER)


_key: ContextVar[RandomKey | None] = ContextVar("_key", default=None)


@contextmanager
def random_key(key: RandomKey) -> Iterator[None]:
    """Let `enter_unit` reseed by this key, on this thread and within the context."""
    token = _key.set(key)
    try:
        yield
    finally:
        _key.reset(token)


def enter_unit(unit: str) -> None:
    """Restart the random numbers for a unit call, or do nothing without a key, as in evaluation."""
    key = _key.get()
    if key is not None:
        key.reseed(unit)


torch.fx.node.has_side_effect(enter_unit)
