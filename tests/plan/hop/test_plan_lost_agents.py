"""A trial whose tasks kill their agents fails alone, with a story that names every agent."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan.hop.journal import fold
from cerebro_hydra.plan.hop.trials import MOST_LOST_AGENTS
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from tests.examples import examples
from tests.journals import comparable
from tests.plan.closed_search import ClosedSearch
from tests.plan.driver import Driver, in_order, of
from tests.plan.world import World
from tests.plan.worlds import check_outcome, check_undisturbed, places, scripts

Task = ins.StartSubEpoch | ins.Evaluate


class LosingDriver(Driver):
    """One worker, whose agents are "a0", "a1", ...; validates after every event."""

    def __init__(self, **more) -> None:
        super().__init__(partitions=1, evaluate=False, **more)
        self.starts = 0
        self(ev.WorkerJoined(0, "a0", (0,)))

    @property
    def agent(self) -> str:
        return f"a{self.starts}"

    def lose(self, attempt: int | None = None, reason: str = "the connection broke") -> list:
        """Lose the worker's agent in the attempt that runs, or in another one; then replace it."""
        attempt = self.running[self.agent] if attempt is None else attempt
        given = self(ev.WorkerLost(self.agent, reason, f"host-{self.starts}", attempt))
        self.starts += 1
        self(ev.WorkerJoined(0, self.agent, (0,)))
        return given


def test_the_third_agent_lost_in_a_row_fails_the_trial_with_its_story() -> None:
    run = LosingDriver(epochs=2)
    assert not of(ins.FinishTrial, run.lose())
    assert not of(ins.FinishTrial, run.lose(reason="no heartbeat for 10.0 s"))
    (finish,) = of(ins.FinishTrial, run.lose())
    assert (finish.trial, finish.status, finish.state) == (0, "failed", 0)
    first, *lines = finish.reason.splitlines()
    assert first.startswith(
        "3 agents in a row were lost while trial 0 ran on them; likely causes: "
    )
    assert all(cause in first for cause in ("os._exit", "segmentation", "memory", "Python's lock"))
    assert lines == [
        "  1. worker 0 on host-0, training of epoch 1 on partition 0: the connection broke",
        "  2. worker 0 on host-1, training of epoch 1 on partition 0: no heartbeat for 10.0 s",
        "  3. worker 0 on host-2, training of epoch 1 on partition 0: the connection broke",
    ]


def test_a_finished_task_clears_the_trial_of_the_losses_before_it() -> None:
    run = LosingDriver(epochs=2, order="seeded")
    for _ in range(MOST_LOST_AGENTS - 1):
        run.lose()
    run.train(run.agent)
    assert run.state.trials[0].lost_agents == []


def test_a_finished_task_that_only_repeats_what_was_lost_clears_nothing() -> None:
    """The state after epoch 0 is on the only worker, so that each loss in epoch 1 undoes it."""
    run = LosingDriver(epochs=2)
    for _ in range(MOST_LOST_AGENTS):
        assert not of(ins.FinishTrial, run.told)
        run.train(run.agent)
        run.lose()
    assert of(ins.FinishTrial, run.told)[0].status == "failed"


def test_losses_while_lost_work_is_done_again_do_not_add_up_if_work_is_done_between() -> None:
    run = LosingDriver(epochs=3)
    for epoch in range(2):
        run.train(run.agent)
        assert run.state.trials[0].newest == epoch + 1
    run.lose()  # of the first two epochs, nothing is left
    for _ in range(3 * MOST_LOST_AGENTS):
        run.train(run.agent)
        run.lose()  # in the second epoch, which was done before
    assert not of(ins.FinishTrial, run.told)
    run.lose()  # with nothing done between; the first loss, beyond all that was done, counts still
    assert of(ins.FinishTrial, run.told)[0].status == "failed"


@pytest.mark.parametrize("attempt", [None, 99])
def test_an_agent_that_had_not_begun_the_task_it_was_told_speaks_against_no_trial(
    attempt: int | None,
) -> None:
    run = LosingDriver()
    for _ in range(2 * MOST_LOST_AGENTS):
        run(ev.WorkerLost(run.agent, "killed", "", attempt))
        run.starts += 1
        run(ev.WorkerJoined(0, run.agent, (0,)))
    assert not of(ins.FinishTrial, run.told)
    assert run.state.trials[0].lost_agents == []


