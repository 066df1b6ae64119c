"""Partitions of workers that don't come back are taken over, and given back to those that do."""

from __future__ import annotations

from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from tests.plan.driver import Driver, of


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
    run.train(run.running["a"], "a")
    assert not run.running  # what is left to do needs partitions that are not decoded yet
    run(ev.PartitionsAdopted("a", (1,)))
    run.train(run.running["a"], "a")
    run(ev.PartitionsAdopted("a", (2,)))
    run.train(run.running["a"], "a")
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
