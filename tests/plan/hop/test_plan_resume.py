"""Runs that go on after their driver's end, and what the store then has of them."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan.hop.checkpoints import (
    LONGEST_WAIT,
    MOST_FAILED_WRITES,
    WAITS,
    wait_after,
    wait_for_trial_after,
)
from cerebro_hydra.plan.hop.journal import RemadeStates
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.config import CHECKPOINTS, HopConfig
from tests.examples import examples
from tests.plan.closed_search import ClosedSearch
from tests.plan.driver import Driver, config, done, fork_of, of, open_search, trial
from tests.plan.faults import inject_fault
from tests.plan.world import Proposal, World
from tests.plan.worlds import (
    add,
    check_equal,
    check_outcome,
    check_undisturbed,
    open_worlds,
    scripts,
    worlds,
)


def killed_at(world: World, length: int, workers: int) -> None:
    """Let another driver go on from a prefix of a world's journal and from its store then."""
    world.go_on_from(world.journal[:length], *world.snapshots[length - 1], workers)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("patience", [None, 1])
def test_a_run_goes_on_from_every_prefix_of_its_journal_to_the_same_end(
    checkpoint: str, patience: int | None
) -> None:
    search = config(
        trials=2, epochs=2, order="seeded", seed=4, patience=patience, checkpoint=checkpoint
    )
    whole = World(search, [(0,), (1,)], Counter())
    whole.run([])
    for length in range(1, len(whole.journal), max(1, 60 // examples(10))):
        world = World(search, [(0,), (1,)], Counter())
        world.go_on_from(whole.journal[:length], *whole.snapshots[length - 1], 1 + length % 3)
        world.run([])
        check_outcome(world)
        check_equal(world, whole)


@settings(max_examples=examples(25))
@given(worlds(faults=("kill", "store"), order="seeded"), scripts, st.data())
def test_a_disturbed_run_goes_on_from_any_prefix_on_any_number_of_workers(
    world: World, script: list[int], data: st.DataObject
) -> None:
    world.run(script)
    killed_at(
        world, data.draw(st.integers(1, len(world.journal) - 1)), data.draw(st.integers(1, 5))
    )
    world.run([])
    check_outcome(world)
    check_undisturbed(world)


@settings(max_examples=examples(25))
@given(open_worlds(), scripts, st.data())
def test_an_open_run_with_forks_and_pauses_goes_on_from_any_prefix(
    world: World, script: list[int], data: st.DataObject
) -> None:
    world.run(script)
    killed_at(
        world, data.draw(st.integers(1, len(world.journal) - 1)), data.draw(st.integers(1, 5))
    )
    for candidate in list(world.state.tables.candidates):
        world.handle(ev.TrialRefused(candidate, "it can't be built any more"))
    if not world.state.tables.search_closed:
        world.handle(ev.SearchClosed())
    world.run([])
    check_outcome(world)


def once(world: World, epochs: int, turns: int, what: ev.Event | str) -> Proposal:
    """Let an event or a fault happen once trial 1 has so many epochs, or after so many turns."""
    left = iter(range(turns))

    def proposal(state: HopState) -> ev.Event | None:
        trained = len(state.trials[1].history) >= epochs
        works = what != "memory" or any(agent.tasks for agent in world.agents if agent.alive)
        if not (trained and works) and next(left, None) is not None:
            world.proposals.appendleft(proposal)
            return None
        if not isinstance(what, str):
            return what
        world.faults = Counter([what])
        inject_fault(world, Random(0))
        return None

    return proposal


@st.composite
def unsaved_runs(draw: st.DrawFn) -> World:
    """Draw a trial that is paused, lost and out of memory while nothing can be written."""
    workers = [(partition,) for partition in range(draw(st.integers(1, 2)))]
    search = HopConfig(len(workers), evaluate=False, checkpoint="end")
    first = add(1, draw(st.sampled_from([None, 2])), "last", 4)
    world = World(search, workers, Counter(), proposals=[first])
    happens = st.tuples(st.integers(0, 3), st.sampled_from([ev.TrialPaused(1), "kill", "memory"]))
    for epochs, what in draw(st.lists(happens, min_size=1, max_size=5)):
        world.proposals.append(once(world, epochs, 40, what))
    world.proposals.append(once(world, 5, draw(st.integers(0, 40)), ev.SearchClosed()))
    world.broken_writes = 10**6
    return world


@settings(max_examples=examples(150))
@given(unsaved_runs(), scripts)
def test_an_open_run_whose_result_could_not_be_written_ends_once_it_can(
    world: World, script: list[int]
) -> None:
    world.run(script)
    failed = world.state.unsaved
    world.broken_writes = 0
    killed_at(world, len(world.journal), workers=2)
    world.run([])
    check_outcome(world)
    assert all(world.state.trials[number].status != "failed" for number in failed)


@settings(max_examples=examples(25))
@given(worlds(faults=("kill", "store", "driver"), order="seeded"), scripts, st.integers(1, 2))
def test_a_finished_run_that_is_extended_ends_like_one_that_was_longer_from_the_start(
    world: World, script: list[int], more: int
) -> None:
    world.run(script)
    longer = ClosedSearch(world.config, world.search.trials, world.search.epochs + more)
    early = {n for n, each in world.state.trials.items() if "best after" in "".join(
        i.reason for i in world.instructions if isinstance(i, ins.FinishTrial) and i.trial == n
    )}  # fmt: skip
    world.search = longer
    killed_at(world, len(world.journal), workers=2)
    world.run([])
    assert {each.status for each in world.state.trials.values()} == {"finished"}
    check_undisturbed(world, but=early)


def test_a_state_is_written_at_the_end_of_every_epoch_and_the_one_before_goes() -> None:
    run = Driver(partitions=1, epochs=3, evaluate=False)
    (first,) = of(ins.Checkpoint, run(done(0, "a")))
    run(ev.Checkpointed(0, 1, "a"))
    (second,) = of(ins.Checkpoint, run(done(1, "a")))
    assert (first.state, second.state) == (1, 2)
    assert of(ins.Collect, run(ev.Checkpointed(0, 2, "a"))) == [ins.Collect(0, 1, ("t/0",))]
    assert run.state.holders.where(0, 0), "the first state stays, for replays"


def test_the_agent_with_the_fewest_writes_writes_a_state() -> None:
    run = open_search(partitions=2, checkpoint="epoch", evaluate=True)
    for number in (0, 1):
        run(ev.TrialAdded(trial(number), 2))
    holders = run.state.holders
    for number, state in ((0, 5), (1, 5)):
        holders.define(number, state, (("f", f"u{number}"),))
        holders.add(number, state, "a")
        holders.add(number, state, "b")
    holders.begin_write(0, 5, "a")
    assert holders.least_busy_writer(1, 5) == "b"


def test_one_failed_write_ends_nothing_and_the_next_epoch_is_written() -> None:
    run = Driver(partitions=1, epochs=3, evaluate=False)
    run(done(0, "a"))
    told = run(ev.CheckpointFailed(0, 1, "a", "disk full"))
    assert not of(ins.Checkpoint, told) and not of(ins.FinishTrial, told)
    assert of(ins.Checkpoint, run(done(1, "a"))) == [ins.Checkpoint(0, 2, "a")]


def test_a_result_that_can_not_be_written_fails_its_trial_alone_and_keeps_its_metrics() -> None:
    run = Driver(partitions=1, epochs=1, trials=2, evaluate=False, seed=1)
    first = run.state.attempts[run.running["a"]].trial
    run(done(run.running["a"], "a"))
    for _ in range(MOST_FAILED_WRITES - 1):
        told = run(ev.CheckpointFailed(first, 1, "a", "disk full"))
        assert of(ins.Checkpoint, told) == [ins.Checkpoint(first, 1, "a")]
    (end,) = of(ins.FinishTrial, run(ev.CheckpointFailed(first, 1, "a", "disk full")))
    assert (end.trial, end.status) == (first, "failed")
    assert "could not be written" in end.reason and "disk full" in end.reason
    assert run.state.trials[first].history
    assert not run.state.trials[1 - first].over


def test_a_fork_whose_state_can_not_be_written_fails_alone() -> None:
    run = open_search(partitions=1)
    run(ev.TrialAdded(trial(0), 2))
    run.train_one()
    run(ev.TrialForked(fork_of(0, 1), 0, 1, 2))
    for _ in range(MOST_FAILED_WRITES):
        told = run(ev.CheckpointFailed(0, 1, "a", "disk full"))
    (end,) = of(ins.FinishTrial, told)
    assert (end.trial, end.status) == (1, "failed") and "disk full" in end.reason
    assert not run.state.trials[0].over


def test_a_segment_that_another_state_is_being_written_with_is_not_deleted() -> None:
    run = open_search(partitions=1, checkpoint="sub-epoch")
    run(ev.TrialAdded(trial(0), 4))
    made = ev.SubEpochDone(0, "a", 1, 1.0, (("f0", "same"),), 1, 1.0, ev.Hop(0, 0, 0.0))
    run(made)
    run(ev.Checkpointed(0, 1, "a"))
    run(ev.SubEpochDone(1, "a", 1, 1.0, (("f0", "same"),), 1, 1.0, ev.Hop(0, 0, 0.0)))
    (collect,) = of(ins.Collect, run(ev.Checkpointed(0, 2, "a")))
    assert (collect.state, collect.objects) == (1, ())


def test_waits_between_tries_grow_and_end() -> None:
    assert [wait_after(n) for n in range(1, len(WAITS) + 1)] == sorted(WAITS)
    assert wait_after(len(WAITS) + 1) is None and max(WAITS) == LONGEST_WAIT
    last = len(WAITS) * MOST_FAILED_WRITES
    waits = [wait_for_trial_after(n) for n in range(1, last + 1)]
    assert waits == [*WAITS] * MOST_FAILED_WRITES and wait_for_trial_after(last + 1) is None


def commits(*made: tuple[int, int, str]) -> list[tuple[ev.Event, list[ins.Instruction]]]:
    """Return decisions that commit (state, partition, digest) of trial 0."""
    hop = ev.Hop(0, 0, 0.0)
    return [
        (
            ev.SubEpochDone(state, "a", 1, 1.0, (("f", "x"), ("f", digest)), 1, 1.0, hop),
            [ins.Commit(state, 0, state, 0, (partition,))],
        )
        for state, partition, digest in made
    ]


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        ([(2, 1, "b"), (3, 2, "c")], []),
        ([(2, 1, "B"), (3, 2, "c")], [ev.StateDiffers(0, 2, (1,))]),
        ([(2, 0, "B"), (3, 2, "C")], []),  # another partition makes another state
    ],
)
def test_what_is_made_again_is_compared_while_the_trial_takes_the_same_way(
    again: list[tuple[int, int, str]], expected: list[ev.StateDiffers]
) -> None:
    remade = RemadeStates({0: 1}, commits((1, 0, "a"), (2, 1, "b"), (3, 2, "c")))
    found = [each for decision in commits(*again) for each in remade.compare(*decision)]
    assert found == expected


