"""A trial whose audit fails begins again in one piece, or fails; audits keep to their time."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.policy.audit_budget import LATER_SHARE, AuditBudget, drawn_window
from tests.examples import examples
from tests.plan.driver import Driver, of
from tests.plan.worlds import check_outcome, check_undisturbed, scripts, worlds

DIFFERENCE = "at step 7: parameter '0.weight'"


class AuditedDriver(Driver):
    """One worker "a" and one trial of two shards, or as many as are said."""

    def __init__(self, shards: int = 2, **more) -> None:
        super().__init__(partitions=1, evaluate=False, shards=shards, **more)

    def fail_audit(self) -> list[ins.Instruction]:
        return self(ev.AuditFailed(self.running["a"], "a", DIFFERENCE))


def test_a_difference_in_the_first_sub_epoch_begins_it_again_in_one_piece() -> None:
    run = AuditedDriver()
    (before,) = of(ins.StartSubEpoch, run.told)
    given = run.fail_audit()
    assert of(ins.TrainUncut, given) == [ins.TrainUncut(0, DIFFERENCE)]
    assert not of(ins.Redo, given)
    (after,) = of(ins.StartSubEpoch, given)
    assert (before.uncut, after.uncut) == (False, True)
    assert (after.state, after.source) == (1, ins.StateSource(0, None))


def test_a_difference_takes_back_whatever_was_committed_and_every_metric() -> None:
    run = AuditedDriver(epochs=4, checkpoint="end")
    for _ in range(2):
        run.train("a")
    given = run.fail_audit()
    (redo,) = of(ins.Redo, given)
    assert redo.visits == (1, 2)
    assert run.state.trials[0].history == []
    for epoch in range(4):
        (start,) = [each for each in of(ins.StartSubEpoch, run.last)]
        assert (start.epoch, start.uncut) == (epoch, True)
        run.train("a")
    run(ev.Checkpointed(0, 4, "a"))
    (finish,) = of(ins.FinishTrial, run.told)
    assert (finish.status, finish.state) == ("finished", 4)


def test_a_difference_after_that_fails_it_with_what_one_piece_needs() -> None:
    run = AuditedDriver()
    run.fail_audit()
    (finish,) = of(ins.FinishTrial, run.fail_audit())
    assert finish.status == "failed"
    assert f"in one piece where a device has room for that: {DIFFERENCE}" in finish.reason
    assert "raise device_memory" in finish.reason


def test_a_state_that_is_being_written_stays_until_it_is_written() -> None:
    run = AuditedDriver(epochs=4, patience=3)
    run.train("a", loss=1.0)
    (checkpoint,) = of(ins.Checkpoint, run.told)
    given = run.fail_audit()
    assert not of(ins.Drop, given) and not of(ins.StartSubEpoch, given)
    given = run(ev.Checkpointed(0, checkpoint.state, "a"))
    assert [redo.visits for redo in of(ins.Redo, given)] == [(1,)]
    assert of(ins.StartSubEpoch, given)[0].source == ins.StateSource(0, None)
    assert not run.state.holders.holds(0, 1, "store"), "what lies there is void"


def test_a_trial_of_one_shard_fails_with_the_difference() -> None:
    run = AuditedDriver(shards=1)
    (finish,) = of(ins.FinishTrial, run.fail_audit())
    assert finish.status == "failed"
    assert finish.reason.startswith(
        "a step of training differs from the same step in plain PyTorch"
    )
    assert DIFFERENCE in finish.reason and "counters" in finish.reason


def test_a_trial_that_differs_in_one_piece_too_fails() -> None:
    run = AuditedDriver()
    run.fail_audit()
    (finish,) = of(ins.FinishTrial, run.fail_audit())
    assert finish.status == "failed"


def test_the_story_tells_of_the_audit() -> None:
    run = AuditedDriver()
    run.fail_audit()
    assert f"audit failed: {DIFFERENCE}" in run.state.story(0)


@settings(max_examples=examples(40))
@given(worlds(faults=("kill", "duplicate", "audit"), order="seeded"), scripts)
def test_whatever_differs_ends_with_the_states_of_an_undisturbed_run_or_fails(world, script):
    world.run(script)
    check_outcome(world)
    statuses = {trial.status for trial in world.state.trials.values()}
    assert statuses <= {"finished", "failed"}
    if statuses == {"finished"}:
        check_undisturbed(world)


seconds = st.floats(0.001, 10.0)
sub_epochs = st.lists(st.tuples(seconds, seconds, st.booleans()), max_size=60)


@given(st.floats(0.0, 1.0), sub_epochs)
def test_audits_that_take_what_they_were_thought_to_keep_to_their_share(share, steps) -> None:
    budget = AuditBudget(share)
    later = 0.0
    for trained, cost, first_epoch in steps:
        budget.trained += trained
        if budget.allows(cost, first_epoch):
            budget.spent += cost
            if not first_epoch:
                later = budget.spent
        assert budget.spent <= share * budget.trained
        assert later <= LATER_SHARE * share * budget.trained


@given(sub_epochs)
def test_a_share_of_nothing_allows_no_audit(steps) -> None:
    budget = AuditBudget(0.0)
    for trained, cost, first_epoch in steps:
        budget.trained += trained
        assert not budget.allows(cost, first_epoch)


@given(st.floats(0.001, 1.0), seconds, st.booleans())
def test_long_enough_training_is_audited(share, cost, first_epoch) -> None:
    budget = AuditBudget(share, trained=cost / (share * LATER_SHARE) * 1.001)
    assert budget.allows(cost, first_epoch)


def test_every_step_of_a_sub_epoch_is_as_likely_to_be_audited() -> None:
    places = itertools.product(range(600), range(10))
    drawn = Counter(drawn_window(7, epoch, partition, 12) for epoch, partition in places)
    assert sorted(drawn) == list(range(12))
    assert all(abs(count - 500) < 100 for count in drawn.values()), drawn
