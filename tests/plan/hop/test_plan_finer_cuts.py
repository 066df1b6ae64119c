"""A trial that runs out of memory goes on in more shards, once, from where it was."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.observe import Decision
from cerebro_hydra.observe.text import troubles
from cerebro_hydra.plan.hop.checkpoints import MOST_FAILED_WRITES
from cerebro_hydra.plan.hop.epochs import PARENT_WAS_RECUT
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.events import RecutRefused, RecutState, TrialRecut
from tests.examples import examples
from tests.plan.driver import Driver, fork_of, of, trial
from tests.plan.hop.test_plan_resume import killed_at
from tests.plan.worlds import check_outcome, check_undisturbed, scripts, worlds

WHY = "MemoryError: 3 GiB"


class LackingDriver(Driver):
    """One worker "a" and trial 0, which may be cut finer unless it is said not to be."""

    def __init__(self, finer: bool = True, **more) -> None:
        given = {"evaluate": False, "checkpoint": "end", **more}
        super().__init__(closed=False, partitions=1, **given)
        self(ev.TrialAdded(trial(0, finer=finer), 4))

    def lack_memory(self) -> list[ins.Instruction]:
        return self(ev.TaskFailed(self.running["a"], "a", WHY, memory=True))

    def save(self, told: list[ins.Instruction]) -> list[ins.Instruction]:
        (checkpoint,) = of(ins.Checkpoint, told)
        return self(ev.Checkpointed(0, checkpoint.state, "a"))

    def recut(self, *states: int, number: int = 0) -> TrialRecut:
        config = self.state.trials[number].config
        shards = tuple((f"finer f{n}", f"finer t{n}") for n in range(4))
        states = tuple(RecutState(state, shards) for state in states)
        finer = config.finer and number != 0  # a fork is only laid out like its parent
        return TrialRecut(replace(config, initial_digests=shards, finer=finer), states, {})


def test_a_trial_waits_until_its_newest_state_is_stored_and_goes_on_from_it_in_more_shards() -> (
    None
):
    run = LackingDriver()
    run.train_one()
    run.train_one()
    told = run.lack_memory()
    assert not of(ins.FinishTrial, told) and not of(ins.CutFiner, told) and not run.running
    assert of(ins.CutFiner, run.save(told)) == [ins.CutFiner(0, (0, 2), WHY)]
    assert not run.running, "it waits for the cut"
    told = run(run.recut(0, 2))
    assert of(ins.ChangeCut, told) == [ins.ChangeCut(0, 2, 2, 4)]
    (start,) = of(ins.StartSubEpoch, told)
    assert (start.state, start.source) == (3, ins.StateSource(2, None))
    assert ins.Drop(0, 2, "a") in told, "what is there has the former shards"
    assert told.index(ins.Drop(0, 2, "a")) < told.index(start)
    assert run.held(0) == [(0, "store"), (2, "store")]
    assert not of(ins.Redo, told) and len(run.state.trials[0].history) == 2


def test_a_trial_in_its_first_sub_epoch_is_cut_finer_at_once() -> None:
    run = LackingDriver()
    assert of(ins.CutFiner, run.lack_memory()) == [ins.CutFiner(0, (0,), WHY)]
    (start,) = of(ins.StartSubEpoch, run(run.recut(0)))
    assert (start.state, start.source) == (1, ins.StateSource(0, None))


def test_a_trial_that_runs_out_again_fails_with_both_cuts() -> None:
    run = LackingDriver()
    run.lack_memory()
    run(run.recut(0))
    (finish,) = of(ins.FinishTrial, run.lack_memory())
    assert (finish.status, finish.reason) == (
        "failed", f"{WHY}\nIt ran out of memory cut into 2 shards, and again cut into 4"
    )  # fmt: skip


def test_a_trial_that_may_not_be_cut_finer_fails_as_it_did() -> None:
    (finish,) = of(ins.FinishTrial, LackingDriver(finer=False).lack_memory())
    assert (finish.status, finish.reason) == ("failed", WHY)


def test_a_trial_that_cant_be_cut_finer_fails_alone() -> None:
    run = LackingDriver()
    run(ev.TrialAdded(trial(1), 1))
    run.lack_memory()
    (finish,) = of(ins.FinishTrial, run(RecutRefused(0, "no")))
    assert (finish.trial, finish.reason) == (0, "no")
    assert [each.trial for each in run.state.attempts.values()] == [1]


def test_a_stopped_trial_takes_no_cut() -> None:
    run = LackingDriver()
    run.lack_memory()
    run(ev.TrialStopped(0, "pruned"))
    assert run(run.recut(0)) == []
    assert run.state.trials[0].status == "stopped"


def test_a_state_that_cant_be_stored_ends_the_trial_with_both_reasons() -> None:
    run = LackingDriver()
    run.train_one()
    told = run.lack_memory()
    for _ in range(MOST_FAILED_WRITES):
        assert of(ins.Checkpoint, told)
        told = run(ev.CheckpointFailed(0, 1, "a", "disk full"))
    (finish,) = of(ins.FinishTrial, told)
    assert WHY in finish.reason and "could not be written to the store: disk full" in finish.reason


def test_a_resumed_run_asks_for_the_cut_again() -> None:
    run = LackingDriver()
    run.lack_memory()
    answer = run.recut(0)
    assert of(ins.CutFiner, run(ev.RunResumed())) == [ins.CutFiner(0, (0,), WHY)]
    assert of(ins.ChangeCut, run(answer)) == [ins.ChangeCut(0, 0, 2, 4)]


def test_segments_stay_while_a_cut_is_made_because_it_may_write_equal_ones() -> None:
    run = LackingDriver(checkpoint="epoch")
    run(ev.TrialAdded(trial(1), 4))
    run.lack_memory()
    collected = []
    for state in range(1, 3):
        run.train_one()
        collected += of(ins.Collect, run(ev.Checkpointed(1, state, "a")))
    assert collected == [ins.Collect(1, 1, ())]


def forked_while_cut(state: int = 1) -> LackingDriver:
    """A fork of the trial that was admitted before its parent was cut finer, and came after."""
    run = LackingDriver()
    run.train_one()
    run.save(run.lack_memory())
    run(run.recut(0, 1))
    fork = replace(fork_of(0, 1), finer=True)
    run.told = run(ev.TrialForked(fork, 0, state, 3))
    return run


def test_a_fork_that_was_admitted_before_its_parent_was_cut_finer_is_laid_out_like_it() -> None:
    run = forked_while_cut()
    assert of(ins.ForkState, run.told) == [ins.ForkState(1, 0, 1)]
    (asked,) = of(ins.CutFiner, run.told)
    assert asked == ins.CutFiner(1, (1,), PARENT_WAS_RECUT, inherited=True)
    told = run(run.recut(1, number=1))
    assert of(ins.ChangeCut, told) == [ins.ChangeCut(1, 1, 2, 4, inherited=True)]
    (line,) = troubles(Decision(0, 0.0, ev.SearchClosed(), tuple(of(ins.ChangeCut, told))))
    assert line.startswith("trial-001 forks a trial that was cut finer; it goes on from state 1")


def test_a_fork_that_was_laid_out_like_its_parent_may_be_cut_finer_itself_once() -> None:
    run = forked_while_cut()
    run(ev.TrialStopped(0, "its fork goes on"))
    run(run.recut(1, number=1))
    assert of(ins.CutFiner, run.lack_memory()) == [ins.CutFiner(1, (1,), WHY)]
    shards = tuple((f"finest f{n}", f"finest t{n}") for n in range(8))
    config = replace(run.state.trials[1].config, initial_digests=shards, finer=False)
    run(TrialRecut(config, (RecutState(1, shards),), {}))
    (finish,) = of(ins.FinishTrial, run.lack_memory())
    assert finish.reason.endswith("It ran out of memory cut into 4 shards, and again cut into 8")


def test_a_fork_that_comes_while_its_parent_is_cut_finer_gets_its_state_before() -> None:
    run = LackingDriver()
    run.train_one()
    run.save(run.lack_memory())
    fork = fork_of(0, 1)
    told = run(ev.TrialForked(fork, 0, 1, 3))
    assert of(ins.ForkState, told) == [ins.ForkState(1, 0, 1)]
    assert of(ins.ChangeCut, run(run.recut(0, 1))) == [ins.ChangeCut(0, 1, 2, 4)]


def test_a_trial_is_cut_finer_though_a_fork_waits_for_a_state_that_it_makes_again() -> None:
    run = LackingDriver()
    run.train_one()
    run(ev.TrialForked(fork_of(0, 1), 0, 1, 3))
    run(ev.RunResumed())  # state 1 was in a worker's memory alone
    run(ev.WorkerJoined(0, "b", (0,)))
    told = run(ev.TaskFailed(run.running["b"], "b", WHY, memory=True))
    assert of(ins.CutFiner, told) == [ins.CutFiner(0, (0,), WHY)]
    run(run.recut(0))
    told = run.train("b")
    (asked,) = of(ins.Checkpoint, told)
    told = run(ev.Checkpointed(0, asked.state, "b"))
    assert of(ins.ForkState, told) == [ins.ForkState(1, 0, 1)]
    assert of(ins.CutFiner, told) == [ins.CutFiner(1, (1,), PARENT_WAS_RECUT, inherited=True)]


@settings(max_examples=examples(60))
@given(worlds(faults=("kill", "duplicate", "store", "driver", "memory"), order="seeded"), scripts)
def test_finer_cuts_change_no_history_and_no_result(world, script) -> None:
    world.run(script)
    check_outcome(world)
    may_fail = [number for number, each in world.state.trials.items() if each.status == "failed"]
    for number in may_fail:
        assert not world.state.trials[number].config.finer
    if not may_fail:
        check_undisturbed(world)


@settings(max_examples=examples(25))
@given(
    worlds(faults=("kill", "memory", "cut"), order="seeded"),
    scripts,
    st.data(),
)
def test_a_run_with_finer_cuts_goes_on_from_any_prefix(world, script, data) -> None:
    world.run(script)
    told = [n for n, each in enumerate(world.journal, 1) if "Cut" in str(each["instructions"])]
    lengths = st.integers(1, len(world.journal) - 1)
    killed_at(world, data.draw(st.sampled_from(told) | lengths if told else lengths), 2)
    world.run([])
    check_outcome(world)
    if all(each.status == "finished" for each in world.state.trials.values()):
        check_undisturbed(world)