def test_a_resumed_run_merges_metrics_again_whose_answer_was_under_way() -> None:
    run = Driver(partitions=1, custom=("auc",), checkpoint="sub-epoch")
    run(done(0, "a"))
    run(ev.Checkpointed(0, 1, "a"))
    ((worker, attempt),) = run.running.items()
    sums = {"loss": (1.0, 1)}
    run(ev.EvaluationDone(attempt, worker, sums, 1.0, ev.Hop(0, 0, 0.0), {"auc": 1}))
    (merge,) = of(ins.MergeMetrics, run.last)
    (again,) = of(ins.MergeMetrics, run(ev.RunResumed()))
    assert again.attempt != merge.attempt and again.states == merge.states


def test_a_resumed_run_makes_states_again_that_the_store_lacks_by_now() -> None:
    run = Driver(partitions=2, epochs=2, evaluate=False, checkpoint="sub-epoch")
    for state in (1, 2):
        ((worker, _),) = run.running.items()
        run(done(run.running[worker], worker))
        run(ev.Checkpointed(0, state, worker))
    told = run(ev.RunResumed(((0, 2),)))
    assert [(each.trial, each.state) for each in of(ins.Collect, told)] == [(0, 2)]
    (again,) = of(ins.Redo, told)
    assert again.visits == (1, 2)
    run.state.validate()


