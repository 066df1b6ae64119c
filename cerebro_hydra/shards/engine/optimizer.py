"""Says which optimizer tensors each parameter will get, and clones optimizers over others.

A clone is made without calling the optimizer's constructor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cerebro_hydra.copies import deep_copy
from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.foreign_text import named_error_text
from cerebro_hydra.recipe.optimizer_list import NUMBERS, members_of
from cerebro_hydra.shards.places import order_of

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


class StateEntry(NamedTuple):
    """Describes a tensor or a number that an optimizer keeps for a parameter.

    Args:
        strides: None says those of the parameter if that has the same shape, else of a new tensor.
        kind: "optim" of a tensor, "number" of one of Python's numbers.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    kind: str = "optim"

    def to_json(self) -> list[Any]:
        strides = None if self.strides is None else list(self.strides)
        told = [self.key, str(self.dtype).removeprefix("torch."), list(self.shape)]
        return told if self == (*self[:3], None, "optim") else [*told, strides, self.kind]

    @classmethod
    def from_json(cls, document: Sequence[Any]) -> StateEntry:
        key, dtype, shape, strides, kind = [*document, None, "optim"][:5]
        return cls(key, _DTYPES[dtype], tuple(shape), strides and tuple(strides), kind)


@dataclass(frozen=True)
class StateTemplate:
    """Describes the form of each parameter's optimizer state, by parameter name."""

    entries: dict[str, tuple[StateEntry, ...]]

    def of(self, name: str) -> tuple[StateEntry, ...]:
        """Return the entries of a parameter, none if the optimizer keeps no state for it."""
        return self.entries.get(name, ())

    def to_json(self) -> dict[str, Any]:
        return {name: [each.to_json() for each in e] for name, e in self.entries.items()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StateTemplate:
        return cls({name: tuple(map(StateEntry.from_json, e)) for name, e in document.items()})

    @classmethod
    def learn(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> StateTemplate:
        """Learn the template from an optimizer that has stepped.

        For a trainable parameter without a gradient so far, a copy of the optimizer takes a step.
        If that takes the gradient away, as some do with those of a layer in the first steps, what
        the optimizer keeps will be as for another parameter.

        Raises:
            ConfigurationError: the optimizer's state has a value that is no tensor, number or None,
                or a key that is no parameter.
        """
        check_state_keys(optimizer)
        names = {id(p): name for name, p in model.named_parameters()}
        entries: dict[str, tuple[StateEntry, ...]] = {}
        without: list[tuple[str, Tensor]] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue  # Adagrad makes state for frozen parameters too
                name = names[id(parameter)]
                state = optimizer.state.get(parameter)
                if not state and (state := _state_after_a_step(optimizer, name, parameter)) is None:
                    without.append((name, parameter))
                    continue
                entries[name] = tuple(
                    _entry(optimizer, name, parameter, key, value)
                    for key, value in state.items()
                    if value is not None
                )
        for like in [name for name, found in entries.items() if found][:1]:
            shape = tuple(model.get_parameter(like).shape)
            for name, parameter in without:
                own = tuple(parameter.shape)
                entries[name] = tuple(
                    each._replace(shape=own, strides=None) if each.shape == shape else each
                    for each in entries[like]
                )
        return cls({name: entries[name] for name in names.values() if entries.get(name)})


def _state_after_a_step(
    optimizer: torch.optim.Optimizer, name: str, parameter: Tensor
) -> dict[str, Any] | None:
    """Return the state that an optimizer makes for a parameter with its first gradient.

    None if it takes that away.
    """
    stand_in = nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    clone = clone_optimizer(optimizer, {id(parameter): stand_in})
    try:
        clone.step()
    except Exception as error:
        raise ConfigurationError(
            f"optimizer {type(optimizer).__name__} can't step on a copy of parameter {name!r} "
            f"alone ({named_error_text(error)}), as it does in shards; let it keep what it has of "
            "a parameter in its state, as self.state[p], and not by a number or an id"
        ) from error
    return dict(clone.state[stand_in]) if stand_in.grad is not None else None


def _entry(
    optimizer: torch.optim.Optimizer, name: str, parameter: Tensor, key: Any, value: Any
) -> StateEntry:
    if type(value) in NUMBERS and isinstance(key, str):
        return StateEntry(key, NUMBERS[type(value)], (), kind="number")
    if not isinstance(value, Tensor) or not isinstance(key, str):
        raise ConfigurationError(
            f"optimizer {type(optimizer).__name__} keeps {key!r} of parameter {name!r} as "
            f"{kind_of(value)}; only tensors and numbers with a string for their name hop there, "
            "so keep a tensor in place of it, or what is the same for all parameters in their group"
        )
    if value.layout is not torch.strided:
        raise ConfigurationError(
            f"optimizer {type(optimizer).__name__} keeps {key!r} of parameter {name!r} as a sparse "
            "tensor, which can't hop; set sparse=False in its embedding, or choose an optimizer "
            "without such state, as SGD without momentum"
        )
    if value.is_conj() or value.is_neg():
        raise ConfigurationError(
            f"optimizer {type(optimizer).__name__} keeps {key!r} of parameter {name!r} as a "
            "conjugated or negated view, which can't hop; keep its resolve_conj().resolve_neg()"
        )
    return StateEntry(key, value.dtype, tuple(value.shape), _strides(value, parameter))


def _strides(state: Tensor, parameter: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a parameter's state, None where a `StateEntry` has none."""
    alike = state.shape == parameter.shape
    like = parameter if alike else torch.empty(state.shape, device="meta")
    plain = torch.empty_like(like, device="meta")
    own = torch.empty_like(state, device="meta")  # which has no gaps
    return None if order_of(own) == order_of(plain) else own.stride()


def check_state_keys(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer keeps state for parameters alone.

    Raises:
        ConfigurationError: it keeps state under another key.
    """
    for key in optimizer.state:
        if not isinstance(key, Tensor):
            raise ConfigurationError(
                f"optimizer {type(optimizer).__name__} keeps state under {key!r}, which is no "
                "parameter, so it is no part of the state that hops; keep it in every param "
                f"group, as group[{key!r}]"
            )


def check_groups(trained: torch.optim.Optimizer, built: torch.optim.Optimizer) -> None:
    """Check that an optimizer has as many param groups as the factory gave it.

    Raises:
        ConfigurationError: training has added or removed one.
    """
    now = sum(len(each.param_groups) for each in members_of(trained))
    before = len(built.param_groups)
    if now != before:
        raise ConfigurationError(
            f"optimizer {type(trained).__name__} has {now} param groups after training and is "
            f"built with {before}, so another worker would not have them; give all groups in the "
            "factory, and change their options in training"
        )


# LR schedulers wrap `step` in a function that refers to the original optimizer.
NOT_CLONED = ("param_groups", "state", "step", "_opt_called", "_members")


def clone_optimizer(
    optimizer: torch.optim.Optimizer, params: Mapping[int, Tensor]
) -> torch.optim.Optimizer:
    """Return the same optimizer over the given parameters, with a copy of their state.

    Param groups stay even if they are empty, so that their indices mean the same in every shard.

    Args:
        params: the new parameter by the id of the original one. Other parameters are left out.
    """
    check_state_keys(optimizer)
    clone = object.__new__(type(optimizer))
    vars(clone).update((k, v) for k, v in vars(optimizer).items() if k not in NOT_CLONED)
    clone.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        # Adagrad makes state for every parameter it is given, but a frozen one needs none.
        if parameter.requires_grad and id(parameter) in params:
            clone.state[params[id(parameter)]] = deep_copy(state)
    clone.param_groups = []
    for group in optimizer.param_groups:
        indices = [i for i, p in enumerate(group["params"]) if id(p) in params]
        chosen: dict[str, Any] = {"params": [params[id(group["params"][i])] for i in indices]}
        if "param_names" in group:
            chosen["param_names"] = [group["param_names"][i] for i in indices]
        options = {name: value for name, value in group.items() if name not in chosen}
        clone.param_groups.append(chosen | deep_copy(options))
    return clone


def different_option(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """Return which option of a param group, or value of a scheduler, two cursors of a step have."""
    both = [
        (f"option {{!r}} of param group {n}", *groups)
        for n, groups in enumerate(zip(one["groups"], other["groups"], strict=True))
    ]
    both.append(("{!r} of the LR scheduler", one["scheduler"], other["scheduler"]))
    for told, here, there in both:
        for name in (here or {}).keys() & (there or {}).keys():
            if here[name] != there[name]:
                return told.format(name), here[name], there[name]
    return None
