"""A cursor is the small JSON that travels with a shard's segments.

It has the step, the options of the param groups and the state of the LR scheduler. That of a fork
has the step and how many epochs lie behind it: its options and its LR schedule are those of its own
parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.lr_schedule import LRSchedule

_TAG = "!"  # the key that marks a value which JSON lacks


def make_cursor(step: int, optimizer: torch.optim.Optimizer, scheduler: Any | None) -> dict:
    """Return what a shard needs beside its segments to go on at `step`.

    Raises:
        ConfigurationError: an option or the scheduler's state has a value that is not plain.
    """
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    state = None if scheduler is None else scheduler.state_dict()
    return {
        "step": step,
        "groups": [encode(group, f"param group {i}") for i, group in enumerate(groups)],
        "scheduler": None if state is None else encode(state, type(scheduler).__name__),
    }


def restore_cursor(
    cursor: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    scheduler: Any | None,
    schedule: LRSchedule,
) -> None:
    """Bring a new optimizer and scheduler to the point at which the cursor was made."""
    if "groups" not in cursor:
        schedule.advance(scheduler, cursor["step"], cursor["epochs"])
        return
    for group, options in zip(optimizer.param_groups, cursor["groups"], strict=True):
        group.update(decode(options))
    if scheduler is not None:
        scheduler.load_state_dict(decode(cursor["scheduler"]))
        # The optimizer stepped on another worker; without this mark torch would warn.
        optimizer._opt_called = True  # type: ignore[attr-defined]


def encode(value: Any, where: str) -> Any:
    """Return a plain Python value as JSON that `decode` turns back into an equal value.

    Raises:
        ConfigurationError: the value is not plain; the message says `where` it is.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "of": repr(float(value))}
    if type(value) is list:
        return [encode(each, where) for each in value]
    if type(value) is tuple:
        return {_TAG: "tuple", "of": [encode(each, where) for each in value]}
    if type(value) in (dict, Counter):
        plain = type(value) is dict and all(isinstance(k, str) and k != _TAG for k in value)
        if plain:
            return {key: encode(each, f"{where}[{key!r}]") for key, each in value.items()}
        pairs = [[encode(k, where), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {_TAG: "counter" if type(value) is Counter else "dict", "of": pairs}
    raise ConfigurationError(
        f"{where} is a {type(value).__name__}, which can't travel as JSON; "
        "use plain numbers, strings, lists and dicts in optimizer options and LR schedulers"
    )


def decode(value: Any) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case None:
            return {key: decode(each) for key, each in value.items()}
        case "float":
            return float(value["of"])
        case "tuple":
            return tuple(decode(each) for each in value["of"])
        case "counter":
            return Counter({decode(k): decode(v) for k, v in value["of"]})
        case _:
            return {decode(k): decode(v) for k, v in value["of"]}
