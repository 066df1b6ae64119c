"""Chooses how trials train by `plan="auto"`, when they are admitted, and says what that saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.observe.planned import PlannedRun
from cerebro_hydra.plan.costs.model import CostModel
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.schedules.registry import is_flushed, is_pipelined
from cerebro_hydra.plan.schedules.trial_plan import TrialPlan
from cerebro_hydra.planning.choice import Choice, SearchJudge, choose, ways
from cerebro_hydra.planning.planned_trials import PlannedTrial, trial_spec
from cerebro_hydra.planning.simulated_search import Place
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.checked_parts import AUTO
from cerebro_hydra.shards.admission.admit import AdmittedCut

PLANNING_SECONDS = 5.0
"""Seconds of CPU in which ways to train are judged, for trials that are alike."""

_FINEST = 1_000_000  # shards, of which there are as many as a model has units


@dataclass(frozen=True)
class Outlook:
    """Says what is known of a search when one of its candidates is admitted.

    Args:
        candidates: how many were proposed so far, this one and those before it too.
        epochs: how long it may train.
    """

    candidates: int
    epochs: int


ALONE = Outlook(1, 1)
"""A search of which no more is known than one candidate."""


@dataclass(frozen=True)
class _Known:
    """Holds what was chosen for trials that are alike: the places of cuts, and the rest."""

    at: tuple[str, ...] | None
    mode: Any
    plan: TrialPlan | None


class AutoPlan:
    """Chooses for the trials of one run; those that are alike train alike.

    Args:
        resources: what each worker has.
        num_workers: how many there are.
        manifest: describes the rows.
        costs: of moves and hops.
        report: is given a line for each choice.
        keep: is given what is expected of the run after each choice.
        seconds: of CPU, in which ways are judged; the plain one is in any case.
    """

    def __init__(
        self,
        resources: WorkerResources,
        num_workers: int,
        manifest: Manifest,
        costs: CostModel,
        report: Callable[[str], None],
        keep: Callable[[PlannedRun], object],
        seconds: float = PLANNING_SECONDS,
    ) -> None:
        train, val = (
            sum(info.rows for info in manifest.partitions if info.split == split)
            for split in ("train", "val")
        )
        shared = [
            tuple((rows + worker) // num_workers for worker in range(num_workers))
            for rows in (train, val)
        ]
        config = HopConfig(num_workers, evaluate=manifest.has_validation)
        self._judge = SearchJudge(config, Place(num_workers, resources, *shared), costs)
        self._resources = resources
        self._rows = [manifest.rows("train", p) for p in range(manifest.num_partitions)]
        self._report, self._keep, self._seconds = report, keep, seconds
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._chosen: list[PlannedTrial] = []  # of the trials so far
        self._told: dict[str, None] = {}  # in order

    def choose(
        self,
        recipe: Recipe,
        plain: AdmittedCut,
        cut: Callable[[], AdmittedCut],
        outlook: Outlook,
    ) -> tuple[AdmittedCut, TrialPlan | None]:
        """Return how a trial is cut, and its plan; None where nothing but the plain choice is left.

        Args:
            recipe: of the trial; it is as before afterwards.
            plain: how it is cut without a plan.
            cut: admits the recipe as it is at that moment.
            outlook: what is known of the search.
        """
        if reason := self._nothing_to_choose(recipe):
            self._tell(f"plan: {reason}")
            return plain, None
        trial = self._sketch(recipe, plain)
        key = (trial.structure, trial.spec.schedule, trial.spec.recompute, str(recipe.shards))
        if key not in self._known:
            self._known[key] = self._found(recipe, trial, cut, outlook)
        known = self._known[key]
        admitted = plain if known.at is None else self._cut_at(recipe, known, cut)
        if admitted is None:  # of a model that is built otherwise from other parameters
            self._chosen.append(trial)
            return plain, None
        planned = self._sketch(recipe, admitted, known.plan)
        if known.plan not in (None, planned.plan_followed(self._resources)):
            self._tell(
                "plan: what was chosen does not fit as it was measured; the plain choice stays"
            )
            self._known[key] = _Known(None, None, None)
            admitted, planned = plain, trial
        self._chosen.append(planned)
        return admitted, planned.spec.plan

    def _nothing_to_choose(self, recipe: Recipe) -> str:
        if not is_flushed(recipe.schedule):
            return f"schedule={recipe.schedule!r} reads older weights, so it stays as it is"
        if recipe.stages != AUTO:
            return f"stages={recipe.stages!r} was given, so schedule and cut stay as they are"
        if recipe.shards == 1:
            return "shards is 1, so each trial stays in one piece; shards='auto' lets a plan cut it"
        if self._resources.devices == 1 and self._resources.device_memory is None:
            return "each worker has one device without a limit, so there is nothing to choose"
        return ""

    def _found(
        self,
        recipe: Recipe,
        trial: PlannedTrial,
        cut: Callable[[], AdmittedCut],
        outlook: Outlook,
    ) -> _Known:
        is_free = recipe.shards == AUTO
        begun = time.thread_time()
        units = self._units(recipe, cut)
        build = time.thread_time() - begun  # which devices take, too, and the comparison is in it
        finest = None if units is None else self._sketch(recipe, units)
        alike = max(1, outlook.candidates - len(self._chosen))
        possible = ways(trial, finest, self._resources, is_free)
        begun = time.thread_time()
        choice = choose(
            self._judge, possible, self._chosen, alike, outlook.epochs,
            lambda: (time.thread_time() - begun) / self._seconds, build,
        )  # fmt: skip
        self._tell(choice.text(outlook.candidates))
        expected = [*self._chosen, *[choice.way.trial] * alike]
        lanes = self._judge.lanes(expected, outlook.epochs)
        told = tuple(self._told)
        self._keep(PlannedRun(told, choice.seconds, choice.plain_seconds, lanes))
        return _known(choice, units)

    def _units(self, recipe: Recipe, cut: Callable[[], AdmittedCut]) -> AdmittedCut | None:
        """Return the trial in the smallest shards that the user allows; None if it can't be cut."""
        graph = self._resources.devices > 1 and recipe.cut != "modules"
        fields: dict[str, Any] = {"shards": _FINEST} if recipe.shards == AUTO else {}
        if graph and not is_pipelined(recipe.schedule):
            fields["schedule"] = "1f1b"
        with _having(recipe, **fields):
            try:
                return cut()
            except ConfigurationError as error:
                why = _first_line(error)
                self._tell(f"plan: the model can't be trained on several devices at once: {why}")
                return None

    def _cut_at(
        self, recipe: Recipe, known: _Known, cut: Callable[[], AdmittedCut]
    ) -> AdmittedCut | None:
        """Return the trial as one that is alike is cut; None if it can't be."""
        assert known.at is not None and known.plan is not None
        fields: dict[str, Any] = {"shards": 1}
        if known.at:
            fields = {"shards": list(known.at), "cut": known.mode, "schedule": known.plan.schedule}
        with _having(recipe, **fields):
            try:
                return cut()
            except ConfigurationError as error:
                self._tell(f"plan: a trial can't be cut as one that is alike: {_first_line(error)}")
                return None

    def _sketch(
        self, recipe: Recipe, cut: AdmittedCut, plan: TrialPlan | None = None
    ) -> PlannedTrial:
        """Return a trial as it is planned; its number and its states do not matter."""
        return PlannedTrial(trial_spec(recipe, cut, self._rows, plan), admission=0.0)

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told[line] = None
            self._report(line)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _known(choice: Choice, units: AdmittedCut | None) -> _Known:
    cuts = choice.way.cuts
    if cuts is None or units is None:
        return _Known(None, None, choice.way.trial.spec.plan)
    at = tuple(units.spec.at[unit - 1] for unit in cuts)
    return _Known(at, units.spec.mode, choice.way.trial.spec.plan)


@contextmanager
def _having(recipe: Recipe, **fields: Any) -> Iterator[None]:
    """Let a recipe have other fields while the body runs."""
    before = {name: getattr(recipe, name) for name in fields}
    try:
        for name, value in fields.items():
            setattr(recipe, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(recipe, name, value)
