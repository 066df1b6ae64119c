"""Workers that hold several sub-epochs at once, and share their devices among them."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.scheduler.bound import lower_bound
from cerebro_hydra.plan.costs.moves import MoveRates
from cerebro_hydra.plan.hop.trials import TaskKind
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.codec import from_json, to_json
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.policy.lookahead import snapshot
from cerebro_hydra.plan.policy.policy import most_work_first
from cerebro_hydra.plan.policy.view import View
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.simulate.run import Overheads, Simulation, WorkerCrash
from cerebro_hydra.plan.simulate.worker import SimulatedDevices
from tests.plan.closed_search import ClosedSearch
from tests.plan.driver import Driver, done, of


class Sharing(Driver):
    """A driver whose workers "a", "b", ... have these devices and residents."""

    def __init__(self, devices: int, residents: int, held: list[tuple[int, ...]], **more) -> None:
        super().__init__(partitions=sum(map(len, held)), joins=False, **more)
        for worker, partitions in enumerate(held):
            self(ev.WorkerJoined(worker, "abcdef"[worker], partitions, devices, residents))

    def residents(self) -> dict[str, list[int]]:
        """The trials of each worker's residents."""
        return {a.incarnation: [each.trial for each in a.started] for a in self.state.workers}


def test_a_worker_holds_as_many_sub_epochs_as_it_has_places() -> None:
    run = Sharing(1, 3, [(0,)], trials=5, evaluate=False)
    assert len(run.residents()["a"]) == 3 and len(run.state.attempts) == 3
    attempt = min(run.state.attempts)
    assert not of(ins.StartSubEpoch, run(ev.SubEpochEnding(attempt, "a")))
    assert len(run.state.attempts) == 4  # the fourth is reserved behind the one that is ending
    (start,) = of(ins.StartSubEpoch, run(done(attempt, "a")))
    assert start.trial in run.residents()["a"] and len(run.residents()["a"]) == 3


def test_a_worker_of_one_place_and_devices_that_nobody_names_are_as_before() -> None:
    joined = ev.WorkerJoined(0, "a", (0,))
    old = {k: v for k, v in to_json(joined).items() if k not in ("devices", "residents")}
    assert from_json(old) == joined and (joined.devices, joined.residents) == (1, 1)


def test_every_idle_device_is_served_before_a_worker_is_given_more() -> None:
    run = Sharing(2, 4, [(0,), (1,), (2,)], trials=7, evaluate=False)
    assert sorted(map(len, run.residents().values())) == [2, 2, 3]


def test_a_lost_worker_loses_all_its_residents() -> None:
    run = Sharing(2, 3, [(0,), (1,)], trials=6, evaluate=False)
    assert run.residents().keys() == {"a", "b"}
    lost = run.residents()["a"]
    run(ev.WorkerLost("a", "killed"))
    assert len(lost) == 3 and all(not run.state.trials[t].attempts for t in lost)
    run(ev.WorkerJoined(0, "c", (0,), 2, 3))
    assert sorted(run.residents()["c"]) == sorted(lost)


def test_a_trial_trains_at_one_worker_at_a_time() -> None:
    run = Sharing(2, 4, [(0, 1)], trials=1, evaluate=False)
    (first,) = run.state.attempts
    assert not of(ins.StartSubEpoch, run(ev.SubEpochEnding(first, "a")))
    assert [a.status for a in run.state.attempts.values()] == ["ending", "reserved"]
    assert len(of(ins.StartSubEpoch, run(done(first, "a")))) == 1


def test_a_worker_evaluates_a_trial_on_all_its_partitions_at_once_from_one_source() -> None:
    run = Sharing(2, 2, [(0,), (1, 2)], trials=1, order="seeded", seed=1)
    while not of(ins.Evaluate, run.last):
        (attempt,) = run.state.attempts.values()
        run.train(attempt.incarnation)
    evaluations = [e for e in of(ins.Evaluate, run.last) if e.incarnation == "b"]
    assert {e.partitions for e in evaluations} == {(1,), (2,)}
    assert len({e.source for e in evaluations}) == 1


