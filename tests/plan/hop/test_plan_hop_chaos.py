"""The hop state machine against simulated agents that die, repeat themselves and are late."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan.hop.journal import fold
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.messages.codec import from_json
from tests.examples import examples
from tests.journals import comparable
from tests.plan.world import World
from tests.plan.worlds import (
    LOSSES,
    check_outcome,
    check_undisturbed,
    open_worlds,
    scripts,
    storms,
    worlds,
)


def check_finished(world: World) -> None:
    """Check that every trial finished, and as in a run without losses if orders are seeded."""
    check_outcome(world)
    assert {trial.status for trial in world.state.trials.values()} == {"finished"}
    if world.config.order == "seeded":
        check_undisturbed(world)


@settings(max_examples=examples(150))
@given(worlds() | open_worlds(), scripts)
def test_every_run_ends_with_one_surviving_commit_per_sub_epoch(world, script) -> None:
    world.run(script)
    check_outcome(world)


@settings(max_examples=examples(80))
@given(worlds(faults=LOSSES) | worlds(faults=LOSSES, order="seeded"), scripts)
def test_without_faults_of_its_own_every_trial_finishes(world, script) -> None:
    world.run(script)
    check_finished(world)


@settings(max_examples=examples(50))
@given(open_worlds(faults=LOSSES), scripts)
def test_without_faults_of_its_own_no_trial_of_an_open_run_fails(world, script) -> None:
    world.run(script)
    check_outcome(world)
    for each in world.state.trials.values():
        refused = any("can't be forked" in line for line in each.log) or each.newest == 0
        assert each.status != "failed" or refused


@settings(max_examples=examples(60))
@given(worlds(faults=("kill", "duplicate", "reset")), scripts, st.sets(st.integers(0, 3)))
def test_every_trial_finishes_however_many_transfers_from_agents_fail(
    world, script, unreachable
) -> None:
    world.unreachable = unreachable
    world.run(script)
    check_finished(world)


@settings(max_examples=examples(60))
@given(worlds(faults=("kill", "duplicate", "vanish", "come back")), scripts)
def test_the_partitions_of_workers_that_do_not_come_back_are_taken_over(world, script) -> None:
    world.run(script)
    check_finished(world)


@settings(max_examples=examples(60))
@given(storms(), scripts)
def test_best_states_survive_a_storm_of_losses(world, script) -> None:
    world.run(script)
    check_finished(world)


@settings(max_examples=examples(30))
@given(worlds() | open_worlds(), scripts)
def test_every_prefix_of_the_journal_folds_to_the_state_at_that_time(world, script) -> None:
    world.run(script)
    text = [json.dumps(entry) for entry in world.journal]
    live = HopState(world.config)
    for length, line in enumerate(text):
        if length % max(1, len(text) // 8) == 0:
            prefix = map(json.loads, text[:length])
            assert comparable(fold(world.config, prefix)) == comparable(live)
        live.handle(from_json(json.loads(line)["event"]))
    assert comparable(live) == comparable(world.state)


@settings(max_examples=examples(60))
@given(open_worlds(faults=()), scripts)
def test_budgets_are_never_exceeded_and_paused_trials_never_run(world, script) -> None:
    world.run(script)
    paused: set[int] = set()
    budgets: dict[int, int] = {}
    for entry in world.journal:
        event = entry["event"]
        match event["type"]:
            case "TrialAdded" | "TrialForked":
                budgets.setdefault(event["config"]["trial"], event["budget"])
            case "BudgetExtended":
                budgets[event["trial"]] = max(budgets[event["trial"]], event["budget"])
            case "TrialPaused":
                paused.add(event["trial"])
            case "TrialResumed":
                paused.discard(event["trial"])
        for told in entry["instructions"]:
            if told["type"] in ("StartSubEpoch", "Evaluate"):
                assert told["epoch"] < budgets[told["trial"]]
                assert told["trial"] not in paused
