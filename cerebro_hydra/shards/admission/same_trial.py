"""Finds out whether a trial is the same in another process than that in which it was admitted.

What a program sets in a module beside the factory stays in its own process, and so does what a
module draws when it is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.effects.filled_caches import Variable
from cerebro_hydra.shards.admission.effects.held_state import OF_METRIC, OF_SCHEDULER, HeldState
from cerebro_hydra.shards.admission.effects.object_reader import ObjectReader
from cerebro_hydra.shards.admission.effects.readings import NOTHING, PART
from cerebro_hydra.shards.admission.effects.shared_values import shared_kept, variables_of
from cerebro_hydra.shards.admission.same_builds import state_of, trained
from cerebro_hydra.shards.admission.trial_code import form_of_value, paths_of, read_trial
from cerebro_hydra.shards.cut.sample import Example
from cerebro_hydra.storage.trial_code import OPTION, TrialCode, told

_OF_DEVICES = tuple(OPTION + name for name in ("fused", "foreach", "capturable"))
"""Begin the parts of a trial that say how a device computes, which need not be the driver's."""

_ITEM = re.compile(r"\[\d+\]$")
_MOST_TRIED = 16
_IN_THIS_PROCESS = (
    "what a program sets in a module beside estimator_gen_fn stays in its own process, and so does "
    "what a module draws when it is imported"
)


def check_same_trial(
    then: TrialCode | None,
    recipe: Recipe,
    example: Callable[[], Example],
    trial_seed: int,
    factory: Callable[..., Any] | None = None,
) -> bool:
    """Check that a trial that was just built is the one that was admitted in another process.

    Values may differ, such as the number of the process, if they change no bit of two steps and an
    evaluation.

    Args:
        then: what its code was there; None if that is not known.
        example: gives a batch.
        factory: has built it.

    Returns:
        whether its model has taken steps, so that another one is to be built.

    Raises:
        ConfigurationError: it is another one; the message names what differs.
    """
    if then is None or (read := read_trial(recipe)) is None:
        return False
    reader, now = read
    if not then.is_comparable(now):
        return False
    parts = [
        each
        for each in then.differences(now)
        if not (each.is_value or each.part.startswith(_OF_DEVICES))
    ]
    if parts:
        raise ConfigurationError(
            f"estimator_gen_fn makes another trial on this worker than in the driver: "
            f"{told(parts)}; {_IN_THIS_PROCESS}: set it in estimator_gen_fn"
        )
    values = {
        name: (was, text)
        for name, text in now.values.items()
        if (was := then.values.get(name, text)) != text
        and (form := form_of_value(text))
        and form == form_of_value(was)
    }
    if not values:
        return False
    # A metric may hold the loss, whose name says more.
    names = sorted(values, key=lambda name: (name.startswith(f"a value{OF_METRIC}"), name))
    with shared_kept(recipe, factory):
        others = _Others(recipe, reader, example(), trial_seed)
        for name in names[:_MOST_TRIED]:
            if others.matters(name, values[name][0]):
                raise ConfigurationError(_told(name, *values[name]))
    return True


def _told(name: str, then: str, now: str) -> str:
    numbers = now.startswith("#") or _ITEM.search(name)
    what = "has other numbers on" if numbers else f"is {now} and not {then} on"
    return (
        f"{name} {what} this worker than in the driver, and training depends on it: "
        f"{_IN_THIS_PROCESS}; set it in estimator_gen_fn, or seed what is drawn, as by "
        "torch.manual_seed(0)"
    )


class _Others:
    """Takes steps of a trial with other values, to see whether these matter."""

    def __init__(
        self, recipe: Recipe, reader: ObjectReader, example: Example, trial_seed: int
    ) -> None:
        self._recipe = recipe
        self._variables, self._paths = variables_of(reader), paths_of(reader)
        self._state = state_of(recipe.model)
        self._steps = lambda: trained(recipe, self._state, example, trial_seed)
        self._plain = self._steps()

    def matters(self, name: str, then: str) -> bool:
        """Return whether two steps and an evaluation give other bits with another value.

        That is the one of before, or other numbers of a tensor. A tensor that can't be set is taken
        to matter, and so is what an LR schedule has, which may act later.
        """
        if name.startswith(f"a value{OF_SCHEDULER}"):
            return True
        found: object = None
        with suppress(Exception), self._set(name, then):
            found = self._steps()
        unknown = found is None or self._plain is None
        return then.startswith("#") if unknown else found != self._plain

    @contextmanager
    def _set(self, name: str, then: str) -> Iterator[None]:
        place, value = self._place(name)
        with ExitStack() as kept:
            if isinstance(value, Tensor | np.ndarray):
                before = value.clone() if isinstance(value, Tensor) else value.copy()
                kept.callback(_fill, value, before)
                is_bool = before.dtype in (torch.bool, np.dtype(bool))
                _fill(value, ~before if is_bool else before + 1)
            elif place is not None:
                kept.callback(place.set, value)
                place.set(None if then == NOTHING else ast.literal_eval(then))
            yield

    def _place(self, name: str) -> tuple[Variable | None, object]:
        """Return what has a value, and the value; of a buffer what steps begin with."""
        if name.startswith("buffer "):
            return None, self._state[name.removeprefix("buffer '").removesuffix("'")]
        first, *parts = self._paths[name].split(PART)
        recipe = self._recipe
        functions = {
            "the loss": recipe.loss,
            "the collate": recipe.collate,
            "the training_step": recipe.training_step,
        }
        held = {f"a value of {what}": function for what, function in functions.items()}
        own = (Variable(vars(m), a) for m, a, _ in HeldState(recipe).attributes({first}))
        known = Variable(held, first) if first in held else self._variables.get(first)
        found = known or next(own)
        for part in parts:
            found = _part_of(found, part)
        return found, found.value


@dataclass(frozen=True)
class _Item(Variable):
    """Is an item of a tuple, which is another tuple when it is set."""

    def set(self, value: object) -> None:
        """Let the owner have a tuple with this item."""
        whole: Any = self.owner.value
        items = [*whole[: self.name], value, *whole[self.name + 1 :]]
        made = type(whole)._make(items) if hasattr(whole, "_make") else type(whole)(items)
        self.owner.set(made)

    @property
    def value(self) -> object:
        """Return its value."""
        return self.owner.value[self.name]


def _part_of(variable: Variable, part: str) -> Variable:
    """Return an attribute, an entry or an item of what a variable has."""
    held: Any = variable.value
    if part.startswith("."):
        attributes = getattr(held, "__dict__", {})
        name = part[1:]
        return Variable(attributes if name in attributes else {name: getattr(held, name)}, name)
    key = ast.literal_eval(part[1:-1])
    return _Item(variable, key) if isinstance(held, tuple) else Variable(held, key)


def _fill(held: Any, values: Any) -> None:
    with torch.no_grad():
        if isinstance(held, Tensor):
            held.copy_(values)
        else:
            held[...] = values
