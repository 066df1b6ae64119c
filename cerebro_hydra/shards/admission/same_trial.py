"""Finds out whether a trial is the same in another process than that in which it was admitted.

What a program sets in a module beside the factory stays in its own process, and so does what a
module draws when it is imported.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.effects.filled_caches import ABSENT, Variable
from cerebro_hydra.shards.admission.effects.held_state import OF_METRIC, OF_SCHEDULER, HeldState
from cerebro_hydra.shards.admission.effects.object_reader import ObjectReader
from cerebro_hydra.shards.admission.effects.readings import NOTHING, PART
from cerebro_hydra.shards.admission.effects.shared_values import shared_kept, variables_of
from cerebro_hydra.shards.admission.same_builds import state_of, trained
from cerebro_hydra.shards.admission.trial_code import (
    NAMED_KINDS,
    OTHER_VALUES,
    form_of_value,
    paths_of,
    read_trial,
)
from cerebro_hydra.shards.cut.sample import Example
from cerebro_hydra.storage.trial_code import OPTION, TrialCode, told

_OF_DEVICES = tuple(OPTION + name for name in ("fused", "foreach", "capturable"))
"""Begin the parts of a trial that say how a device computes, which need not be the driver's."""

_ITEM = re.compile(r"\[\d+\]$")
_PART_AT_END = re.compile(r"(\.\w+|\[(?:'(?:[^'\\]|\\.)*'|[^\[\]]*)\])$")
_OF_CLASS = re.compile(r"attribute '(\w+)' of class (.+)")
_OF_METHODS = "method "
"""Begins what methods hold of their own, which libraries write to that wrap them."""

