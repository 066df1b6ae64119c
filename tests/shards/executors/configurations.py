"""The configurations in which a trial's late findings are compared.

How many shards there are, how the model is cut, what runs it, and how many batches make a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from cerebro_hydra.plan.policy.audit_budget import AuditBudget
from cerebro_hydra.plan.sizing.pipeline import Pipeline
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.effects.late_effects import EarlierReadings, LateEffects
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.engine.visit_run import VisitRun
from tests.shards.executors.test_shards_late_writes import EXECUTORS, in_queues
from tests.shards.executors.worker import Moving, Resident, Worker, shard_run
from tests.shards.hopping import Trial, train_uncut
from tests.shards.trials import SubEpoch

Train = Callable[[Trial, TrialProfile, SubEpoch], object]


def begun(trial: Trial, recipe: Recipe) -> LateEffects:
    known = trial.admission.attributes, trial.admission.set_in_evaluation
    runtime, budget = trial.runtime(recipe), AuditBudget(1.0)
    effects = LateEffects(runtime, *known, budget, EarlierReadings())
    effects.begin()
    return effects


def watched(train: Train) -> Train:
    """Compare what hops with no shard before and after a sub-epoch, as every device does."""

    def run(trial: Trial, profile: TrialProfile, windows: SubEpoch) -> None:
        effects = begun(trial, trial.recipe)
        with effects.ending():
            with effects.watched():
                train(trial, profile, windows)
            effects.check([(trial.recipe.optimizer, None)])

    return run


def uncut(trial: Trial, profile: TrialProfile, windows: SubEpoch) -> None:
    train_uncut(trial, windows, trial.recipe)


def pipelined(
    schedule: str, recompute: bool, trial: Trial, profile: TrialProfile, windows: SubEpoch
) -> None:
    """Train on three devices, each of which has built the model itself."""
    microbatches, window = sum(map(len, windows)), trial.recipe.accumulate
    spec = profile.training(0, microbatches, window, recompute, Pipeline(schedule, 3))
    assert spec.moves
    devices: list[tuple[LateEffects, Recipe]] = []

    def make() -> VisitRun:
        recipe, shared = copy.deepcopy(trial.recipe), trial.cut_model.shared
        devices.append((effects := begun(trial, recipe), recipe))
        stack.enter_context(effects.ending())
        return shard_run(trial, windows, recipe, recompute, shared, None, True)

    with ExitStack() as stack:
        Worker([Resident(trial, spec, Moving(make, spec))], 0, 0, 3).run()
        trial.step += len(windows)
        for effects, recipe in devices:
            effects.check([(recipe.optimizer, None)])


@dataclass(frozen=True)
class Configuration:
    """Says how a trial is trained.

    Args:
        group: what findings go by. "one" has all of the model at any time. In "stays" a shard that
            has come stays until its update, and in "roomy" all come before the first task. In
            "leaves" a shard is there for its own tasks alone. In "graph" the model's own code does
            not run.
        again: whether activations are computed again.
    """

    group: str
    train: Train
    again: bool = False
    shards: int = 2
    cut: str = "modules"
    accumulate: int = 1

    @property
    def key(self) -> tuple[object, ...]:
        """Return what decides how a trial is admitted."""
        return self.shards, self.cut, self.accumulate


keep, again = EXECUTORS["keep"], EXECUTORS["again"]  # which watch by themselves
alone, queue, kept = (watched(EXECUTORS[name]) for name in ("alone", "queue", "kept"))


def several(trial: Trial, profile: TrialProfile, windows: SubEpoch) -> None:
    in_queues(True, 1 / 8, trial, profile, windows, devices=2)


CONFIGURATIONS: dict[str, Configuration] = {
    "one shard": Configuration("one", keep, shards=1),
    "one shard in queues": Configuration("one", queue, shards=1),
    "uncut": Configuration("one", watched(uncut)),
    "shards": Configuration("stays", keep),
    "recomputed": Configuration("stays", again, again=True),
    "alone": Configuration("leaves", alone, again=True),
    "small device": Configuration("leaves", queue, again=True),
    "small devices": Configuration("leaves", watched(several), again=True),
    "roomy device": Configuration("roomy", kept),
    "accumulated": Configuration("stays", keep, accumulate=2),
    "accumulated, alone": Configuration("leaves", alone, again=True, accumulate=2),
    "accumulated, small device": Configuration("leaves", queue, again=True, accumulate=2),
    "graph": Configuration("graph", keep, cut="export"),
    "graph, recomputed": Configuration("graph", again, again=True, cut="export"),
    "graph, small device": Configuration("graph", queue, again=True, cut="export"),
    "graph, accumulated": Configuration("graph", keep, cut="export", accumulate=2),
    "gpipe": Configuration(
        "graph", watched(partial(pipelined, "gpipe", False)), cut="export", accumulate=2
    ),
    "1f1b, recomputed": Configuration(
        "graph", watched(partial(pipelined, "1f1b", True)), again=True, cut="export", accumulate=2
    ),
}
MODULES = frozenset({"one", "stays", "roomy", "leaves"})
SHARDS = frozenset({"stays", "roomy", "leaves"})
ALL = MODULES | {"graph"}
