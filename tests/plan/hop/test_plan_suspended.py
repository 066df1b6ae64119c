"""A run that is suspended loses nothing: every trial rests in the store, and goes on later."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from tests.journals import comparable
from tests.plan.driver import Driver, fork_of, of, open_search, trial
from tests.plan.world import World
from tests.plan.worlds import check_outcome, open_worlds, scripts


def training() -> Driver:
    """A trial after its first sub-epoch of two, in the second one."""
    run = open_search()
    run(ev.TrialAdded(trial(0), 2))
    run.train_one()
    return run


def test_what_trains_is_taken_back_and_the_newest_state_goes_to_the_store() -> None:
    run = training()
    told = run(ev.RunSuspended("enough"))
    assert of(ins.Cancel, told) and not run.running
    (checkpoint,) = of(ins.Checkpoint, told)
    assert checkpoint.state == 1 and not run.state.at_rest
    told = run(ev.Checkpointed(0, 1, checkpoint.incarnation))
    assert of(ins.RestTrial, told) == [ins.RestTrial(0, 1)]
    assert run.state.at_rest and not run.state.finished
    assert not of(ins.FinishTrial, told) and not of(ins.FinishRun, told)
    assert run.state.trials[0].status == "waiting"


def test_a_trial_goes_on_from_there_when_the_run_is_resumed() -> None:
    run = training()
    (checkpoint,) = of(ins.Checkpoint, run(ev.RunSuspended("enough")))
    run(ev.Checkpointed(0, 1, checkpoint.incarnation))
    run(ev.RunResumed())
    assert not run.state.at_rest
    told = [*run(ev.WorkerJoined(0, "c", (0,))), *run(ev.WorkerJoined(1, "d", (1,)))]
    (start,) = of(ins.StartSubEpoch, told)
    assert (start.state, start.source) == (2, ins.StateSource(1, None))


def test_nothing_begins_in_a_suspended_run_and_a_second_word_changes_nothing() -> None:
    run = training()
    run(ev.RunSuspended("enough"))
    before = comparable(run.state)
    assert run(ev.RunSuspended("enough")) == []
    assert comparable(run.state) == before
    assert not of(ins.StartSubEpoch, run(ev.TrialAdded(trial(1), 1)))
    assert not of(ins.StartSubEpoch, run(ev.BudgetExtended(0, 9)))


def test_a_run_that_is_over_is_not_suspended() -> None:
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0), 1))
    run(ev.TrialStopped(0, "enough"))
    assert of(ins.FinishRun, run(ev.SearchClosed()))
    assert run(ev.RunSuspended("late")) == [] and run.state.finished and not run.state.at_rest


def test_a_fork_gets_its_state_before_the_run_rests() -> None:
    run = open_search()
    run(ev.TrialAdded(trial(0), 1))
    run.train_one()
    run.train_one()
    run(ev.RunSuspended("enough"))
    told = run(ev.TrialForked(fork_of(0, 1), 0, 2, 2))
    assert not run.state.at_rest
    (where,) = {copy[1] for copy in run.state.tables.saving.values()}
    told = run(ev.Checkpointed(0, 2, where))
    assert of(ins.ForkState, told) == [ins.ForkState(1, 0, 2)]
    assert run.state.at_rest and not run.running


def test_a_fork_whose_first_state_is_lost_keeps_no_run_from_resting() -> None:
    """Its parent makes the state again when the run is resumed."""
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0), 2))
    run.train_one()
    run(ev.TrialForked(fork_of(0, 1), 0, 1, 2))
    run(ev.RunSuspended("enough"))
    run(ev.WorkerLost("a", "killed"))
    assert run.state.at_rest
    run(ev.RunResumed())
    run(ev.WorkerJoined(0, "b", (0,)))
    run.train_one()
    assert of(ins.ForkState, run(ev.Checkpointed(0, 1, "b"))) == [ins.ForkState(1, 0, 1)]


def test_a_state_that_can_not_be_written_keeps_no_run_from_resting() -> None:
    run = training()
    (checkpoint,) = of(ins.Checkpoint, run(ev.RunSuspended("enough")))
    for _ in range(9):
        if run.state.at_rest:
            break
        run(ev.CheckpointFailed(0, 1, checkpoint.incarnation, "the disk is full"))
    assert run.state.at_rest


@given(open_worlds(), scripts, st.integers(0, 60), st.integers(0, 2**32))
def test_a_run_that_is_suspended_at_any_moment_comes_to_rest_and_goes_on(
    world: World, script: list[int], steps: int, seed: int
) -> None:
    random = Random(seed)
    for _ in range(steps):
        if world.state.finished:
            return
        choice = world.steps()
        choice[random.randrange(len(choice))]()
    world.handle(ev.RunSuspended("enough"))
    for _ in range(2_000):
        if world.state.finished or world.state.at_rest:
            break
        choice = world.steps()
        assert choice, f"nothing can happen: {world.stories()}"
        choice[random.randrange(len(choice))]()
    assert world.state.finished or world.state.at_rest, world.stories()
    assert not any(each.attempts for each in world.state.trials.values())
    for number, state in {
        told.trial: told.state for told in world.instructions if isinstance(told, ins.RestTrial)
    }.items():
        assert world.state.trials[number].over or (number, state) in world.store
    if not world.state.finished:
        world.go_on_from(world.journal, world.store, world.objects, random.randint(1, 3))
        world.run(script)
    check_outcome(world)