def test_an_agent_lost_in_a_cancelled_task_speaks_against_no_other_trial() -> None:
    """It is told the next task already, while the cancelled one still runs on its main thread."""
    run = LosingDriver(trials=2)
    cancelled = run.running[run.agent]
    trial = run.state.attempts[cancelled].trial
    run(ev.TrialStopped(trial, "pruned"))
    other = run.running[run.agent]
    assert run.state.attempts[other].trial != trial
    run.lose(cancelled)
    assert [each.lost_agents for each in run.state.trials.values()] == [[], []]


def test_agents_that_are_lost_together_are_one_loss() -> None:
    run = Driver(partitions=4, seed=in_order(0, 1, 2, 3), order="seeded")
    for worker in "abcd":
        run.train(worker)
    evaluations = dict(run.running)
    assert len(evaluations) == 4
    for worker in "abc":  # one machine with three agents, all of which evaluate the trial
        run(ev.WorkerLost(worker, "its executor was lost", "", evaluations[worker]))
    (trial,) = run.state.trials.values()
    assert len(trial.lost_agents) == 1 and not trial.over


def test_after_a_loss_a_trial_is_evaluated_on_one_agent_at_a_time() -> None:
    run = Driver(partitions=3, seed=in_order(0, 1, 2), order="seeded")
    for worker in "abc":
        run.train(worker)
    for worker, attempt in list(run.running.items()):
        run(ev.WorkerLost(worker, "killed", "", attempt))
    for worker in range(3):
        run(ev.WorkerJoined(worker, "xyz"[worker], (worker,)))
    assert len(run.state.attempts) == 1


@st.composite
def lethal_worlds(draw, kills: int = 0, order: str | None = None):
    """Draw a world in which some trials kill the agent of some of their tasks."""
    partitions, count = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    cut = draw(st.integers(1, partitions))
    trials = tuple(TrialConfig(t, 1.0, 100, ((f"f/{t}", f"t/{t}"),)) for t in range(count))
    epochs = draw(st.integers(1, 3))
    config = HopConfig(
        partitions,
        order=order or draw(st.sampled_from(["dynamic", "seeded"])),
        seed=draw(st.integers(0, 2**16)),
        evaluate=draw(st.booleans()),
    )
    killers = draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 1))
    epoch = draw(st.integers(0, epochs - 1))
    partition = draw(st.none() | st.integers(0, partitions - 1))
    kind = draw(st.sampled_from([ins.StartSubEpoch, ins.Evaluate]))
    if not config.evaluate:
        kind = ins.StartSubEpoch

    def lethal(task: Task) -> bool:
        where = task.epoch == epoch and partition in (None, *task.partitions)
        return task.trial in killers and where and isinstance(task, kind)

    world = World(
        ClosedSearch(config, trials, epochs),
        [tuple(range(partitions))[i::cut] for i in range(cut)],
        Counter(kill=draw(st.integers(0, kills))),
        slow_saves=draw(st.booleans()),
        lethal=lethal,
        places=draw(places(cut)),
    )
    return world, killers, partition


@settings(max_examples=examples(100))
@given(lethal_worlds(), scripts)
def test_lethal_trials_fail_after_three_losses_and_all_others_finish(lethal, script) -> None:
    world, killers, partition = lethal
    world.run(script)
    check_outcome(world)
    for index, trial in world.state.trials.items():
        deaths = world.killers.count(index)
        if index not in killers:
            assert (trial.status, deaths, trial.lost_agents) == ("finished", 0, [])
            continue
        assert trial.status == "failed" and len(trial.lost_agents) == MOST_LOST_AGENTS
        # Of evaluations that run side by side, several agents are lost before the first is known.
        # Between the losses at one partition, other partitions may still bring the trial further.
        beside = len(world.workers) - 1 if world.config.evaluate else 0
        everywhere = partition is None
        most = (
            MOST_LOST_AGENTS + beside if everywhere else MOST_LOST_AGENTS * world.config.partitions
        )
        assert MOST_LOST_AGENTS <= deaths <= most
        if everywhere and not world.config.evaluate:
            assert deaths == MOST_LOST_AGENTS


