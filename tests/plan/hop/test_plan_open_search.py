"""Trials that come and go while others train: added, extended, paused, resumed, forked, stopped."""

from __future__ import annotations

import pytest

from cerebro_hydra.plan.hop.trials import visit_order
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from tests.journals import comparable
from tests.plan.driver import Driver, fork_of, of, open_search, trial


def test_a_trial_trains_while_it_has_budget_and_goes_on_when_it_is_given_more() -> None:
    run = open_search()
    run(ev.TrialAdded(trial(0), 1))
    run.train_one()
    told = run.train_one()
    assert of(ins.EndEpoch, told) and not of(ins.FinishTrial, told)
    assert run.state.trials[0].status == "waiting" and not run.running
    (start,) = of(ins.StartSubEpoch, run(ev.BudgetExtended(0, 2)))
    assert (start.epoch, start.state) == (1, 3)


def test_a_trial_at_its_budget_is_finished_when_the_search_is_closed() -> None:
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0), 1))
    run.train_one()
    (checkpoint,) = of(ins.Checkpoint, run(ev.SearchClosed()))
    told = run(ev.Checkpointed(0, 1, checkpoint.incarnation))
    assert of(ins.FinishTrial, told) == [ins.FinishTrial(0, "finished", "", 1)]
    assert of(ins.FinishRun, told)


def test_a_run_does_not_end_while_its_search_may_propose_more() -> None:
    run = open_search()
    run(ev.TrialAdded(trial(0), 1))
    ((worker, attempt),) = run.running.items()
    run(ev.TaskFailed(attempt, worker, "boom"))
    assert run.state.trials[0].over and not run.state.finished
    assert run(ev.SearchClosed()) == [ins.FinishRun()]


def test_a_candidate_that_was_refused_leaves_its_number_free_and_moves_nobody() -> None:
    run = open_search(order="seeded", seed=5, partitions=3)
    for number in (0, 2):
        run(ev.TrialAdded(trial(number), 1))
    assert sorted(run.state.trials) == [0, 2]
    first = {a.trial: a.partition for a in run.state.attempts.values()}
    assert first[2] == visit_order(run.state.config, 2, 0)[0]


def test_a_paused_trial_leaves_the_workers_memory_once_it_is_in_the_store() -> None:
    run = open_search(partitions=3)
    run(ev.TrialAdded(trial(0), 1))
    run.train_one()
    ((worker, attempt),) = run.running.items()
    told = run(ev.TrialPaused(0))
    assert ins.Cancel(attempt, worker) in told
    (checkpoint,) = of(ins.Checkpoint, told)
    assert (checkpoint.trial, checkpoint.state) == (0, 1) and not run.running
    assert of(ins.Drop, run(ev.Checkpointed(0, 1, checkpoint.incarnation)))
    assert run.held(0) == [(0, "store"), (1, "store")]
    (start,) = of(ins.StartSubEpoch, run(ev.TrialResumed(0)))
    assert start.source == ins.StateSource(1, None)


def test_a_trial_that_rests_when_the_search_closes_is_stopped() -> None:
    run = open_search()
    run(ev.TrialAdded(trial(0), 1))
    run(ev.TrialPaused(0))
    (finish,) = of(ins.FinishTrial, run(ev.SearchClosed()))
    assert (finish.status, finish.state) == ("stopped", 0) and "paused" in finish.reason


def forked() -> tuple[Driver, ins.Checkpoint]:
    """Fork trial 0 after its first epoch, which the parent ends with."""
    run = open_search()
    run(ev.TrialAdded(trial(0), 1))
    run.train_one()
    run.train_one()
    (checkpoint,) = of(ins.Checkpoint, run(ev.TrialForked(fork_of(0, 1), 0, 2, 2)))
    return run, checkpoint


def test_a_fork_goes_on_from_its_parents_state_which_is_named_and_not_copied() -> None:
    run, checkpoint = forked()
    assert (checkpoint.trial, checkpoint.state) == (0, 2) and not run.running
    told = run(ev.Checkpointed(0, 2, checkpoint.incarnation))
    assert of(ins.ForkState, told) == [ins.ForkState(1, 0, 2)]
    (start,) = of(ins.StartSubEpoch, told)
    assert (start.trial, start.state, start.epoch) == (1, 3, 1)
    assert start.source == ins.StateSource(2, None)
    assert start.metrics == run.state.trials[0].history[0]
    assert list(run.state.trials[1].visits) == list(run.state.trials[0].visits)
    segments = {holder.digest for holder in run.state.holders if holder.where == "store"}
    assert {"cursor/0/2", "cursor/1/2"} <= segments


