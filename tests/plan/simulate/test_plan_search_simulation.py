"""A whole search is simulated by the machines that would run it, task by task or as a flow."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan.costs.moves import MoveRates
from cerebro_hydra.plan.hop.trials import TaskKind
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.queues.pick import PICKS
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.simulate.run import (
    NO_OVERHEADS,
    Overheads,
    SimulatedTimeline,
    Simulation,
    WorkerCrash,
)
from cerebro_hydra.plan.simulate.worker import DeviceClock, SimulatedDevices
from tests.examples import examples
from tests.plan.closed_search import ClosedSearch

SHARDS, WINDOW = 3, 2


@dataclass(frozen=True)
class World:
    """Is a search, and workers that are all alike."""

    costs: tuple[float, ...]
    workers: int
    devices: int
    epochs: int
    microbatches: int = 8
    pick: str = "sharp"
    schedule: str = "sequential"
    budget: int | None = None
    residents: int | None = None
    evaluate: bool = True

    def visit(self, kind: TaskKind, trial: int, partition: int, number: int) -> VisitSpec:
        """Describe a task; partitions differ a little."""
        cost = self.costs[trial] * (1 + 0.1 * (partition % 2))
        shard = ShardSpec(10, forward=cost, backward=2 * cost, update=cost / 4)
        graph = TaskGraph(SHARDS, self.microbatches, WINDOW)
        if kind == "evaluate":
            graph = TaskGraph(SHARDS, self.microbatches, training=False)
        pipelined = kind == "train" and self.schedule != "sequential"
        return VisitSpec(
            number,
            graph,
            (shard,) * SHARDS,
            by_modules=not pipelined,
            schedule=self.schedule if pipelined else "sequential",
            devices=self.devices if pipelined else 1,
        )

    def seconds(self, kind: TaskKind, trial: int, partition: int) -> float:
        """Return the device seconds of a task."""
        graph, shards = (spec := self.visit(kind, trial, partition, 0)).graph, spec.shards
        if kind == "evaluate":
            return graph.microbatches * sum(s.forward for s in shards)
        each = sum(s.forward + s.backward for s in shards)
        return graph.microbatches * each + graph.windows * sum(s.update for s in shards)

    def run(self, fluid: bool, overheads: Overheads = NO_OVERHEADS) -> SimulatedTimeline:
        """Simulate it."""
        return self.simulation(fluid, overheads).run()

    def simulation(self, fluid: bool, overheads: Overheads = NO_OVERHEADS) -> Simulation:
        """Return the simulation of it."""
        trials = tuple(
            TrialConfig(t, cost, 100, ((f"f{t}", f"t{t}"),)) for t, cost in enumerate(self.costs)
        )
        shape = SimulatedDevices(
            (self.budget,) * self.devices,
            self.residents or self.devices + 1,
            self.visit,
            None,
            MoveRates(device=200.0),
            PICKS[self.pick],
            fluid,
        )
        return Simulation(
            ClosedSearch(HopConfig(self.workers, evaluate=self.evaluate), trials, self.epochs),
            [(worker,) for worker in range(self.workers)],
            self.seconds,
            devices=shape,
            overheads=overheads,
        )

    @property
    def bound(self) -> float:
        """Return what no order of the tasks can beat."""
        kinds: tuple[TaskKind, ...] = ("train", "evaluate")
        fullest = max(
            sum(self.seconds(kind, t, w) for kind in kinds for t in range(len(self.costs)))
            for w in range(self.workers)
        )
        at_once = 1 if self.schedule == "sequential" else self.devices
        longest = max(
            sum(self.seconds("train", trial, w) for w in range(self.workers)) / at_once
            for trial in range(len(self.costs))
        )
        return self.epochs * max(fullest / self.devices, longest)


worlds = st.builds(
    World,
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=4).map(tuple),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 2),
    microbatches=st.just(4),
    pick=st.sampled_from(sorted(PICKS)),
    schedule=st.sampled_from(["sequential", "1f1b", "gpipe"]),
)


@settings(max_examples=examples(40))
@given(worlds, st.booleans(), st.sampled_from([0.0, 0.3]))
def test_every_sub_epoch_is_simulated_once_and_none_beside_another_of_its_trial(
    world: World, fluid: bool, wait: float
) -> None:
    overheads = Overheads(hop=lambda trial, first: ev.Hop(100, 0, wait), wait=lambda first: wait)
    timeline = world.run(fluid, overheads)
    everything = Counter((e, p) for e in range(world.epochs) for p in range(world.workers))
    assert [Counter(log) for log in timeline.visit_logs] == [everything] * len(world.costs)
    told: dict[int, ins.StartSubEpoch] = {}
    under_way: defaultdict[int, set[int]] = defaultdict(set)
    for event, instructions in timeline.records:
        if isinstance(event, ev.SubEpochDone):
            under_way[told[event.attempt].trial].remove(event.attempt)
        for each in instructions:
            if isinstance(each, ins.StartSubEpoch):
                told[each.attempt] = each
                under_way[each.trial].add(each.attempt)
                # The next one may be accepted while the one before ends, and waits for its state.
                assert len(under_way[each.trial]) <= 2
                if len(under_way[each.trial]) == 2:
                    assert each.source.incarnation != each.incarnation
    assert timeline.makespan >= world.bound * (1 - 1e-9)


@settings(max_examples=examples(40))
@given(worlds, st.booleans())
def test_no_task_is_given_once_none_is_expected(world: World, evaluate: bool) -> None:
    simulation = replace(world, evaluate=evaluate).simulation(fluid=False)
    tables = simulation.state.tables
    expected, given_before, quiet_moments = True, 0, 0
    while not simulation.state.finished:
        simulation.step()
        assert expected or tables.next_attempt == given_before
        expected, given_before = simulation.scheduler.tasks_expected, tables.next_attempt
        quiet_moments += bool(tables.attempts) and not expected
    assert quiet_moments


def test_a_worker_looks_ahead_once_it_hears_that_nothing_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World((3.0, 3.0, 1.0, 3.0), 1, 3, 1, 2, residents=4, evaluate=False)
    told = world.run(fluid=False)
    monkeypatch.setattr(DeviceClock, "expect", lambda *untold: None)
    assert told.makespan < 0.9 * world.run(fluid=False).makespan


@settings(max_examples=examples(20))
@given(
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=6).map(tuple),
    st.integers(1, 2),
)
def test_more_workers_of_less_rows_each_are_never_slower_than_lists_can_be(
    costs: tuple[float, ...], epochs: int
) -> None:
    # Graham, "Bounds on multiprocessing timing anomalies", 1969: below twice the bound.
    few = World(costs, 1, 1, epochs, microbatches=16, residents=1)
    many = World(costs, 2, 1, epochs, microbatches=8, residents=1)
    makespan = many.run(fluid=True).makespan
    assert makespan <= 2 * many.bound
    assert makespan <= 2 * few.run(fluid=True).makespan


@pytest.mark.parametrize("pick", sorted(PICKS))
@pytest.mark.parametrize(
    ("costs", "devices", "schedule", "budget"),
    [
        ((1.0,) * 6, 1, "sequential", None),
        ((1.0,) * 6, 2, "sequential", None),
        ((1.0, 2.0, 4.0) * 2, 2, "sequential", None),
        ((1.0,) * 4, 2, "1f1b", None),
        ((1.0,) * 4, 1, "sequential", 25),
    ],
)
def test_visits_that_flow_take_as_long_as_their_tasks_within_a_few_percent(
    costs: tuple[float, ...], devices: int, schedule: str, budget: int | None, pick: str
) -> None:
    world = World(
        costs, 2, devices, 2, microbatches=16, pick=pick, schedule=schedule, budget=budget
    )
    coarse, detailed = world.run(fluid=True), world.run(fluid=False)
    assert coarse.makespan == pytest.approx(detailed.makespan, rel=0.06)
    assert coarse.makespan >= world.bound * (1 - 1e-9)


def test_replicas_wait_for_the_slowest_and_exchange_and_begin_anew_after_a_loss() -> None:
    config = HopConfig(2, evaluate=False)
    trials = (TrialConfig(0, 1.0, 100, (("f", "t"),), replicas=2),)
    overheads = Overheads(exchange=lambda trial, partitions: 0.5 * len(partitions))
    simulation = Simulation(
        ClosedSearch(config, trials, 2),
        [(0,), (1,)],
        lambda kind, trial, partition: 2.0 + partition,
        overheads=overheads,
        crashes=[WorkerCrash(5.0, 1, back_after=0.5)],
    )
    timeline = simulation.run()
    assert timeline.visit_logs == [[(0, 0), (0, 1), (1, 0), (1, 1)]]
    assert timeline.makespan == pytest.approx(5.5 + 4.0), "the second sub-epoch began again at 5.5"
