"""Trials in a pipeline that is not flushed have the bits of the sequential reference.

Devices have little memory or much, and die; versions of weights that no task may read any more are
poisoned.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cerebro_hydra.errors import NonFiniteLoss
from cerebro_hydra.plan.messages.actions import Part
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.registry import with_versions
from cerebro_hydra.plan.sizing.pipeline import Pipeline
from cerebro_hydra.plan.sizing.stages import versions_held
from cerebro_hydra.recipe import PlainTrainer, Recipe
from cerebro_hydra.replay.stale_weights import train_stale
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.engine.microbatch import Execution, SubEpochInput
from cerebro_hydra.shards.engine.state import WeightVersions
from cerebro_hydra.shards.engine.visit_run import VisitRun
from cerebro_hydra.testing.model_case import assert_same_state
from tests.examples import examples
from tests.shards import plain, zoo
from tests.shards.executors.executor_case import described
from tests.shards.executors.worker import Moving, Resident, Slot, Staying, Worker, shard_run
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start
from tests.shards.trials import (
    Make,
    SubEpoch,
    first_layer_frozen,
    first_token_loss,
    language_recipe,
    mlp_recipe,
    momentum,
    recipe_of,
    resnet_recipe,
)

DEVICES = 3
STALE = [("pipedream", False), ("pipedream", True), ("2bw", False)]


def sub_epochs(batches: Callable[..., list], window: int) -> list[SubEpoch]:
    """Return two sub-epochs of some windows, of which the last one is smaller."""
    found = []
    for seed, number in ((0, 7), (1, 5)):
        given_batches = batches(*[4] * (number - 1), 3, seed=seed)
        found.append([given_batches[n : n + window] for n in range(0, number, window)])
    return found


MODELS: dict[str, tuple[Make, Callable[..., list]]] = {
    "mlp": (mlp_recipe(), zoo.vectors),
    "average": (mlp_recipe(optimizer=momentum, ema=0.9, clip_grad_value=0.01), zoo.vectors),
    "frozen": (mlp_recipe(model=first_layer_frozen), zoo.vectors),
    "resnet": (resnet_recipe(5, clip_grad_norm=None), zoo.images),
    "tied": (language_recipe(["blocks.2", "blocks.4", "blocks.6"], zoo.Tied), zoo.tokens),
    "bert": (recipe_of(zoo.bert, loss=first_token_loss, shards=3), zoo.tokens),
    "llama": (language_recipe(model=zoo.llama, optimizer=momentum), zoo.tokens),
}


@dataclass
class Stale:
    """Holds a trial that is cut, and what the sequential reference makes of it."""

    make: Make
    trial: Trial
    schedule: str
    sub_epochs: list[SubEpoch]
    sums: list[float]
    reference: PlainTrainer
    profile: TrialProfile
    first: list

    def spec(self, number: int, recompute: bool, devices: int) -> VisitSpec:
        microbatches = sum(map(len, self.sub_epochs[number]))
        window, stale = self.trial.recipe.accumulate, self.trial.staleness
        pipeline = Pipeline(self.schedule, devices, staleness=stale)
        return self.profile.training(0, microbatches, window, recompute, pipeline)

    def resident(self, number: int, recompute: bool, devices: int) -> Resident:
        """Return a visit of one of the trial's sub-epochs."""
        spec, windows, trial = (
            self.spec(number, recompute, devices),
            self.sub_epochs[number],
            self.trial,
        )

        def make() -> VisitRun:
            return shard_run(
                trial, windows, self.make(), recompute, trial.cut_model.shared, moves=spec.moves,
                crossings=spec.crossings,
            )  # fmt: skip

        visit = Moving(make, spec, trial.step) if spec.moves else Staying(make)
        return Resident(trial, spec, visit)

    def prove(
        self, recompute: bool, devices: int, share: float = 0, seed: int = 0, deaths: int = 0
    ) -> list[Resident]:
        """Train from state 0 to the end in a worker, and compare every bit."""
        self.trial.shards, self.trial.step = self.first.copy(), 0
        residents, sums = [], []
        for number, windows in enumerate(self.sub_epochs):
            resident = self.resident(number, recompute, devices)
            worker = Worker([resident], seed + number, share, devices, deaths)
            worker.run()
            if deaths:
                event(f"restarts: {worker.restarts}")
            self.trial.step += len(windows)
            residents.append(resident)
            sums.append(resident.loss_sum)
        self.check(sums)
        return residents

    def check(self, sums: list[float]) -> None:
        """Compare losses, state and learning rates with the reference."""
        assert sums == self.sums
        assert_same_state(self.trial.tensors(), self.reference)
        expected = [group["lr"] for group in self.reference.recipe.optimizer.param_groups]
        for k in range(self.trial.cut_model.num_shards):
            assert [group["lr"] for group in self.trial.cursor(k)["groups"]] == expected