def test_a_forked_state_that_is_lost_before_it_is_stored_is_made_again_by_the_parent() -> None:
    run, checkpoint = forked()
    lost = "ab".index(checkpoint.incarnation)
    run(ev.WorkerLost(checkpoint.incarnation, "killed"))
    run(ev.WorkerJoined(lost, "c", (lost,)))
    while not (again := of(ins.Checkpoint, run.train_one())):
        assert not run.state.holders.states(1), "the fork has begun"
    told = run(ev.Checkpointed(0, 2, again[0].incarnation))
    assert of(ins.ForkState, told) == [ins.ForkState(1, 0, 2)]
    assert list(run.state.trials[1].visits) == list(run.state.trials[0].visits)
    assert run.state.trials[1].history == run.state.trials[0].history


def test_a_fork_waits_for_a_state_that_a_paused_parent_lost_with_the_driver() -> None:
    run = open_search()
    run(ev.TrialAdded(trial(0), 2))
    run.train_one()
    run.train_one()
    run(ev.TrialPaused(0))  # a search does so for as long as the fork is built
    run(ev.RunResumed())
    assert run.state.trials[0].history == []
    for worker in range(2):
        run(ev.WorkerJoined(worker, "cd"[worker], (worker,)))
    assert not of(ins.FinishTrial, run(ev.TrialForked(fork_of(0, 1), 0, 2, 2)))
    run.train_one()
    (checkpoint,) = of(ins.Checkpoint, run.train_one())
    assert run.state.trials[0].paused, "it goes no further than it was"
    told = run(ev.Checkpointed(0, 2, checkpoint.incarnation))
    assert of(ins.ForkState, told) == [ins.ForkState(1, 0, 2)]
    assert of(ins.StartSubEpoch, run(ev.TrialResumed(0)))


def test_a_parent_goes_on_once_the_state_that_is_forked_is_stored() -> None:
    """If it were lost after the parent had gone on, the fork would make it with its own numbers."""
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0), 3))
    run.train_one()
    run(ev.TrialPaused(0))
    run(ev.TrialForked(fork_of(0, 1), 0, 1, 3))
    assert not of(ins.StartSubEpoch, run(ev.TrialResumed(0)))
    told = [*run(ev.WorkerLost("a", "killed")), *run(ev.WorkerJoined(0, "b", (0,)))]
    assert [start.trial for start in of(ins.StartSubEpoch, told)] == [0], "it makes it again"
    run.train_one()
    assert not run.running
    told = run(ev.Checkpointed(0, 1, "b"))
    assert of(ins.ForkState, told) == [ins.ForkState(1, 0, 1)]
    assert of(ins.StartSubEpoch, told)


def test_a_fork_begins_with_the_metrics_of_its_parent_also_where_these_are_measured_again() -> None:
    """A fork with another loss would measure the same state as something else."""
    run = open_search(partitions=1, evaluate=True)
    run(ev.TrialAdded(trial(0), 3))
    run.train_one()
    run.evaluate_one()
    run(ev.TrialPaused(0))
    run(ev.TrialForked(fork_of(0, 1), 0, 1, 3))
    run(ev.WorkerLost("a", "killed"))
    run(ev.WorkerJoined(0, "b", (0,)))
    run.train_one()
    assert not of(ins.ForkState, run(ev.Checkpointed(0, 1, "b")))
    assert of(ins.ForkState, run.evaluate_one()) == [ins.ForkState(1, 0, 1)]
    assert run.state.trials[1].history == run.state.trials[0].history


@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize(("keep", "base"), [("best", 2), ("last", 1)])
def test_a_fork_fails_where_neither_its_state_nor_another_of_its_parent_can_be_written(
    keep: str, base: int, paused: bool
) -> None:
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0, keep=keep), 3))
    run.train("a", 1.0)
    if base == 1:
        run(ev.TrialForked(fork_of(0, 1), 0, 1, 3))
    run.train("a", 2.0)
    run(ev.TrialPaused(0))
    if base == 2:
        run(ev.TrialForked(fork_of(0, 1), 0, 2, 3))
    if not paused:
        run(ev.TrialResumed(0))
    for _ in range(20):
        if run.state.trials[1].over:
            break
        run(ev.CheckpointFailed(0, *run.state.tables.saving[0], "the disk is full"))
    (end,) = of(ins.FinishTrial, run.told)
    assert f"state {base} of trial 0 can't be forked: the disk is full" in end.reason
    assert paused or run.running, "its parent goes on"


def test_a_fork_of_a_state_that_is_not_kept_fails_alone_and_keeps_its_number() -> None:
    run, checkpoint = forked()
    run(ev.Checkpointed(0, 2, checkpoint.incarnation))
    (finish,) = of(ins.FinishTrial, run(ev.TrialForked(fork_of(0, 2), 0, 1, 2)))
    assert (finish.trial, finish.status) == (2, "failed")
    assert "state 1 of trial 0 can't be forked: it is not kept any more" in finish.reason