def test_a_finished_trial_that_is_extended_makes_again_what_the_store_lacks_by_now() -> None:
    run = Driver(partitions=2, epochs=1, evaluate=False, checkpoint="sub-epoch")
    for state in (1, 2):
        ((worker, _),) = run.running.items()
        run(done(run.running[worker], worker))
        run(ev.Checkpointed(0, state, worker))
    assert run.state.trials[0].status == "finished"
    told = run(ev.RunResumed(((0, 2),)))
    assert of(ins.ReopenTrial, told) and of(ins.Redo, told)[0].visits == (1, 2)
    run(ev.SearchReopened())
    run(ev.BudgetExtended(0, 2))
    assert (run.state.trials[0].status, run.state.trials[0].budget) == ("waiting", 2)
    run.state.validate()


def test_a_sub_epoch_that_is_held_back_goes_with_its_worker() -> None:
    """The state before it is committed later, because its message took longer."""
    run = Driver(partitions=2, evaluate=False)
    ((first, attempt),) = run.running.items()
    run(ev.StateReceived(0, 0, first))
    run(ev.SubEpochEnding(attempt, first))
    (second,) = {"a", "b"} - {first}
    run(done(run.running[second], second))
    told = run(ev.WorkerLost(second, "killed"))
    assert run.state.trials[0].attempts == [run.state.attempts[attempt]], told


