"""Of kept states what is needed last leaves DRAM first, and no visit is disturbed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.events import (
    ActionDone,
    Answer,
    DeviceJoined,
    DeviceLost,
    ShardArrived,
    VisitAdded,
    VisitCancelled,
    WorkerEvent,
)
from cerebro_hydra.plan.queues.evictor import Evictor
from cerebro_hydra.plan.queues.ledger import Segments, StateName, state_key
from cerebro_hydra.plan.queues.pick import oldest_first
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.simulate.worker import WorkerSimulation
from tests.examples import examples
from tests.plan.queues.test_plan_worker_chaos import RULES, worlds
from tests.plan.rules import at_random

FROZEN = "frozen"
"""The digest of a segment that all trials share."""


class Shell:
    """Keeps states beside the visits of a worker, wants memory, and obeys; it has its own account.

    Args:
        begins_with: the source of each visit.
    """

    def __init__(
        self, begins_with: dict[int, StateName], shards: dict[int, int], seed: int
    ) -> None:
        self.random = Random(seed)
        self.begins_with, self.shards = begins_with, shards
        self.states: dict[StateName, dict[int, Segments]] = {}
        self.sizes: dict[str, int] = {}
        self.in_dram: set[str] = set()
        self.on_disk: set[str] = set()
        self.used: list[str] = []  # the longest unused first
        self.evicted = 0
        self.evicted_of_runs = 0

    def act(self, state: WorkerState) -> None:
        """Do something that a shell does between two events of the queues."""
        for _ in range(self.random.randrange(4)):
            self.random.choice([self.keep, self.keep, self.forget, self.take, self.read])(state)
        self.want(state)

    def keep(self, state: WorkerState) -> None:
        visit = self.random.choice([*self.begins_with])
        later = self.random.randrange(2)
        name = StateName(visit, self.begins_with[visit].number + later)
        shard = self.random.randrange(self.shards[visit])
        if shard in self.states.get(name, {}):
            return
        own = f"{name.trial}/{name.number}/{shard}"
        segments = {
            "frozen": (FROZEN, 3),
            "trainable": (own, self.sizes.get(own, self.random.randrange(1, 9))),
        }
        self.states.setdefault(name, {})[shard] = segments
        state.ledger.keep(name, shard, segments)
        for digest, nbytes in segments.values():
            if digest not in self.sizes:
                self.sizes[digest] = nbytes
                self.in_dram.add(digest)
            self.touch(digest)

    def forget(self, state: WorkerState) -> None:
        if self.states and self.random.random() < 0.3:
            name = self.random.choice([*self.states])
            digests = digests_of([self.states.pop(name)])
            state.ledger.forget_state(name)
            for digest in sorted(digests - digests_of(self.states.values())):
                state.ledger.drop_kept(digest)
                del self.sizes[digest]
                self.in_dram.discard(digest)
                self.on_disk.discard(digest)
                self.used.remove(digest)

    def take(self, state: WorkerState) -> None:
        if self.states:
            name = self.random.choice([*self.states])
            state.ledger.take(name, self.random.choice([*self.states[name]]))

    def read(self, state: WorkerState) -> None:
        if self.sizes:
            digest = self.random.choice(sorted(self.sizes))
            state.ledger.use(digest)
            self.touch(digest)
            if digest not in self.in_dram:
                state.ledger.move_kept(digest, in_dram=True)
                self.in_dram.add(digest)

    def touch(self, digest: str) -> None:
        if digest in self.used:
            self.used.remove(digest)
        self.used.append(digest)

    def want(self, state: WorkerState) -> None:
        """Want memory, and check what the plan lets go for it; the disk may have no room."""
        idle = {digest for digest in self.sizes if self.random.random() < 0.8}
        nbytes = self.random.randrange(30)
        going = state.evict_kept(nbytes, idle)
        self.check(state, nbytes, idle, going)
        if self.random.random() < 0.8:
            for digest in going:
                state.ledger.move_kept(digest, in_dram=False)
                self.in_dram.discard(digest)
                self.on_disk.add(digest)
                self.evicted += 1
                self.evicted_of_runs += self.next_use(state, digest) < math.inf

    def check(self, state: WorkerState, nbytes: int, idle: set[str], going: list[str]) -> None:
        movable = idle & self.in_dram
        assert set(going) <= movable and len(set(going)) == len(going)
        freed = [self.sizes[digest] for digest in going]
        assert sum(freed) >= nbytes or set(going) == movable
        assert not going or sum(freed[:-1]) < nbytes
        order = sorted(
            movable,
            key=lambda d: (self.next_use(state, d), d in self.on_disk, -self.used.index(d)),
            reverse=True,
        )
        assert going == order[: len(going)]

    def next_use(self, state: WorkerState, digest: str) -> float:
        """Return when a kept segment is needed, said once more."""
        found = [math.inf]
        for name, shards in self.states.items():
            for shard, segments in shards.items():
                if digest not in [each for each, _ in segments.values()]:
                    continue
                if shard not in state.ledger.taken(name):
                    found.append(1e9)
                for number, source in self.begins_with.items():
                    visit = state.visits.get(number)
                    if source != name or visit is None or visit.status == "cancelled":
                        continue
                    block = state.ledger.get(state_key(number, shard))
                    if digest == FROZEN or block is None or not block.changed:
                        waits = 0 if visit.status == "open" else 1e6
                        found.append(visit.next_use(shard) + waits)
        return min(found)


def simulated(
    world: dict[str, Any], later: list[tuple[float, WorkerEvent]], seed: int | None
) -> list[Answer]:
    """Return what the queues answered, with a shell that keeps states beside, or without one."""
    sources = {spec.visit: StateName(spec.visit, 3) for spec in world["specs"]}
    specs = [replace(spec, source=sources[spec.visit]) for spec in world["specs"]]
    shell = Shell(sources, {spec.visit: spec.graph.shards for spec in specs}, seed or 0)

    def observe(state: WorkerState) -> None:
        state.validate()
        if seed is not None:
            shell.act(state)

    rule = world["rule"]
    rule = rule if rule in RULES.values() else at_random(0)  # not as far as it has come
    world = {**world, "specs": specs, "rule": rule}
    simulation = WorkerSimulation(**world, later=later, observe=observe)
    timeline = simulation.run()
    for place, budget in simulation.check.budgets.items():
        assert budget is None or simulation.check.peak[place] <= budget
    event(f"evicted: {shell.evicted > 0}, of visits here: {shell.evicted_of_runs > 0}")
    return timeline.given


def digests_of(states: Iterable[dict[int, Segments]]) -> set[str]:
    segments = chain.from_iterable(shards.values() for shards in states)
    return {digest for each in segments for digest, _ in each.values()}


@settings(max_examples=examples(90))
@given(worlds() | worlds(pipelined=True), st.integers(0, 1000))
def test_what_leaves_dram_is_needed_last_whatever_runs_do(world, seed: int) -> None:
    given_alone = simulated(world, [], None)
    assert simulated(world, [], seed) == given_alone, "what is kept disturbs the queues"


@settings(max_examples=examples(60))
@given(worlds(), st.integers(0, 1000), st.data())
def test_it_is_so_where_devices_die_and_runs_are_cancelled(world, seed: int, data) -> None:
    moments = st.integers(1, 240).map(lambda quarters: quarters / 4)
    later: list[tuple[float, WorkerEvent]] = [
        (data.draw(moments), VisitCancelled(spec.visit)) for spec in world["specs"][1:3]
    ]
    for device in range(len(world["budgets"])):
        lost = data.draw(moments)
        later += [(lost, DeviceLost(device)), (lost + 0.5, DeviceJoined(device))]
    assert simulated(world, later, seed) == simulated(world, later, None)


def segments_of(digest: str, frozen: str = FROZEN) -> Segments:
    return {"frozen": (frozen, 0), "trainable": (digest, 4)}


def worker(visits: int, training: bool = True) -> tuple[WorkerState, list[Answer]]:
    """Return a worker with runs of two shards, and what the states have that they begin with."""
    state = WorkerState([None], None, oldest_first)
    for trial in range(visits):
        for shard in range(2):
            state.ledger.keep(StateName(trial, 0), shard, segments_of(f"{trial}/{shard}"))
    graph, shards = TaskGraph(2, 2, training=training), (ShardSpec(4),) * 2
    added = [VisitAdded(VisitSpec(n, graph, shards, source=StateName(n, 0))) for n in range(visits)]
    return state, state.handle(added)


def actions(answers: list[Answer]) -> list[Action]:
    units = [each if isinstance(each, tuple) else (each,) for each in answers]
    return [action for unit in units for action in unit if isinstance(action, Action)]


def done(action: Action) -> WorkerEvent:
    if action.kind is ActionKind.RECV:
        return ShardArrived(action.trial, action.shard)
    return ActionDone(action, 1.0)


def everything(state: WorkerState) -> list[str]:
    """Return all kept segments with bytes, the first to leave DRAM first."""
    sized = {block.digest for block in state.ledger.kept if block.nbytes}
    return state.evict_kept(1000, sized)


def test_what_a_run_here_begins_with_stays_longest() -> None:
    state, _ = worker(1)
    state.ledger.keep(StateName(7, 0), 0, segments_of("another"))
    assert everything(state) == ["another", "0/1", "0/0"]


def test_what_a_run_that_has_not_begun_needs_goes_before_what_others_need() -> None:
    state = WorkerState([None], 5, oldest_first)
    graph, shards = TaskGraph(1, 2), (ShardSpec(4, boundary=1),)
    for trial in range(2):
        state.ledger.keep(StateName(trial, 0), 0, segments_of(f"{trial}"))
        state.handle([VisitAdded(VisitSpec(trial, graph, shards, source=StateName(trial, 0)))])
    assert [visit.status for visit in state.visits.values()] == ["open", "waiting"]
    state.ledger.keep(StateName(7, 0), 0, segments_of("another"))
    state.ledger.use("0")
    assert everything(state) == ["another", "1", "0"]


def test_what_somebody_has_taken_is_a_copy_and_goes_first() -> None:
    state, _ = worker(0)
    for number in range(3):
        state.ledger.keep(StateName(number, 0), 0, segments_of(f"{number}"))
    assert everything(state) == ["0", "1", "2"]
    state.ledger.take(StateName(1, 0), 0)
    assert everything(state) == ["1", "0", "2"]
    state.ledger.use("0")
    assert everything(state) == ["1", "2", "0"]


@pytest.mark.parametrize(("training", "taken"), [(True, {0, 1}), (False, set())])
def test_a_run_that_trains_takes_what_it_begins_with(training: bool, taken: set[int]) -> None:
    state, answers = worker(1, training)
    assert not state.ledger.taken(StateName(0, 0))
    state.handle([done(action) for action in actions(answers)])
    assert set(state.ledger.taken(StateName(0, 0))) == taken


def test_the_state_before_a_run_is_a_copy_once_the_run_has_bytes_of_its_own() -> None:
    state, answers = worker(1)
    state.ledger.keep(StateName(7, 0), 0, segments_of("another"))
    answers = state.handle([done(action) for action in actions(answers)])
    assert everything(state)[0] == "another", "the device may be lost with what it has"
    while not any(action.kind is ActionKind.SEND for action in actions(answers)):
        answers = state.handle([done(action) for action in actions(answers)])
    assert everything(state)[-1] == "another"


def test_what_disk_has_goes_before_what_must_be_written() -> None:
    state, _ = worker(0)
    for number in range(3):
        state.ledger.keep(StateName(number, 0), 0, segments_of(f"{number}"))
    state.ledger.move_kept("1", in_dram=False)
    assert everything(state) == ["0", "2"]
    state.ledger.move_kept("1", in_dram=True)
    assert everything(state) == ["1", "0", "2"]


def test_frozen_bytes_are_kept_for_whichever_state_needs_them_first() -> None:
    state, _ = worker(0)
    state.ledger.keep(StateName(0, 0), 0, {"frozen": ("shared", 4)})
    state.ledger.keep(StateName(1, 0), 0, {"frozen": ("alone", 4)})
    state.ledger.keep(StateName(2, 0), 0, {"frozen": ("shared", 4)})
    for trial in (0, 1):
        state.ledger.take(StateName(trial, 0), 0)
    assert everything(state) == ["alone", "shared"]
    state.ledger.forget_state(StateName(2, 0))
    state.ledger.forget_state(StateName(0, 0))
    state.ledger.use("alone")
    assert everything(state) == ["shared", "alone"]


def test_a_rule_that_lets_the_nearest_go_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evictor, "kept", lambda evictor, nbytes, idle: sorted(idle)[:1])
    spec = VisitSpec(0, TaskGraph(2, 3), (ShardSpec(4),) * 2)
    world = {"specs": [spec], "budgets": [None], "host_budget": None, "rule": oldest_first}
    world["seconds"] = lambda action: 1.0
    with pytest.raises(AssertionError):
        for seed in range(5):
            simulated(world, [], seed)
