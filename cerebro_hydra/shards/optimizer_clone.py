"""Clones an optimizer over other parameters, without calling its constructor."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# LR schedulers wrap `step` in a function that refers to the original optimizer.
NOT_CLONED = ("param_groups", "state", "step", "_opt_called")


def clone_optimizer(
    optimizer: torch.optim.Optimizer, params: Mapping[int, Tensor]
) -> torch.optim.Optimizer:
    """Return the same optimizer over the given parameters, with a copy of their state.

    Param groups stay even if they are empty, so that their indices mean the same in every shard.

    Args:
        params: the new parameter by the id of the original one. Other parameters are left out.
    """
    clone = object.__new__(type(optimizer))
    vars(clone).update((k, v) for k, v in vars(optimizer).items() if k not in NOT_CLONED)
    clone.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        # Adagrad makes state for every parameter it is given, but a frozen one needs none.
        if parameter.requires_grad and id(parameter) in params:
            clone.state[params[id(parameter)]] = copy.deepcopy(state)
    clone.param_groups = []
    for group in optimizer.param_groups:
        indices = [i for i, p in enumerate(group["params"]) if id(p) in params]
        chosen: dict[str, Any] = {"params": [params[id(group["params"][i])] for i in indices]}
        if "param_names" in group:
            chosen["param_names"] = [group["param_names"][i] for i in indices]
        options = {name: value for name, value in group.items() if name not in chosen}
        clone.param_groups.append(chosen | copy.deepcopy(options))
    return clone