def test_an_unknown_cadence_is_refused() -> None:
    with pytest.raises(ValueError, match="checkpoint='hourly' is unknown"):
        HopConfig(2, checkpoint="hourly")


@settings(max_examples=examples(25))
@given(
    worlds(faults=("kill", "store", "driver"), order="seeded"),
    scripts,
    st.integers(1, 3),
    st.dictionaries(st.sampled_from(("task", "kill", "transfer", "store")), st.integers(1, 3)),
)
def test_whatever_happens_to_an_extension_no_result_is_lost(
    world: World, script: list[int], more: int, faults: dict[str, int]
) -> None:
    world.run(script)
    before = {number: each.result for number, each in world.state.trials.items()}
    world.faults = Counter(faults)
    world.search = ClosedSearch(world.config, world.search.trials, world.search.epochs + more)
    killed_at(world, len(world.journal), workers=2)
    world.run(script)
    check_outcome(world)
    trials, partitions = world.state.trials, world.config.partitions
    for number, each in trials.items():
        assert each.status == "finished" and len(each.history) * partitions >= before[number]
    if any(each.unreached for each in trials.values()):
        world.faults = Counter()
        killed_at(world, len(world.journal), workers=2)
        world.run([])
        check_outcome(world)
        assert not any(each.unreached for each in world.state.trials.values())


def finished(epochs: int = 1, **more) -> Driver:
    """Return a run of one partition whose trial has finished with these epochs."""
    run = Driver(partitions=1, epochs=epochs, checkpoint="epoch", **more)
    for _ in range(epochs):
        train_epoch(run, loss=1.0)
    assert run.state.trials[0].status == "finished"
    return run


def train_epoch(run: Driver, loss: float) -> None:
    """Train and evaluate an epoch of trial 0 on worker "a", with its state in the store."""
    run.train_one()
    if run.state.config.evaluate:
        run(evaluated(run.running["a"], "a", loss))
    for each in of(ins.Checkpoint, run.told):
        run(ev.Checkpointed(0, each.state, "a"))