_NUMBER = re.compile(r"-?[\d.]+(e[+-]?\d+)?")
_MOST_NAMED = 3
_UNKNOWN = object()
_IN_THIS_PROCESS = (
    "what a program sets in a module beside estimator_gen_fn stays in its own process, and so does "
    "what a module draws when it is imported"
)
_AS_IMPORTED = (
    " (by `module.name`: a factory of a script or a notebook has a copy of what it imports by name)"
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
    others = [*_others(then, now, reader)]
    if not others:
        return False
    with shared_kept(recipe, factory):
        if found := _Steps(recipe, reader, example(), trial_seed).that_matter(others):
            told_as = " and ".join(map(str, found[:_MOST_NAMED]))
            more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            raise ConfigurationError(
                f"{told_as}{more}, and training depends on it: {_IN_THIS_PROCESS}; set it in "
                f"estimator_gen_fn{_AS_IMPORTED}, or seed what is drawn, as by torch.manual_seed(0)"
            )
    return True


@dataclass(frozen=True)
class _Other:
    """Is a value that is another one here, by short texts; None is where it is not there."""

    name: str
    then: str | None
    now: str | None

    @property
    def is_tensor(self) -> bool:
        """Return whether it is a tensor or an array, of which only a digest is known."""
        return self.then is not None and self.then.startswith("#")

    @property
    def order(self) -> tuple[Any, ...]:
        """Return what it is sorted by: what is before it in a list comes first.

        A metric may hold the loss, whose name says more.
        """
        parts = re.split(r"(\d+)", self.name)
        numbered = tuple((each.isdigit(), int(each) if each.isdigit() else each) for each in parts)
        return self.name.startswith(f"a value{OF_METRIC}"), numbered

    def __str__(self) -> str:
        if self.is_tensor or (self.then and self.now and _ITEM.search(self.name)):
            return f"{self.name} has other numbers on this worker than in the driver"
        if self.now is None:
            return f"{self.name} is {self.then} in the driver and not there on this worker"
        if self.then is None:
            return f"{self.name} is {self.now} on this worker and not there in the driver"
        return f"{self.name} is {self.now} and not {self.then} on this worker, as in the driver"


def _others(then: TrialCode, now: TrialCode, reader: ObjectReader) -> Iterator[_Other]:
    """Yield the values that are others now, as far as they can be told apart."""
    here, found = paths_of(reader), []
    known = then.values.keys() - {OTHER_VALUES}
    both = [number for number, name in enumerate(now.values) if name in known]
    # Both are in one order, and where there are many, what comes behind these was not kept.
    kept = {*[*now.values][: max(both, default=0)]} if OTHER_VALUES in then.values else now.values
    for name in {**then.values, **now.values}:
        was, text = then.values.get(name), now.values.get(name)
        if was is None or text is None:
            is_alone = name not in here if text is None else name in kept
            is_plain = not (was or text or "").startswith(("#", *NAMED_KINDS))
            if is_alone and is_plain and not name.startswith(_OF_METHODS):
                found.append(_Other(name, was, text))
        elif was != text and _are_comparable(was, text):
            found.append(_Other(name, was, text))
    for name in then.shared.keys() & now.shared.keys():
        if then.shared[name] != now.shared[name]:
            found.append(_Other(name, then.shared[name], now.shared[name]))
    yield from sorted(found, key=lambda other: other.order)


def _are_comparable(then: str, now: str) -> bool:
    """Return whether two values are of one form, or a tensor is where None or a number is now."""
    form, other = form_of_value(then), form_of_value(now)
    is_number = _NUMBER.fullmatch(now) and form.endswith(" (")
    return bool(form) and (
        form == other or (form[0] == "#" and (now == NOTHING or bool(is_number)))
    )


class _Steps:
    """Takes steps of a trial with values of another process, to see whether these matter."""

    def __init__(
        self, recipe: Recipe, reader: ObjectReader, example: Example, trial_seed: int
    ) -> None:
        self._recipe = recipe
        self._variables, self._paths = variables_of(reader), paths_of(reader)
        self._classes = {kind.__qualname__: kind for kind in reader.own_classes()}
        self._state = state_of(recipe.model)
        self._steps = lambda: trained(recipe, self._state, example, trial_seed)
        self._plain = self._steps()

    def that_matter(self, others: Sequence[_Other]) -> list[_Other]:
        """Return those that give two steps and an evaluation other bits: one, or some together.

        What an LR schedule has is taken to matter, as it may act later, and so is a tensor that
        can't be set.
        """
        always = [each for each in others if self._always_matters(each)]
        others = [each for each in others if self._is_found(each)]
        if always or not others or self._with(others) == self._plain is not None:
            return always[:1]
        alone = (each for each in others if self._differs([each], each.is_tensor))
        if (one := next(alone, None)) is not None:
            return [one]
        groups = itertools.groupby(others, lambda each: _PART_AT_END.sub("", each.name))
        together = [each for each in (list(group) for _, group in groups) if len(each) > 1]
        return next(filter(self._differs, [*together, [*others]]), [])

    def _always_matters(self, other: _Other) -> bool:
        if other.name.startswith(f"a value{OF_SCHEDULER}"):
            return True
        return other.is_tensor and not self._is_found(other)

    def _is_found(self, other: _Other) -> bool:
        with suppress(Exception):
            self._place(other.name)
            return True
        return False

    def _differs(self, others: Sequence[_Other], if_unknown: bool = False) -> bool:
        found = self._with(others)
        return if_unknown if found is None or self._plain is None else found != self._plain

    def _with(self, others: Sequence[_Other]) -> object:
        """Return what steps give with the values of before, None if they fail."""
        removed = [each for each in others if each.then is None]
        with suppress(Exception), ExitStack() as kept:
            for other in [*(each for each in others if each.then is not None), *removed[::-1]]:
                self._set(other, kept)
            return self._steps()
        return None

    def _set(self, other: _Other, kept: ExitStack) -> None:
        """Give something the value of before; of a tensor other numbers."""
        place, value = self._place(other.name)
        if isinstance(value, Tensor | np.ndarray):
            before = value.clone() if isinstance(value, Tensor) else value.copy()
            kept.callback(_fill, value, before)
            is_bool = before.dtype in (torch.bool, np.dtype(bool))
            _fill(value, ~before if is_bool else before + 1)
        elif place is not None:
            kept.callback(place.set, value)
            place.set(self._then(other, value))

    def _then(self, other: _Other, now: Any) -> object:
        """Return the value of before, or another one than now where that is not known."""
        if other.then is None:
            return ABSENT
        if other.is_tensor:
            return _another(now)
        found = _value_of(other.then, now)
        is_function = found is _does_nothing
        return _another(now, is_function) if is_function or found is _UNKNOWN else found

    def _place(self, name: str) -> tuple[Variable | None, object]:
        """Return what has a value, and the value; of a buffer what steps begin with."""
        if name.startswith("buffer "):
            return None, self._state[name.removeprefix("buffer '").removesuffix("'")]
        first, *parts = self._path(name).split(PART)
        recipe = self._recipe
        functions = {
            "the loss": recipe.loss,
            "the collate": recipe.collate,
            "the training_step": recipe.training_step,
        }
        held = {f"a value of {what}": function for what, function in functions.items()}
        own = (Variable(vars(m), a) for m, a, _ in HeldState(recipe).attributes({first}))
        known = Variable(held, first) if first in held else self._variables.get(first)
        found = known or self._of_class(first) or next(own)
        for part in parts:
            found = _part_of(found, part)
        return found, found.value

    def _path(self, name: str) -> str:
        """Return the path of what a name says, which need not be there, but what it is in."""
        if name in self._paths or " at " not in name:
            return self._paths.get(name, name)
        part = _PART_AT_END.search(name)
        assert part is not None, name
        holder = name[: part.start()].removesuffix(" at ")
        return f"{self._paths[holder]}{PART}{part[0]}"

    def _of_class(self, name: str) -> Variable | None:
        found = _OF_CLASS.fullmatch(name)
        kind = self._classes.get(found[2]) if found else None
        return None if found is None or kind is None else Variable(kind, found[1])


def _another(value: Any, is_function: bool = False) -> object:
    """Return another value of its kind; a function that returns another one than this does.

    Where nothing is, a function does nothing, and whatever computes with anything else fails.
    """
    if value is None:
        return _does_nothing if is_function else _UNKNOWN
    if isinstance(value, np.bool_):
        return ~value
    if isinstance(value, np.generic):
        return type(value)(value.item() + 1)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float | Tensor):
        return value + 1
    if isinstance(value, str):
        return f"{value}."
    if isinstance(value, type) or not callable(value):
        return value

    def another(*args: Any, **more: Any) -> object:
        return _another(found) if (found := value(*args, **more)) is not None else None

    return another


