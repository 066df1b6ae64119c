"""Makes one optimizer of several, each of which has parameters of its own and steps when told."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from cerebro_hydra.errors import ConfigurationError

_OF_ONE = ("param_groups", "state", "step", "_opt_called")
"""What each member has of its list, or LR schedulers set."""

_HOOKS_OF_WHOLE_STATES = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_load_state_dict_pre_hooks",
)


@dataclass(frozen=True)
class _Part:
    """Says what a member is beside its groups and state.

    Attributes:
        kind: its class.
        attributes: its own, such as `defaults` and hooks.
        groups: how many param groups it has.
    """

    kind: type[Optimizer]
    attributes: dict[str, Any]
    groups: int


class OptimizerList(Optimizer):
    """Has the param groups of several optimizers, one after the other, and the state of all.

    So its state, options and cursor hop as those of one optimizer. Members are made when they are
    first asked for, over the groups and the state that the list has then; a copy of the list that
    is made before has members of its own.

    Args:
        optimizers: no two have a parameter in common. They are read, and never step.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__([dict(group) for each in optimizers for group in each.param_groups], {})
        self.parts = [
            _Part(
                type(each),
                {name: value for name, value in vars(each).items() if name not in _OF_ONE},
                len(each.param_groups),
            )
            for each in optimizers
        ]
        for each in optimizers:
            self.state.update(each.state)

    @property
    def members(self) -> list[Optimizer]:
        """Return the optimizers that step, in the order that was given."""
        if "_members" not in vars(self):
            made, first = [], 0
            for part in self.parts:
                member: Optimizer = object.__new__(part.kind)
                vars(member).update(part.attributes)
                for name in _HOOKS_OF_WHOLE_STATES:
                    setattr(member, name, OrderedDict({0: _refuse_whole_state}))
                member.state = self.state
                member.param_groups = self.param_groups[first : first + part.groups]
                made.append(member)
                first += part.groups
            self._members = made
        return self._members

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Let each member step."""
        assert closure is None, "a closure is for one optimizer"
        for member in self.members:
            member.step()


def _refuse_whole_state(optimizer: Optimizer, *_: Any) -> None:
    raise ConfigurationError(
        f"training_step asks one of several optimizers ({type(optimizer).__name__}) for its "
        "state_dict or load_state_dict, and their states are kept together, to hop as one: read "
        "and change optimizer.state[parameter] and optimizer.param_groups"
    )


def members_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers of a list, or the one that is no list."""
    return optimizer.members if isinstance(optimizer, OptimizerList) else [optimizer]


NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""The type in which a checkpoint has each kind of number that an optimizer keeps."""


def kept_of(name: str, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return what an optimizer keeps of a parameter, named as a checkpoint names it."""
    found = {}
    for key, value in state.items():
        if type(value) in NUMBERS:
            found[f"number:{name}:{key}"] = torch.tensor(value, dtype=NUMBERS[type(value)])
        elif value is not None:
            found[f"optim:{name}:{key}"] = value
    return found


def let_go(optimizer: Optimizer) -> None:
    """Let an optimizer refer to no tensors any more; LR schedulers and it refer to one another."""
    for each in (*members_of(optimizer), optimizer):
        each.state.clear()
        each.param_groups.clear()


def shared_parameter(optimizers: Sequence[Optimizer]) -> torch.Tensor | None:
    """Return a parameter that two optimizers have, None if there is none."""
    seen: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if seen.setdefault(id(parameter), number) != number:
                    return parameter  # type: ignore[no-any-return]
    return None