def evaluated(attempt: int, worker: str, loss: float) -> ev.EvaluationDone:
    return ev.EvaluationDone(attempt, worker, {"loss": (loss, 1)}, 1.0, ev.Hop(0, 0, 0.0), {})


def extend(run: Driver, budget: int, keeps_results: bool = True) -> None:
    run(ev.SearchReopened(keeps_results))
    run(ev.BudgetExtended(0, budget))
    run(ev.SearchClosed(budget))


@pytest.mark.parametrize("keep", ["last", "best"])
def test_a_finished_trial_that_fails_when_it_is_extended_keeps_what_it_had(keep: str) -> None:
    run = finished(2, keep=keep)
    (before,) = of(ins.FinishTrial, run.told)
    extend(run, 4)
    told = run(ev.TaskFailed(run.running["a"], "a", "boom"))
    assert of(ins.ExtensionFailed, told) == [ins.ExtensionFailed(0, 4, "boom")]
    assert of(ins.FinishTrial, told) == [before] and not of(ins.Redo, told)
    kept = run.state.trials[0]
    assert (kept.status, len(kept.history), kept.budget, kept.unreached) == ("finished", 2, 2, 4)
    extend(run, 4)
    assert of(ins.ReopenTrial, run.told)[-1:] and kept.unreached is None
    for _ in range(2):
        train_epoch(run, loss=0.5)
    assert (kept.status, len(kept.history), kept.result) == (
        "finished",
        4,
        4 if keep == "last" else 3,
    )


def test_a_trial_that_fails_late_in_an_extension_keeps_the_epochs_whose_states_are_stored() -> None:
    run = finished(1)
    extend(run, 4)
    train_epoch(run, loss=0.5)
    run.train_one()  # of epoch 3, whose state is being written while it is evaluated
    assert [each.state for each in of(ins.Checkpoint, run.last)] == [3]
    told = run(ev.TaskFailed(run.running["a"], "a", "a metric fails"))
    assert [each.visits for each in of(ins.Redo, told)] == [(3,)]
    assert [each.state for each in of(ins.FinishTrial, told)] == [2]
    told = run(ev.Checkpointed(0, 3, "a"))
    assert [each.state for each in of(ins.Collect, told)] == [3], "it has no use any more"
    assert run.held(0) == [(0, "store"), (2, "store")]
    assert len(run.state.trials[0].history) == 2


def test_the_end_of_an_extension_is_that_of_the_version_that_began_it() -> None:
    run = finished(1)
    extend(run, 2, keeps_results=False)
    told = run(ev.TaskFailed(run.running["a"], "a", "boom"))
    assert of(ins.FinishTrial, told) == [ins.FinishTrial(0, "failed", "boom", 0)]


def test_a_trial_that_never_finished_has_nothing_to_keep() -> None:
    run = Driver(partitions=1, epochs=2, checkpoint="epoch")
    train_epoch(run, loss=1.0)
    run(ev.SearchReopened(keeps_results=True))
    told = run(ev.TaskFailed(run.running["a"], "a", "boom"))
    assert of(ins.FinishTrial, told) == [ins.FinishTrial(0, "failed", "boom", 0)]


def test_what_a_failed_extension_made_is_not_compared_with_what_the_next_one_makes() -> None:
    made = [
        (done(1, "a"), [ins.Commit(1, 0, 1, 0, (0,))]),
        (
            ev.TaskFailed(2, "a", "boom"),
            [ins.Redo(0, (1,), "over"), ins.ExtensionFailed(0, 2, "boom")],
        ),
    ]
    remade = RemadeStates({0: 0}, made)
    again = ev.SubEpochDone(3, "a", 4, 1.0, (("f", "other"),), 100, 1.0, ev.Hop(0, 0, 0.0))
    assert remade.compare(again, [ins.Commit(3, 0, 1, 0, (0,))]) == []
