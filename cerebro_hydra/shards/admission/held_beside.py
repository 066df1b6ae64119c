"""Gives back what loss, collate and metrics hold, so that an evaluation is the first one again."""

from __future__ import annotations

import types
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.effects.filled_caches import MOST_ITEMS, Variable
from cerebro_hydra.shards.admission.effects.held_state import HeldState
from cerebro_hydra.shards.admission.effects.readings import is_of_process
from cerebro_hydra.shards.cut.values import Contents, held_by

_LEFT_OUT = (type, types.ModuleType, types.FunctionType, nn.Module, Tensor)


class HeldBeside:
    """Holds what loss, collate and metrics have now, but not what is in tensors.

    That is attributes of losses that are modules, what others close over, what objects and
    containers have there, and the variables that they name, as all of the trial's code does.
    """

    def __init__(self, recipe: Recipe) -> None:
        metrics = (metric.function for metric in recipe.metric_list)
        self._cells = list[tuple[types.CellType, Any]]()
        self._held = list[tuple[Any, Contents]]()
        seen, left = dict[int, Any](), [recipe.collate, *recipe.losses, *metrics]
        while left:
            each = left.pop()
            if id(each) in seen:
                continue
            seen[id(each)] = each
            if isinstance(each, types.FunctionType):
                for cell in each.__closure__ or ():
                    with suppress(ValueError):  # it is empty
                        self._cells.append((cell, cell.cell_contents))
                        left.append(cell.cell_contents)
                left += [*(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values()]
                left.append(vars(each))
            else:
                self._held += held_by(each, _is_left_out)
        losses = [each for each in recipe.losses if isinstance(each, nn.Module)]
        modules = [each for loss in losses for each in loss.modules()]
        self._modules = [(vars(each), _own(vars(each))) for each in modules]
        variables = dict[str, Variable]()
        with suppress(Exception):  # admission looks at it again, and tells why it can't be read
            reader = HeldState(recipe).read_whole()
            variables = {**reader.variables, **reader.class_attributes}
            containers = [e for path, e in reader.containers.items() if is_of_process(path)]
            self._held += [(e, Contents.of(e)) for e in containers if len(e) <= MOST_ITEMS]
        self._variables = [
            (variable, variable.value)
            for path, variable in variables.items()
            if is_of_process(path) and not isinstance(variable.value, _LEFT_OUT)
        ]

    def give_back(self) -> None:
        """Let all of it be as it was."""
        for cell, value in self._cells:
            cell.cell_contents = value
        for holder, contents in self._held:
            if not Contents.of(holder).is_same(contents):
                contents.fill(holder)
        for attributes, before in self._modules:
            for name in _own(attributes).keys() - before.keys():
                del attributes[name]
            attributes.update(before)
        for variable, value in self._variables:
            if variable.value is not value:
                variable.set(value)


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if not name.startswith("_")}


def _is_left_out(value: Any) -> bool:
    large = isinstance(value, dict | list | set) and len(value) > MOST_ITEMS
    return large or isinstance(value, _LEFT_OUT)