@settings(max_examples=examples(60))
@given(lethal_worlds(kills=6), scripts)
def test_other_losses_beside_lethal_trials_cost_no_innocent_trial(lethal, script) -> None:
    world, killers, _ = lethal
    world.run(script)
    check_outcome(world)
    failed = {i for i, trial in world.state.trials.items() if trial.status == "failed"}
    assert failed == killers
    entries = [json.loads(json.dumps(entry)) for entry in world.journal]
    assert comparable(fold(world.config, entries)) == comparable(world.state)


@settings(max_examples=examples(40))
@given(lethal_worlds(kills=3, order="seeded"), scripts)
def test_innocent_trials_have_the_results_of_a_run_without_lethal_ones(lethal, script) -> None:
    world, killers, _ = lethal
    world.run(script)
    check_undisturbed(world, but=killers)


# ---------------------------------------------------------------------- workers that stay away


def one_left() -> Driver:
    """Return a run of three workers, two of which are lost and given up."""
    run = Driver(partitions=3, evaluate=False)
    for worker, name in enumerate("bc", start=1):
        run(ev.WorkerLost(name, "the machine burns"))
        run(ev.WorkerGivenUp(worker, (worker,), "gone"))
    return run


def test_a_run_with_one_worker_left_goes_on_and_finishes() -> None:
    run = one_left()
    asked = of(ins.AdoptPartitions, run.told)
    assert asked == [ins.AdoptPartitions(0, "a", (1,)), ins.AdoptPartitions(0, "a", (2,))]
    run.train("a")
    assert not run.running  # what is left to do needs partitions that are not decoded yet
    run(ev.PartitionsAdopted("a", (1,)))
    run.train("a")
    run(ev.PartitionsAdopted("a", (2,)))
    run.train("a")
    run(ev.Checkpointed(0, 3, "a"))
    assert run.state.finished


def test_the_partitions_go_to_those_that_have_the_fewest() -> None:
    run = Driver(partitions=4, evaluate=False)
    for worker, name in enumerate("cd", start=2):
        run(ev.WorkerLost(name, "killed"))
        run(ev.WorkerGivenUp(worker, (worker,), "gone"))
    assert [each.incarnation for each in of(ins.AdoptPartitions, run.told)] == ["a", "b"]


def test_a_worker_that_comes_back_has_its_own_partitions_again() -> None:
    run = one_left()
    run(ev.PartitionsAdopted("a", (1,)))
    run(ev.WorkerJoined(1, "again", (1,)))
    run(ev.WorkerJoined(2, "too", (2,)))
    run(ev.PartitionsAdopted("a", (2,)))  # too late
    held = {agent.incarnation: agent.partitions for agent in run.state.workers}
    assert held == {"a": (0,), "again": (1,), "too": (2,)}


def test_what_was_taken_over_is_taken_over_again_if_that_worker_is_lost_too() -> None:
    run = Driver(partitions=3, evaluate=False)
    run(ev.WorkerLost("c", "killed"))
    run(ev.WorkerGivenUp(2, (2,), "gone"))
    run(ev.PartitionsAdopted("a", (2,)))
    assert of(ins.AdoptPartitions, run(ev.WorkerLost("a", "killed"))) == [
        ins.AdoptPartitions(1, "b", (2,))
    ]
    assert run.state.workers.of_partition(2) is None
    run(ev.PartitionsAdopted("b", (2,)))
    assert run.state.workers.of_partition(2).incarnation == "b"


def test_a_partition_that_another_worker_now_owns_is_not_taken_over() -> None:
    run = one_left()
    run(ev.WorkerJoined(3, "of a resumed run", (1, 2)))
    run(ev.PartitionsAdopted("a", (1,)))
    assert run.state.workers.of_partition(1).incarnation == "of a resumed run"


def test_a_worker_that_came_in_time_is_not_given_up() -> None:
    run = Driver(partitions=2, evaluate=False)
    assert run(ev.WorkerGivenUp(1, (1,), "late news")) == []