@functools.cache
def stale(model: str, schedule: str, sync: bool, stages: int = DEVICES, **rules: object) -> Stale:
    plainly, batches = MODELS[model]
    window = 1 if schedule == "pipedream" else 3

    def make() -> Recipe:
        return replace(plainly(), cut="export", accumulate=window, **rules)

    each = sub_epochs(batches, window)
    trial = start(make(), [window for windows in each for window in windows])
    assert trial.admission.spec.mode == "export", trial.admission.report.text()
    cut = trial.cut_model
    graph = TaskGraph(cut.num_shards, window, window, False, tuple(cut.tied_groups))
    trial.staleness = with_versions(graph, schedule, stages, sync).staleness
    lags = {p.name: trial.staleness[p.owner] for p in cut.params if not p.frozen}
    reference = PlainTrainer(make(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    sums = [train_stale(reference, windows, lags)[0] for windows in each]
    profile = described(trial, [window for windows in each for window in windows])
    return Stale(make, trial, schedule, each, sums, reference, profile, trial.shards.copy())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("schedule", "sync"), STALE)
def test_bits_are_those_of_the_reference_and_versions_are_as_many_as_promised(
    schedule: str, sync: bool, recompute: bool
) -> None:
    each = stale("mlp", schedule, sync)
    first, _ = each.prove(recompute, DEVICES)
    assert max(map(len, first.visit.places.values())) > 1
    stages = first.spec.graph.stages(DEVICES)
    updates = first.spec.graph.windows
    for place, stage in enumerate(stages):
        most = versions_held(schedule, place, len(stages), updates, sync)
        assert [first.visit.held[k] for k in stage] == [most] * len(stage)


@pytest.mark.parametrize(("schedule", "sync"), STALE)
def test_a_device_and_the_bill_count_each_older_version(schedule: str, sync: bool) -> None:
    each = stale("mlp", schedule, sync)
    spec = each.spec(0, True, DEVICES)
    plainly = replace(each, trial=copy.copy(each.trial))
    plainly.trial.staleness, plainly.schedule = (), "1f1b"
    flushed = plainly.spec(0, True, DEVICES)
    parameters = [shard.gradients for shard in each.profile.shards]
    for k, stale_by in enumerate(each.trial.staleness):
        more = spec.shards[k].state - flushed.shards[k].state
        assert more == stale_by * parameters[k] and parameters[k] > 0
        assert spec.shards[k].sizes[Part.PARAMETERS] >= more, "forwards read them"


def test_older_weights_give_other_bits_than_plain_training() -> None:
    each = stale("mlp", "2bw", False)
    plainly = PlainTrainer(each.make(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    assert plainly.train(each.sub_epochs[0])[0] != each.sums[0]


def test_a_pipeline_that_reads_the_newest_weights_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    read = WeightVersions.read
    monkeypatch.setattr(WeightVersions, "read", lambda self, version: read(self, self._newest))
    each = stale("mlp", "pipedream", True)
    with pytest.raises((AssertionError, NonFiniteLoss)):
        each.prove(False, DEVICES)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("schedule", "sync"), STALE)
def test_fewer_devices_than_it_was_admitted_for_change_no_bit(
    schedule: str, sync: bool, devices: int
) -> None:
    for recompute in (False, True):
        stale("mlp", schedule, sync).prove(recompute, devices)


@pytest.mark.parametrize(("schedule", "sync"), STALE)
def test_a_device_that_computes_in_the_agents_memory_has_the_same_bits(
    schedule: str, sync: bool
) -> None:
    each = stale("mlp", schedule, sync)
    trial = each.trial
    trial.shards, trial.step, sums = each.first.copy(), 0, []
    for number, windows in enumerate(each.sub_epochs):
        graph = each.spec(number, False, 1).graph
        tasks = iter([task for n in range(graph.windows) for task in graph.tasks(0, n)])
        given = SubEpochInput(trial.step, windows, steps=len(windows))
        visit = VisitRun(trial.runtime(each.make()), given, Execution(resident=True))
        slots = [Slot.received(trial, k) for k in range(graph.shards)]
        for k, slot in enumerate(slots):
            slot.load(visit, k)
        for task in tasks:
            visit.perform(task, then=lambda _, left=tasks: next(left))
        for k, slot in enumerate(slots):
            content = {name: buffer.tobytes() for name, buffer in slot.segments.items()}
            trial.shards[k] = content, json.dumps(visit.cursor(k))
        visit.close()
        sums.append(visit.totals.loss_sum)
        trial.step += len(windows)
    each.check(sums)


@pytest.mark.parametrize(
    ("model", "schedule", "sync", "recompute"),
    [
        ("resnet", "pipedream", False, True),
        ("resnet", "2bw", False, False),
        ("tied", "pipedream", True, False),
        ("tied", "2bw", False, True),
        ("frozen", "pipedream", False, False),
        ("average", "2bw", False, False),
        *(
            pytest.param(*each, recompute, marks=pytest.mark.long)
            for each in [
                ("bert", "pipedream", False), ("bert", "2bw", False), ("llama", "pipedream", True),
                ("llama", "2bw", False), ("average", "pipedream", True), ("frozen", "2bw", False),
            ]
            for recompute in (False, True)
        ),
    ],
)  # fmt: skip
def test_each_kind_of_model(model: str, schedule: str, sync: bool, recompute: bool) -> None:
    stale(model, schedule, sync).prove(recompute, DEVICES)


@pytest.mark.parametrize("recompute", [False, True])
def test_clipping_by_the_norm_of_all_shards_waits_in_2bw(recompute: bool) -> None:
    stale("mlp", "2bw", False, clip_grad_norm=0.05).prove(recompute, DEVICES)


@pytest.mark.long
@settings(max_examples=examples(15), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    deaths=st.integers(0, 6),
    which=st.sampled_from([("mlp", *STALE[0]), ("tied", *STALE[1]), ("resnet", *STALE[2])]),
    recompute=st.booleans(),
)
def test_devices_that_die_change_no_bit(
    seed: int, deaths: int, which: tuple[str, str, bool], recompute: bool
) -> None:
    """Units are done again, or whole sub-epochs; shards leave devices between their tasks."""
    stale(*which).prove(recompute, 2 + seed % 2, seed % 3, seed, deaths)
