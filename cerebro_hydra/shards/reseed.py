"""Random numbers by key: every entry into a unit restarts the generator.

The same hooks serve three readers: `torch.export`, for which an entry becomes a node of the graph;
modules that run as they are; and admission's reference.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from cerebro_hydra.recipe import RandomKey, units

FORWARD = ""  # the key of a forward pass itself, before its first unit

_library = torch.library.Library("cerebro_hydra", "DEF")
_library.define("enter_unit(str unit) -> ()")
_library.impl("enter_unit", lambda unit: None, "CompositeExplicitAutograd")

# It stands for an entry in an exported graph, and marks the place of a reseed and of a cut.
MARKER = torch.ops.cerebro_hydra.enter_unit.default
torch.fx.node.has_side_effect(MARKER)


class _Current(threading.local):
    key: RandomKey | None = None


_current = _Current()


@contextmanager
def random_key(key: RandomKey) -> Iterator[None]:
    """Let `enter_unit` reseed by this key, on this thread and within the context."""
    before, _current.key = _current.key, key
    try:
        yield
    finally:
        _current.key = before


def enter_unit(unit: str) -> None:
    """Restart the random numbers for a unit call, or do nothing without a key, as in evaluation."""
    key = _current.key
    if key is not None:
        key.reseed(unit)


torch.fx.node.has_side_effect(enter_unit)


@contextmanager
def unit_hooks(model: nn.Module, entered: Callable[[str], object]) -> Iterator[None]:
    """Within it, `entered` hears of the forward ("") and of every unit call ("module@call")."""
    handles = install_unit_hooks(model, entered)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def install_unit_hooks(
    model: nn.Module, entered: Callable[[str], object]
) -> list[torch.utils.hooks.RemovableHandle]:
    calls: Counter[str] = Counter()

    def begin(module: nn.Module, args: object) -> None:
        calls.clear()
        entered(FORWARD)

    def announce(name: str) -> Callable[[nn.Module, object], None]:
        def hook(module: nn.Module, args: object) -> None:
            entered(f"{name}@{calls[name]}")
            calls[name] += 1

        return hook

    modules = dict(model.named_modules())
    return [
        model.register_forward_pre_hook(begin),
        *(modules[name].register_forward_pre_hook(announce(name)) for name in units(model)),
    ]