def test_a_fork_of_a_trial_in_one_piece_is_in_one_piece_too() -> None:
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0), 1))
    run(ev.AuditFailed(run.running["a"], "a", "at step 7"))
    run.train_one()
    (checkpoint,) = of(ins.Checkpoint, run(ev.TrialForked(fork_of(0, 1), 0, 1, 2)))
    told = run(ev.Checkpointed(0, 1, checkpoint.incarnation))
    assert [start.uncut for start in of(ins.StartSubEpoch, told)] == [True]


def test_a_fork_takes_no_state_that_a_failed_audit_makes_void() -> None:
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0), 3))
    run.train_one()
    (pause,) = of(ins.Checkpoint, run(ev.TrialPaused(0)))
    run(ev.Checkpointed(0, 1, pause.incarnation))
    run(ev.TrialResumed(0))
    run.train_one()
    run(ev.TrialForked(fork_of(0, 1), 0, 2, 4))
    run(ev.AuditFailed(run.running["a"], "a", "at step 7"))
    run(ev.TrialForked(fork_of(0, 2), 0, 1, 3))
    run(ev.Checkpointed(0, 2, "a"))
    assert not any(run.state.holders.states(number) for number in (1, 2))
    run.train_one()
    told = run(ev.Checkpointed(0, 1, "a"))
    assert of(ins.ForkState, told) == [ins.ForkState(2, 0, 1)]
    assert run.state.trials[0].uncut and run.state.trials[2].uncut


def test_a_trial_that_keeps_its_best_epoch_can_be_forked() -> None:
    run = open_search()
    run(ev.TrialAdded(trial(0, patience=1, keep="best"), 1))
    told = run(ev.TrialForked(fork_of(0, 1), 0, 0, 2))
    assert of(ins.ForkState, told) == [ins.ForkState(1, 0, 0)]


@pytest.mark.parametrize(
    "late",
    [
        ev.TrialAdded(trial(9), 1),
        ev.BudgetExtended(0, 9),
        ev.TrialPaused(0),
        ev.TrialForked(fork_of(0, 9), 0, 0, 1),
    ],
)
def test_what_a_search_says_after_its_end_changes_nothing(late: ev.Event) -> None:
    run = open_search()
    run(ev.TrialAdded(trial(0), 1))
    run(ev.SearchClosed())
    before = comparable(run.state)
    assert run(late) == []
    assert comparable(run.state) == before


# ---------------------------------------------------------------------- candidates


def closed(*numbers: int) -> Driver:
    """A search that has proposed these candidates and closed."""
    run = open_search(partitions=1)
    for number in numbers:
        run(ev.TrialProposed(number, {"lr": number}, 1))
    run(ev.SearchClosed())
    return run


def test_a_run_waits_for_candidates_that_were_proposed_before_its_search_closed() -> None:
    run = closed(0, 1)
    run(ev.TrialAdded(trial(1), 1))
    run.train_one()
    told = run(ev.Checkpointed(1, 1, "a"))
    assert of(ins.FinishTrial, told) and not run.state.finished
    run(ev.TrialAdded(trial(0), 1))
    run.train_one()
    told = run(ev.Checkpointed(0, 1, "a"))
    assert of(ins.FinishRun, told)


def test_a_refused_candidate_fails_with_its_traceback_and_may_be_the_last_to_end() -> None:
    run = closed(0)
    told = run(ev.TrialRefused(0, "ValueError: no layer"))
    assert told == [ins.FinishTrial(0, "failed", "ValueError: no layer", 0), ins.FinishRun()]
    assert run(ev.TrialRefused(0, "again")) == []
    assert not run.state.trials


def test_a_refused_candidate_that_is_proposed_once_more_keeps_no_run_from_its_end() -> None:
    run = open_search(partitions=1)
    run(ev.TrialProposed(0, {"lr": 0}, 1))
    run(ev.TrialRefused(0, "ValueError: no layer"))
    run(ev.TrialProposed(0, {"lr": 0}, 1))
    assert run(ev.SearchClosed()) == [ins.FinishRun()]


def test_nothing_is_added_after_the_end_of_the_search_that_was_not_proposed_before() -> None:
    run = closed(0)
    run(ev.TrialProposed(1, {}, 1))
    run(ev.TrialAdded(trial(1), 1))
    assert not run.state.trials and list(run.state.tables.candidates) == [0]
    run(ev.TrialAdded(trial(0), 1))
    run(ev.TrialAdded(trial(0), 5))
    assert run.state.trials[0].budget == 1 and not run.state.tables.candidates
