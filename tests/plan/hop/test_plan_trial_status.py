"""A trial is at one stage with one goal, and both change only as their tables say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cerebro_hydra.plan.hop import trial_status
from cerebro_hydra.plan.hop.trial_status import (
    EVALUATING,
    OVER,
    PAUSE,
    RESTARTING,
    TRAIN,
    TRAINING,
    WAITING,
    AwaitingParent,
    Ended,
    Goal,
    GoalKind,
    LackingMemory,
    MergingMetrics,
    Recutting,
    Stage,
    StopGoal,
    TrialStatus,
    check_goal,
    check_stage,
)
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from tests.plan.driver import Driver, of, open_search, trial

LACK = LackingMemory("MemoryError")
FINISHED, STOPPED, FAILED = (Ended(status, 0) for status in OVER)


def test_the_tables_have_a_row_for_each_status_and_goal() -> None:
    assert trial_status._NEXT_STATUS.keys() == set(TrialStatus)
    assert trial_status._NEXT_GOAL.keys() == set(GoalKind)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (AwaitingParent(0), WAITING),
        (WAITING, TRAINING),
        (EVALUATING, WAITING),
        (WAITING, MergingMetrics(3)),
        (LACK, Recutting(LACK, (0,))),
        (Recutting(LACK, (0,)), LACK),
        (LACK, STOPPED),
        (FINISHED, WAITING),
        (FAILED, LACK),
    ],
)
def test_a_stage_follows_another_as_the_table_says(before: Stage, after: Stage) -> None:
    check_stage(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TRAINING, FINISHED),  # what it does is taken back first
        (EVALUATING, TRAINING),
        (TRAINING, LACK),
        (WAITING, AwaitingParent(0)),
        (AwaitingParent(0), TRAINING),
        (WAITING, Recutting(LACK, (0,))),
        (MergingMetrics(3), FAILED),
        (RESTARTING, TRAINING),
        (STOPPED, WAITING),
        (FINISHED, FAILED),
        (WAITING, WAITING),
    ],
)
def test_no_other_stage_follows(before: Stage, after: Stage) -> None:
    with pytest.raises(ValueError, match=f"is {before.status} can't become {after.status}"):
        check_stage(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [(StopGoal("pruned"), TRAIN), (StopGoal("pruned"), PAUSE), (TRAIN, TRAIN)],
)
def test_no_other_goal_follows(before: Goal, after: Goal) -> None:
    with pytest.raises(ValueError, match=f"is to {before.kind.value} is not to"):
        check_goal(before, after)


def test_a_trial_that_trains_is_not_ended_before_its_attempts_are_taken_back() -> None:
    run = open_search()
    run(ev.TrialAdded(trial(0), 1))
    tables = run.state.tables
    with pytest.raises(ValueError, match="a trial that is training can't become failed"):
        tables.enter(0, FAILED)
    run.state.validate()


STOPPED_LATER = ev.TrialStopped(0, "pruned"), ev.SearchClosed()


def lose_both_epochs(run: Driver) -> None:
    run(ev.WorkerLost("a", "killed"))
    assert not run.state.trials[0].history, "its states were on the lost worker alone"
    run(ev.WorkerJoined(0, "b", (0,)))


@pytest.mark.parametrize("paused", [True, False], ids=["paused", "not paused"])
@pytest.mark.parametrize("lost_first", [True, False], ids=["lost first", "stopped first"])
@pytest.mark.parametrize("ended_by", STOPPED_LATER, ids=["stopped", "closed"])
def test_a_trial_that_is_to_end_makes_the_epochs_again_of_which_the_search_was_told(
    ended_by: ev.Event, lost_first: bool, paused: bool
) -> None:
    """What else a trial's result is would depend on which worker or driver died, and when."""
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0), 3 if paused else 2))
    run.train_one()
    run.train_one()
    happens = [lambda: lose_both_epochs(run), lambda: run(ended_by)]
    if paused:
        run(ev.TrialPaused(0))
    for each in happens if lost_first else reversed(happens):
        each()
        run.state.validate()
    run.train_one()
    run.train_one()
    assert not run.running, "it goes no further than it was"
    (end,) = of(ins.FinishTrial, run(ev.Checkpointed(0, 2, "b")))
    finished = isinstance(ended_by, ev.SearchClosed) and not paused
    assert (end.status, end.state) == ("finished" if finished else "stopped", 2)
    assert [len(epoch) > 0 for epoch in run.state.trials[0].history] == [True, True]


def test_a_trial_that_is_paused_goes_on_until_it_has_again_what_it_lost() -> None:
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0), 3))
    run.train_one()
    run.train_one()
    lose_both_epochs(run)
    run.train_one()
    assert not of(ins.Cancel, run(ev.TrialPaused(0)))
    assert not run.state.trials[0].paused
    run.train_one()
    assert run.state.trials[0].paused and not run.running


