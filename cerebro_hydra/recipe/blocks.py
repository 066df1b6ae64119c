"""Checks `shards=`: a number, "auto", module names to cut at, or the blocks of each shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from cerebro_hydra.errors import ConfigurationError

Blocks = list[str] | list[list[str]]


AUTO = "auto"
"""As many shards as a device needs."""


def checked_shards(given: Any, model: nn.Module) -> int | str | Blocks:
    """Bring `shards=` to a number, "auto", a list of names, or a list of lists of names.

    Raises:
        ConfigurationError: it is none of them, or names what the model does not have.
    """
    if given == AUTO and AUTO not in dict(model.named_modules()):
        return AUTO
    if isinstance(given, str):
        given = [given]
    if isinstance(given, int):
        if isinstance(given, bool) or given < 1:
            raise ConfigurationError(
                f"shards is {given!r}; it is a whole number from 1, 'auto', or module names"
            )
        return given
    if not isinstance(given, Sequence):
        raise ConfigurationError(
            f"shards is {given!r}; give a number, 'auto', module names to cut at, or a list of "
            "blocks"
        )
    nested = [isinstance(each, list | tuple) for each in given]
    if any(nested) and not all(nested):
        raise ConfigurationError(
            f"shards mixes names and lists: {given!r}; give names to cut at, or one list of blocks "
            "for every shard"
        )
    if not any(nested):
        return [_name(each, model) for each in given]
    blocks = [[_name(each, model) for each in shard] for shard in given]
    if not all(blocks):
        raise ConfigurationError(f"shard {blocks.index([])} of shards has no block; name one")
    return blocks


def _name(block: Any, model: nn.Module) -> str:
    first_names = {module: name for name, module in model.named_modules()}
    if isinstance(block, nn.Module):
        if block not in first_names:
            raise ConfigurationError(
                f"shards holds a {type(block).__name__} that is no module of the model; give "
                "modules of this model, or their names"
            )
        return first_names[block]
    modules = dict(model.named_modules(remove_duplicate=False))
    if block not in modules:
        raise ConfigurationError(
            f"shards names {block!r}, which is no module of the model; give 'auto', a number, or "
            f"names of its modules, which are {[m for m in modules if m][:20]}"
        )
    return first_names[modules[block]]
