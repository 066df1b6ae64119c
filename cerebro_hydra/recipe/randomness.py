"""Defines what the random numbers of a trial depend on, and where in a model they restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.recipe.placement import CPU

FORWARD = ""
"""Stands, in place of a unit's name, for a forward pass before its first unit."""


def units(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that no cut splits and where random numbers restart.

    Children of a `Sequential` or `ModuleList` are units unless they are such containers themselves;
    outside of containers, modules without children are. A module with several names goes by its
    first, and is no unit if that lies inside of another one.
    """
    first_names = {name for name, _ in model.named_modules()}
    return tuple(name for name in _walk(model, "") if name in first_names)


def _walk(module: nn.Module, name: str) -> Iterator[str]:
    in_container = isinstance(module, (nn.Sequential, nn.ModuleList))
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        nested = isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child) > 0
        if nested or (not in_container and any(True for _ in child.children())):
            yield from _walk(child, path)
        else:
            yield path


@dataclass(frozen=True)
class RandomKey:
    """Names the place of a forward pass in its trial; random numbers depend on nothing else.

    On another device than the CPU, they also depend on what that device makes of a seed.
    """

    trial_seed: int
    step: int
    microbatch: int
    device: torch.device = CPU

    def reseed(self, unit: str) -> None:
        """Restart the generators for a unit call, named `module@call`, or for `FORWARD`."""
        seed = seed_of(self.trial_seed, self.step, self.microbatch, unit)
        for generator in generators(self.device):
            generator.manual_seed(seed)


def generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the generators that draw numbers where a device trains: the CPU's and its own."""
    if device == CPU:
        return (torch.default_generator,)
    own = torch.get_device_module(device).default_generators[device.index]
    return (torch.default_generator, own)


@contextmanager
def unit_hooks(model: nn.Module, entered: Callable[[str], object]) -> Iterator[None]:
    """Call `entered` with `FORWARD` at each forward, and with each unit call ("module@call")."""
    handles = install_unit_hooks(model, entered)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def install_unit_hooks(
    model: nn.Module, entered: Callable[[str], object]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Install the hooks of `unit_hooks` until their handles are removed."""
    calls: Counter[str] = Counter()

    def begin(module: nn.Module, args: object) -> None:
        calls.clear()
        entered(FORWARD)

    def announce(name: str) -> Callable[[nn.Module, object], None]:
        def hook(module: nn.Module, args: object) -> None:
            if torch._C._current_graph_task_id() >= 0:  # torch.utils.checkpoint runs it again
                if calls[name] > 1:
                    raise ConfigurationError(
                        f"backward runs {name!r} again, which ran {calls[name]} times in one "
                        "forward, so its random numbers can't be told; leave out "
                        "torch.utils.checkpoint, or the reversible layer"
                    )
                entered(f"{name}@0")
                return
            entered(f"{name}@{calls[name]}")
            calls[name] += 1

        return hook

    modules = dict(model.named_modules())
    return [
        model.register_forward_pre_hook(begin),
        *(modules[name].register_forward_pre_hook(announce(name)) for name in units(model)),
    ]


def trial_seed(seed: int, trial: int) -> int:
    """Derive the seed of a trial's dropout and collating from that of the search."""
    return seed_of(seed, "trial", trial)
