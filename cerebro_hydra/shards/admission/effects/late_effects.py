"""Watches what training changes on a device that hops with no shard, in steps of any number.

Admission has seen the first steps alone. What they changed in an attribute depended on no history;
another one that changes later is lost at the next hop, and so is what depends on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.policy.audit_budget import AuditBudget
from cerebro_hydra.recipe.optimizer_list import let_go
from cerebro_hydra.shards.admission.effects.as_built import AsBuilt
from cerebro_hydra.shards.admission.effects.held_state import HeldState, SetBefore
from cerebro_hydra.shards.admission.effects.object_reader import ObjectReader
from cerebro_hydra.shards.admission.effects.readings import (
    PART,
    KnownChanges,
    Reading,
    changed,
    have_grown,
    is_of_process,
    is_shared,
    moved_on,
    name_of,
    told,
)
from cerebro_hydra.shards.admission.effects.shared_watch import SharedWatch
from cerebro_hydra.shards.admission.effects.training_effects import IN_ATTRIBUTE, SET_ANEW, remedy
from cerebro_hydra.shards.admission.global_draws import GlobalDraws
from cerebro_hydra.shards.cut.second_names import told_if_nan
from cerebro_hydra.shards.cut.values import BuiltAttributes
from cerebro_hydra.shards.engine.differences import EFFECT
from cerebro_hydra.shards.engine.layout import TrialRuntime
from cerebro_hydra.shards.engine.optimizer import clone_optimizer

FREE_SECONDS = 0.005
"""Seconds of a processor that a reading takes for nothing, even if training is short."""


@dataclass
class EarlierReadings:
    """Holds what earlier visits of a process have read of one model.

    Attributes:
        latest: after the latest visit that looked at all, if that takes time; what trials share is
            left out.
        missed: whether visits came after it that did not.
        seconds: what that reading took.
        beside: the seconds that it took to read what is beside the model.
        made: what the first step has made for good, None before it.
        built: the attributes that the trial's first steps changed, as the model was built.
        texts: those that stand in the code of what was read, once someone has asked for them.
        as_built: what the model's factory has left of what trials share.
    """

    latest: Reading | None = None
    missed: bool = False
    seconds: float = math.inf
    beside: float = 0.0
    made: Reading | None = None
    built: BuiltAttributes | None = None
    texts: frozenset[str] | None = None
    as_built: AsBuilt = field(default_factory=AsBuilt)

    def give_back(self, model: nn.Module, held: HeldState, names: Collection[str]) -> None:
        """Let attributes be as the model was built, as on a worker that did so only now.

        Args:
            model: is as it was built the first time.
            held: reads it.
            names: of what the trial's first steps changed.
        """
        if self.built is None:
            places = [(module, attribute) for module, attribute, _ in held.attributes(names)]
            self.built = BuiltAttributes(model, [*places, *held.hooks(names)])
        self.built.give_back()

    def texts_in_code(self, held: HeldState) -> frozenset[str]:
        """Return the texts that stand in the code of what `held` reads."""
        if self.texts is None:
            self.texts = held.read_all().texts_in_code()
        return self.texts


class LateEffects:
    """Compares attributes, losses, collate and optimizer before and after a sub-epoch or a step.

    Args:
        trial: its recipe is that which trains.
        known: the marks of what the trial's first steps changed; see `KnownChanges`.
        evaluated: what admission's evaluations changed.
        budget: the seconds that readings take beyond `FREE_SECONDS` are added to what it has spent.
        earlier: of the recipe's model.
    """

    def __init__(
        self,
        trial: TrialRuntime,
        known: Collection[str],
        evaluated: Collection[str],
        budget: AuditBudget,
        earlier: EarlierReadings,
    ) -> None:
        self._trial, self._recipe = trial, trial.recipe
        self._known = KnownChanges(known)
        self._evaluated = frozenset(evaluated)
        self._budget = budget
        self._earlier = earlier
        kinds = (
            entry.name.partition(":")[::2]
            for shard in trial.layout.shards
            for entry in (*shard.frozen.entries, *shard.trainable.entries)
        )
        self._held = HeldState(trial.recipe, {name for kind, name in kinds if kind == "buffer"})
        self._by_graph = trial.cut_model.graphs is not None  # which sets no attributes
        self._draws = GlobalDraws()
        self._texts = partial(earlier.texts_in_code, self._held)
        self._shared = SharedWatch(self._known, self._evaluated, self._texts, earlier.as_built)
        self.find_as_alone()
        self._before: tuple[Reading, Reading, Reading] | None = None
        self._between: set[str] = set()  # changed in visits that did not look
        self._whole = self._beside = True
        self._step: tuple[int, Reading] | None = None

    def find_as_alone(self) -> None:
        """Let what others share with the trial be as if it were alone in its process."""
        self._shared.find_as_alone()

    def begin(self, whole: bool = True, looks: bool = True) -> None:
        """Begin a sub-epoch with the attributes that the model was built with, and note the rest.

        Args:
            whole: whether there is time to look at all of it; else no more than plain attributes
                and what else takes no time is read.
            looks: whether anything is compared afterwards.
        """
        if not self._by_graph:
            self._earlier.give_back(self._recipe.model, self._held, self._known.names)
        if looks:
            self._note(whole)
            self._held.stand_in(() if self._by_graph else self._known.anew, SetBefore)

    def _note(self, whole: bool) -> None:
        earlier, optimizer = self._earlier, self._recipe.optimizer
        self._whole = whole or earlier.seconds <= FREE_SECONDS
        self._beside = self._whole or earlier.beside <= FREE_SECONDS
        reader, of_optimizer, of_schedule = self._read_now(), Reading(), Reading()
        found = reader.found
        if self._beside:
            of_optimizer, of_schedule = self._held.read_optimizer(optimizer), self._read_schedule()
            self._shared.begin(reader)
        self._before = found, of_optimizer, of_schedule
        if not self._whole:
            earlier.missed = True
        elif earlier.missed and earlier.latest is not None:
            between = changed(earlier.latest, _own(found))
            self._between = {path for path in between if name_of(path) not in self._evaluated}

    def give_back(self) -> None:
        """Let attributes be as they were built that no step has set since `begin` took them."""
        if self._earlier.built is not None:
            self._earlier.built.give_back(lambda present: isinstance(present, SetBefore))

    @property
    def awaits_first_step(self) -> bool:
        """Return whether the process's first step may make something for good."""
        return self._before is not None and self._earlier.made is None and bool(self._known.made)

    def first_step_ended(self) -> None:
        """Note what that step has made, which those of later sub-epochs make again."""
        reading = self._read_now().found
        self._earlier.made = {path: reading[path] for path in self._known.made & reading.keys()}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the generators of Python and NumPy while the trial computes.

        Raises:
            NonFiniteLoss: see `told_if_nan`.
        """
        with self._shared.computing(), told_if_nan(self._trial.spoilt), self._draws.watched():
            yield

    def check(self, optimizers: Iterable[tuple[Optimizer, Any]]) -> None:
        """Compare with what there is after the sub-epoch, if its begin was noted.

        Args:
            optimizers: those that made its updates, which were copies of the recipe's, each with
                its LR scheduler, or None.

        Raises:
            ConfigurationError: training changed what it left alone in the trial's first steps, or
                drew random numbers that restart nowhere.
        """
        self._draws.check()
        if self._before is None:
            return
        before, of_optimizer, of_schedule = self._before
        self._shared.find_as_alone()
        reader = self._read_now()
        after = reader.found
        found = self._changed(before, after)
        for optimizer, scheduler in optimizers if self._beside else ():
            found |= changed(of_optimizer, self._held.read_optimizer(optimizer))
            if scheduler is not None:
                found |= changed(of_schedule, self._held.read_scheduler(scheduler))
        found = self._not_known(found | self._between)
        made = (self._earlier.made or {}).items()
        found |= {p for p, text in made if moved_on(text, after.get(p), before.get(p))}
        found -= self._shared.made_by_builds(found, reader)
        if late := sorted(self._shared.late or found, key=_by_cause):
            if not self._shared.late:
                self._shared.check_cause(late, reader)
            instead = remedy(late[0], after.get(late[0], ""))
            if PART in late[0]:
                instead = instead.replace(SET_ANEW, IN_ATTRIBUTE)
            if late[0].startswith("attribute ") and instead.endswith((SET_ANEW, IN_ATTRIBUTE)):
                instead += ", with None before the first one"  # else these steps do not change it
            raise ConfigurationError(
                f"training changed {told(late[0])}, as it did not in the trial's first steps; it "
                f"is no part of the state that hops: {instead}"
            )
        if self._beside:
            self._shared.check(after)
        if self._whole:
            takes_time = self._earlier.seconds > FREE_SECONDS
            self._earlier.latest = _own(after) if takes_time else None
            self._earlier.missed = False

    def ending(self) -> AbstractContextManager[None]:
        """Let the body end the visit; if it fails, others have what they shared before it."""
        return self._shared.ending(self.abandon)

    def abandon(self) -> None:
        """Give back what trials share, as far as the trial should not have changed it."""
        if self._before is not None and self._beside:
            with suppress(Exception):  # of code that can't be looked at where it failed
                self._shared.find_as_alone()
                reader = self._read_now()
                late = self._not_known(self._changed(self._before[0], reader.found))
                late -= self._shared.made_by_builds(late, reader)
                self._shared.give_back(late, reader, lambda: self._read_now().found)
        self._shared.end()

    def _changed(self, before: Reading, after: Reading) -> set[str]:
        """Return what changed, but for caches that trials share."""
        found = changed(before, after)
        in_order = {path for path in found if before.get(path) == after.get(path)}
        new = have_grown(found, before, after)
        grown = {p for p in new if self._known.may_grow(p, before, self._texts)}
        return found - grown - {path for path in in_order if is_shared(path)}

    def _not_known(self, found: set[str]) -> set[str]:
        keys = self._texts() if any(PART in path for path in found) else ()
        return {path for path in found if not self._known.covers(path, keys)}

    def begin_step(self, window: int) -> None:
        """Note what there is before a step."""
        self._step = window, self._read_whole().found

    def of_step(self, window: int) -> Mapping[str, str]:
        """Return what a step has changed since its begin was noted, value by value."""
        if self._step is None or self._step[0] != window:
            return {}
        before, after = self._step[1], self._read_whole().found
        self._step = None
        found = ((path, v) for path, v in after.items() if before.get(path) != v)
        return {EFFECT + path: v for path, v in found if not is_of_process(path)}

    def all_values(self) -> Mapping[str, str]:
        """Return everything that there is, value by value."""
        return {EFFECT + path: value for path, value in self._read_whole().found.items()}

    def _read_schedule(self) -> Reading:
        """Return what an LR scheduler holds that is made anew, as each visit makes its own."""
        recipe = self._recipe
        if recipe.lr_scheduler is None:
            return {}
        same = {id(parameter): parameter for parameter in recipe.model.parameters()}
        optimizer = clone_optimizer(recipe.optimizer, same)
        try:
            scheduler = recipe.lr_schedule.make(optimizer, self._trial.steps_per_epoch)
            return self._held.read_scheduler(scheduler)
        finally:
            let_go(optimizer)

    def _read_now(self) -> ObjectReader:
        """Return what has read all of it, or what there is time for."""
        if self._whole:
            return self._read_whole()
        if not self._beside:
            return self._held.read_plain()
        begun = time.thread_time()
        reader = self._held.read_beside()
        seconds = self._earlier.beside = time.thread_time() - begun
        self._budget.spent += max(0.0, seconds - FREE_SECONDS)
        reader.found.update(self._held.read_plain().found)
        return reader

    def _read_whole(self) -> ObjectReader:
        begun = time.thread_time()
        reader = self._held.read_all()
        seconds = self._earlier.seconds = time.thread_time() - begun
        self._budget.spent += max(0.0, seconds - FREE_SECONDS)
        return reader


def _by_cause(path: str) -> tuple[bool, bool, str]:
    """Return what sorts changed values, so that the first one tells what was done.

    What another module holds in a module's place follows from its class. An object that one of a
    trial's attributes has no more is read where the process has it.
    """
    return not path.startswith("the class"), is_of_process(path), path


def _own(reading: Reading) -> Reading:
    """Return what no other trial of the process may change."""
    return {path: text for path, text in reading.items() if not is_shared(path)}


def history_told(name: str) -> str:
    """Return the error of a value that is another after a step without a history.

    Args:
        name: as `of_step` gives it.
    """
    path = name.removeprefix(EFFECT)
    return (
        f"a step leaves another value in {told(path)} than the same step of a model that was built "
        f"anew; it depends on earlier steps and is no part of the state that hops: {remedy(path)}"
    )
