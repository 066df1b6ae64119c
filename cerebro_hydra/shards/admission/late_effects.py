"""Watches what training changes on a device that hops with no shard, in steps of any number.

Admission has seen the first steps alone. What they changed in an attribute depended on no history;
another one that changes later is lost at the next hop, and so is what depends on it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.policy.audit_budget import AuditBudget
from cerebro_hydra.shards.admission.effects import (
    NOTHING,
    changed,
    extends,
    read_attributes,
    read_optimizer,
)
from cerebro_hydra.shards.engine.differences import EFFECT
from cerebro_hydra.shards.engine.layout import TrialRuntime
from cerebro_hydra.storage.digest import digest

_Attributes = dict[str, Any]

_OF_LEAF = "\0"
FREE_SECONDS = 0.005
"""Seconds of a reading that count as nothing, even if training is short."""

_LONGEST = 64
"""Characters of a value that are told; of a longer one it is the digest."""


class LateEffects:
    """Compares attributes, losses, collate and optimizer before and after a sub-epoch or a step.

    Args:
        trial: its recipe is that which trains.
        known: the attributes that the trial's first steps changed.
        budget: the seconds that readings take beyond `FREE_SECONDS` are added to what it has spent.
    """

    def __init__(self, trial: TrialRuntime, known: Collection[str], budget: AuditBudget) -> None:
        self._recipe = trial.recipe
        self._known = known
        self._budget = budget
        kinds = (
            entry.name.partition(":")[::2]
            for shard in trial.layout.shards
            for entry in (*shard.frozen.entries, *shard.trainable.entries)
        )
        self._buffers = {name for kind, name in kinds if kind == "buffer"}
        self._before: tuple[_Attributes, _Attributes] | None = None
        self._step: tuple[int, _Attributes] | None = None

    def begin(self) -> None:
        """Note what there is before a sub-epoch, while the model has its own tensors."""
        self._before = self._read(), self._read_optimizer(self._recipe.optimizer)

    def check(self, optimizers: Iterable[Optimizer]) -> None:
        """Compare with what there is after the sub-epoch, if its begin was noted.

        Args:
            optimizers: those that made its updates, which were copies of the recipe's.

        Raises:
            ConfigurationError: training changed what it left alone in the trial's first steps.
        """
        if self._before is None:
            return
        (before, of_optimizer), after = self._before, self._read()
        found = {
            name
            for name in changed(before, after)
            if not (_is_shared(name) and _has_grown(before.get(name), after.get(name)))
        }
        for optimizer in optimizers:
            found |= changed(of_optimizer, self._read_optimizer(optimizer))
        if late := sorted(found - set(self._known)):
            raise ConfigurationError(
                f"training changed {late[0]}, as it did not in the trial's first steps; it is no "
                f"part of the state that hops: {_remedy(late[0])}"
            )

    def begin_step(self, window: int) -> None:
        """Note what there is before a step."""
        self._step = window, self._read()

    def of_step(self, window: int) -> Mapping[str, str]:
        """Return what a step has changed since its begin was noted, value by value."""
        if self._step is None or self._step[0] != window:
            return {}
        before, after = dict(_leaves(self._step[1])), dict(_leaves(self._read()))
        self._step = None
        return {name: value for name, value in after.items() if before.get(name) != value}

    def all_values(self) -> Mapping[str, str]:
        """Return everything that there is, value by value."""
        return dict(_leaves(self._read()))

    def _read(self) -> _Attributes:
        begun = time.perf_counter()
        found = read_attributes(self._recipe, self._buffers)
        self._budget.spent += max(0.0, time.perf_counter() - begun - FREE_SECONDS)
        return found

    def _read_optimizer(self, optimizer: Optimizer) -> _Attributes:
        return read_optimizer(optimizer, self._recipe.model)


def _is_shared(name: str) -> bool:
    """Return whether trials may share what has an attribute, so that their first steps found it."""
    return any(holder in name for holder in (" of the loss", " of loss ", " of the collate"))


def _has_grown(before: Any, after: Any) -> bool:
    """Tell whether only entries were added, and values made where there were none."""
    if before is None or before == NOTHING:
        return True
    if isinstance(before, dict) and isinstance(after, dict):
        return all(key in after and _has_grown(each, after[key]) for key, each in before.items())
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        return all(map(_has_grown, before, after))
    return extends(after, before)


def history_told(name: str) -> str:
    """Return the error of an attribute that is another after a step without a history.

    Args:
        name: as `of_step` gives it.
    """
    attribute = name.removeprefix(EFFECT).partition(_OF_LEAF)[0]
    return (
        f"a step leaves another value in {attribute} than the same step of a model that was built "
        f"anew; it depends on earlier steps and is no part of the state that hops: "
        f"{_remedy(attribute)}"
    )


def _remedy(attribute: str) -> str:
    if " of optimizer " in attribute:
        return "keep it in every param group"
    return "register it as a buffer of the model, or let every forward set it anew"


def _leaves(attributes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the values in attributes by names: entries of a dict or a tuple have one each."""
    for name, value in attributes.items():
        yield from _leaves_of(f"{EFFECT}{name}{_OF_LEAF}", value)


def _leaves_of(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves_of(f"{name}[{key}]", each)
    elif isinstance(value, set):
        for each in value:
            yield f"{name}{{{each}}}", ""
    elif isinstance(value, tuple):
        yield f"{name}#", str(len(value))
        for number, each in enumerate(value):
            yield from _leaves_of(f"{name}[{number}]", each)
    else:
        text = repr(value)
        yield name, text if len(text) <= _LONGEST else digest(text.encode())
