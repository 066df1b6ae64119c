"""How trials train by a plan: what may be chosen, what is chosen, and who follows it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.plan.costs.model import CostModel
from cerebro_hydra.plan.costs.moves import MoveRates
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.queues.visit_spec import ShardSpec
from cerebro_hydra.plan.schedules.registry import FLUSHED
from cerebro_hydra.plan.schedules.trial_plan import TrialPlan
from cerebro_hydra.planning.choice import Choice, SearchJudge, choose, ways
from cerebro_hydra.planning.planned_trials import PlannedTrial, as_measured
from cerebro_hydra.planning.simulated_search import Place
from cerebro_hydra.shards.admission.trial_profile import TaskProfile, TrialProfile
from cerebro_hydra.shards.engine.layout import ShardBytes
from cerebro_hydra.storage.run_document import TrialSpec
from tests.planning.test_planning_earlier_run import spec_of

UNITS, WINDOW = 6, 6
STATE, ACTIVATIONS = 100, 10


def trial(units: int, seconds: float = 1.0, **fields: Any) -> PlannedTrial:
    """Return a trial of so many units, in graphs; a microbatch takes three times the seconds."""
    each = seconds / units
    keep = (ShardSpec(0, ACTIVATIONS * UNITS // units, 1, each, 2 * each),) * units
    again = tuple(replace(need, backward=3 * each) for need in keep)
    tasks = TaskProfile(keep, keep, again, (), 8, (1,) * units, (1,) * units)
    shard = ShardBytes(0, STATE * UNITS // units, 0, False)
    profile = TrialProfile((shard,) * units, (), False, tasks)
    spec = replace(
        spec_of(0, by_shard=True), cut={"mode": "export", "at": [str(k) for k in range(1, units)]},
        accumulate=WINDOW, **as_measured(profile),
        shards=(("", ""),) * units, nbytes=STATE * UNITS,
    )  # fmt: skip
    return PlannedTrial(replace(spec, **fields), admission=0.0)


def chosen(
    trials: int,
    devices: int,
    budget: int | None = None,
    workers: int = 1,
    rate: float = 1e9,
    build: float = 0.0,
) -> Choice:
    resources = WorkerResources(devices, budget)
    place = Place(workers, resources, (WINDOW,) * workers, ())
    config = HopConfig(workers, evaluate=False)
    judge = SearchJudge(config, place, CostModel(MoveRates(device=rate)))
    plain = trial(1 if budget is None else 3)
    return choose(
        judge, ways(plain, trial(UNITS), resources, True), [], trials, 1, lambda: 0.0, build
    )


def test_a_trial_alone_is_trained_by_all_devices_together() -> None:
    found = chosen(trials=1, devices=3)
    plan = found.way.trial.spec.plan
    assert plan is not None and (plan.devices, plan.recompute) == (3, False)
    assert plan.schedule in ("1f1b", "gpipe", "interleaved") and found.tried == found.possible
    # Six microbatches on three devices have a bubble of two.
    assert found.seconds < 0.55 * found.plain_seconds
    assert chosen(trials=1, devices=2, build=5.0).way.trial.spec.plan is None, "it takes too long"
    assert "over 3 devices, activations kept; the trial is expected to train" in found.text(1)


def test_two_trials_have_a_part_of_the_devices_each() -> None:
    found = chosen(trials=2, devices=4)
    plan = found.way.trial.spec.plan
    assert plan is not None and plan.devices == 2 and found.seconds < 0.75 * found.plain_seconds


def test_as_many_trials_as_devices_are_trained_as_without_a_plan() -> None:
    found = chosen(trials=4, devices=2, workers=2)
    assert found.way.trial.spec.plan is None and found.way.cuts is None
    assert "the plain choice, 4 trials are expected to train" in found.text(4)


def test_a_trial_that_fits_no_device_is_spread_instead_of_copied() -> None:
    # The plain choice has three shards, of which a device holds two, and copies them all the time.
    found = chosen(trials=1, devices=3, budget=2 * 200 + 110, rate=1e3)
    plan = found.way.trial.spec.plan
    assert plan is not None and plan.devices == 3 and found.seconds < 0.5 * found.plain_seconds


def test_ways_change_no_bit_and_are_what_workers_can_do() -> None:
    resources = WorkerResources(3, 3 * STATE)
    plain, *others = ways(trial(3), trial(UNITS), resources, True)
    assert plain.trial.spec.plan is None and others
    for way in others:
        spec, plan = way.trial.spec, way.trial.spec.plan
        assert (
            plan is not None
            and plan.schedule in FLUSHED
            and way.trial.plan_followed(resources) == plan
        )
        kept = ("batch_size", "accumulate", "steps", "schedule", "recompute", "nbytes")
        assert all(getattr(spec, name) == getattr(plain.trial.spec, name) for name in kept)
        assert way.trial.visit("train", 12, resources, 1.0).device_need <= 3 * STATE
    asked = trial(3, recompute=True)
    found = [way.trial.spec.plan for way in ways(asked, trial(UNITS), resources, True)]
    assert all(plan.recompute for plan in found if plan), "what the user has said stays"
    cuts = {way.cuts for way in ways(trial(3), trial(3), resources, cuts_are_free=False)}
    assert cuts == {None, (1, 2)}


def test_units_that_are_joined_need_what_the_shard_needs() -> None:
    joined, whole = trial(UNITS).profile.joined((3,)), trial(2).profile
    assert joined.shards == whole.shards
    for recompute in (False, True):
        mine, theirs = (each.training(0, WINDOW, WINDOW, recompute) for each in (joined, whole))
        assert mine.device_need == theirs.device_need
    tied = replace(trial(UNITS).profile, tied=((0, 5), (0, 1)))
    assert tied.joined((3,)).tied == ((0, 1),)


def test_a_worker_that_can_not_follow_a_plan_trains_as_without_one() -> None:
    planned, plan = trial(3), TrialPlan("1f1b", False, 3)
    spec = replace(planned.spec, plan=plan)
    needs = planned.profile.way(spec, 3, None)
    assert needs[0] is False and (needs[1].schedule, needs[1].devices) == ("1f1b", 3)
    for devices, budget, host, sparing in [
        (2, None, None, False), (3, STATE, None, False), (3, None, STATE, False),
        (3, None, None, True),
    ]:  # fmt: skip
        without = planned.profile.way(planned.spec, devices, budget, host, sparing)
        assert planned.profile.way(spec, devices, budget, host, sparing) == without


def test_a_document_with_a_plan_is_read_as_written_and_one_that_changes_bits_is_refused() -> None:
    spec = replace(spec_of(0, by_shard=False), plan=TrialPlan("gpipe", True, 2))
    document = json.loads(json.dumps(spec.to_json()))
    assert TrialSpec.from_json(document, "trial.json") == TrialSpec.from_json(document, "t")
    assert TrialSpec.from_json(document, "trial.json").plan == spec.plan
    for plan in ({"schedule": "2bw"}, {"devices": 0}):
        document["plan"] = plan
        with pytest.raises(StoreError, match=r"trial\.json\.plan"):
            TrialSpec.from_json(document, "trial.json")


@pytest.mark.parametrize("given", ["x", True, 4])
def test_a_plan_that_is_none_is_refused(given: object) -> None:
    with pytest.raises(ConfigurationError, match=f"plan is {given!r}; it is 'auto', by which"):
        WorkerResources.checked(None, None, None, None, "auto", plan=given)