def failed_while_paused() -> Driver:
    """A trial that lacks memory and is paused fails, because its state can't be written."""
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0, finer=True), 2))
    run.train_one()
    run(ev.TaskFailed(run.running["a"], "a", "MemoryError", memory=True))
    run(ev.TrialPaused(0))
    for _ in range(4):
        run(ev.CheckpointFailed(0, 1, "a", "disk full"))
    assert run.state.trials[0].status is TrialStatus.FAILED
    run(ev.SearchClosed())
    return run


def test_a_trial_that_failed_unsaved_goes_on_where_it_was_when_the_run_is_resumed() -> None:
    run = failed_while_paused()
    told = run(ev.RunResumed())
    assert of(ins.ReopenTrial, told) == [ins.ReopenTrial(0)]
    (asked,) = of(ins.CutFiner, told)
    assert asked.error == "MemoryError" and not run.state.trials[0].paused


def failed_while_catching_up() -> Driver:
    """A trial that makes lost epochs again, for a pause, fails, as its state can't be written."""
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0, finer=True), 4))
    run.train_one()
    run.train_one()
    run(ev.TrialPaused(0))
    run(ev.WorkerLost("a", "killed"))
    run(ev.WorkerJoined(0, "b", (0,)))
    run.train_one()
    run(ev.TaskFailed(run.running["b"], "b", "MemoryError", memory=True))
    for _ in range(4):
        run(ev.CheckpointFailed(0, 1, "b", "disk full"))
    assert run.state.trials[0].status is TrialStatus.FAILED
    assert run.state.trials[0].goal is PAUSE and not run.state.trials[0].at_goal
    run(ev.SearchClosed())
    return run


def recut(run: Driver) -> None:
    """Answer that the trial's first state lies in twice the shards."""
    digests = trial(0).initial_digests * 2
    config = replace(trial(0), initial_digests=digests)
    run(ev.TrialRecut(config, (ev.RecutState(0, digests),), {}))


@pytest.mark.parametrize(
    ("failed", "epochs"), [(failed_while_catching_up, 2), (failed_while_paused, 1)]
)
def test_a_trial_that_catches_up_after_the_end_of_its_search_ends_with_the_epochs_it_had(
    failed: Callable[[], Driver], epochs: int
) -> None:
    run = failed()
    run(ev.RunResumed())
    recut(run)
    run(ev.WorkerJoined(0, "c", (0,)))
    for _ in range(epochs):
        run.train_one()
    told = run(ev.Checkpointed(0, epochs, "c"))
    why = "the search ended while the trial was paused"
    assert of(ins.FinishTrial, told) == [ins.FinishTrial(0, "stopped", why, epochs)]
    assert run.state.finished


def test_a_trial_paused_in_its_first_epoch_trains_no_more_after_the_end_of_its_search() -> None:
    run = open_search(partitions=2)
    run(ev.TrialAdded(trial(0, finer=True), 2))
    run.train_one()
    ((worker, attempt),) = run.running.items()
    run(ev.TaskFailed(attempt, worker, "MemoryError", memory=True))
    run(ev.TrialPaused(0))
    (writer,) = (place for state, place in run.held(0) if state == 1)
    for _ in range(4):
        run(ev.CheckpointFailed(0, 1, writer, "disk full"))
    run(ev.SearchClosed())
    (end,) = of(ins.FinishTrial, run(ev.RunResumed()))
    assert (end.status, end.state) == ("stopped", 0) and run.state.finished


def test_a_trial_that_was_paused_at_the_end_makes_again_what_a_full_store_has_cost_it() -> None:
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0), 3))
    run.train_one()
    run.train_one()
    run(ev.TrialPaused(0))
    run(ev.SearchClosed())
    for _ in range(4):
        run(ev.CheckpointFailed(0, 2, "a", "disk full"))
    assert run.state.trials[0].status is TrialStatus.FAILED
    run(ev.RunResumed())
    assert not run.state.trials[0].history, "its state was on the lost worker alone"
    run(ev.WorkerJoined(0, "b", (0,)))
    run.train_one()
    run.train_one()
    assert not run.running, "it goes no further than it was"
    told = run(ev.Checkpointed(0, 2, "b"))
    why = "the search ended while the trial was paused"
    assert of(ins.FinishTrial, told) == [ins.FinishTrial(0, "stopped", why, 2)]
    assert run.state.finished


def test_a_trial_that_was_paused_at_the_end_makes_again_what_a_lost_worker_has_cost_it() -> None:
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0), 3))
    run.train_one()
    run(ev.TrialPaused(0))
    run(ev.SearchClosed())
    run(ev.WorkerLost("a", "killed"))
    assert of(ins.StartSubEpoch, run(ev.WorkerJoined(0, "b", (0,))))
    run.train_one()
    (finish,) = of(ins.FinishTrial, run(ev.Checkpointed(0, 1, "b")))
    assert (finish.status, finish.state) == ("stopped", 1) and run.state.finished