def _does_nothing(*args: Any, **more: Any) -> None:
    """Stand for a function that only logs."""


def _value_of(text: str, now: object) -> object:
    """Return the value that a text tells.

    No function or class is looked up by its name: the text may come from a file that others wrote.
    """
    if text == NOTHING:
        return None
    if not text.startswith(NAMED_KINDS):
        return float(text) if text.strip("-") in ("inf", "nan") else ast.literal_eval(text)
    kind, _, place = text.partition(" ")
    if kind == "enum" and isinstance(now, Enum):
        return type(now).__members__.get(place.partition(" ")[2], _UNKNOWN)
    if kind == "torch.dtype":
        found = getattr(torch, place.rpartition(".")[2], None)
        return found if isinstance(found, torch.dtype) else _UNKNOWN
    return _UNKNOWN if kind == "type" else _does_nothing


@dataclass(frozen=True)
class _Item(Variable):
    """Is an item of a tuple, which is another tuple when it is set."""

    def set(self, value: object) -> None:
        """Let the owner have a tuple with this item, or without it."""
        whole: Any = self.owner.value
        own = [] if value is ABSENT else [value]
        items = [*whole[: self.name], *own, *whole[self.name + 1 :]]
        made = type(whole)._make(items) if hasattr(whole, "_make") else type(whole)(items)
        self.owner.set(made)

    @property
    def value(self) -> object:
        """Return its value."""
        return next(iter(self.owner.value[self.name :]), ABSENT)


def _part_of(variable: Variable, part: str) -> Variable:
    """Return an attribute, an entry or an item of what a variable has."""
    held: Any = variable.value
    if part.startswith("."):
        attributes, name = getattr(held, "__dict__", None), part[1:]
        if attributes is not None and (name in attributes or not hasattr(held, name)):
            return Variable(attributes, name)
        return Variable({name: getattr(held, name)}, name)
    key = ast.literal_eval(part[1:-1])
    return _Item(variable, key) if isinstance(held, tuple) else Variable(held, key)


def _fill(held: Any, values: Any) -> None:
    with torch.no_grad():
        if isinstance(held, Tensor):
            held.copy_(values)
        else:
            held[...] = values