def test_estimates_learn_what_devices_computed_and_not_the_time_beside_others() -> None:
    run = Sharing(1, 2, [(0,)], trials=2, evaluate=False)
    attempt = run.state.attempts[min(run.state.attempts)]
    event = done(attempt.number, "a")
    slow = {**to_json(event), "seconds": 40.0, "device_seconds": 20.0}
    run(from_json(slow))
    assert run.state.tables.estimates.seconds("train", attempt.trial, 0) == 20.0
    assert run.state.tables.estimates.now == 40.0


def test_a_look_ahead_counts_the_devices_of_each_worker() -> None:
    def bound(devices: int) -> float:
        run = Sharing(devices, devices, [(0,), (1,)], trials=8, evaluate=False)
        ahead = snapshot(View(run.state.tables))
        end, _ = ahead.rollout({t: [0.0, 0.0] for t in ahead.trials}, 0.0, 100)
        assert end >= ahead.bound
        return ahead.bound

    assert (bound(1), bound(2), bound(4)) == (8.0, 4.0, 2.0)


def test_a_trial_stays_where_its_bytes_are_when_that_costs_no_balance() -> None:
    def chosen(residents: int) -> int:
        """Let trial 0 choose between its own worker and one with a slightly longer backlog."""
        run = Sharing(1, residents, [(0, 2), (1, 3)], trials=1, evaluate=False)
        tables = run.state.tables
        (attempt,) = run.state.attempts.values()
        mine = attempt.incarnation
        run.train(mine)
        (following,) = run.state.attempts.values()
        run.scheduler.state._attempts.abandon(following)
        tables.refresh(0)
        for partition in (0, 1, 2, 3):
            if tables.workers.of_partition(partition).incarnation != mine:
                tables.estimates._pace["train"][partition] *= 1.1
        (task,) = most_work_first(View(tables))
        return tables.workers.by_worker[task.worker].incarnation == mine

    assert (chosen(1), chosen(2)) == (False, True)


@pytest.mark.parametrize(("devices", "residents"), [(0, 1), (1, 0)])
def test_a_worker_without_a_place_may_not_join(devices: int, residents: int) -> None:
    run = Driver(partitions=1, joins=False)
    with pytest.raises(ValueError, match="both must be at least 1"):
        run(ev.WorkerJoined(0, "a", (0,), devices, residents))


# ---------------------------------------------------------------------- the simulator


SHARDS, STEPS = 2, 3


def simulate(devices: int, residents: int, **more) -> tuple[Simulation, float]:
    """Simulate 8 trials on 2 workers with room for 3 shards to a device; return the bound too."""
    trials = tuple(TrialConfig(t, 1.0 + t / 8, 100, ((f"f{t}", f"t{t}"),)) for t in range(8))
    search = ClosedSearch(HopConfig(2), trials, 2)

    def run(kind: TaskKind, trial: int, partition: int, number: int) -> VisitSpec:
        cost = trials[trial].cost
        shard = ShardSpec(1, forward=cost, backward=2 * cost)
        return VisitSpec(
            number, TaskGraph(SHARDS, STEPS, training=kind == "train"), (shard,) * SHARDS
        )

    def seconds(kind: TaskKind, trial: int, partition: int) -> float:
        return SHARDS * STEPS * trials[trial].cost * (3 if kind == "train" else 1)

    workers = [(0,), (1,)]
    shape = SimulatedDevices((3,) * devices, residents, run, None, MoveRates(device=2.0))
    simulation = Simulation(search, workers, seconds, devices=shape, **more)
    return simulation, lower_bound(search, workers, seconds, devices)


@pytest.mark.parametrize(("devices", "residents"), [(1, 1), (1, 2), (2, 2), (2, 3), (4, 4)])
def test_devices_share_the_work_of_a_simulated_run(devices: int, residents: int) -> None:
    simulation, bound = simulate(devices, residents)
    timeline = simulation.run()
    assert bound <= timeline.makespan <= 1.25 * bound
    for visits in timeline.visit_logs:
        assert Counter(visits) == Counter((epoch, p) for epoch in range(2) for p in range(2))


def test_a_simulated_run_outlives_its_workers() -> None:
    crashes = [WorkerCrash(11.0, 0, 3.0), WorkerCrash(30.0, 1, 5.0)]
    simulation, bound = simulate(
        2, 3, crashes=crashes, overheads=Overheads(hop=lambda trial, first: ev.Hop(100, 0, 0.5))
    )
    timeline = simulation.run()
    assert timeline.makespan > bound
    assert {trial.status for trial in simulation.state.trials.values()} == {"finished"}
