"""Random runs on random devices: always progress, never over a budget, never two writers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cerebro_hydra.errors import InvalidSchedule
from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind, Part
from cerebro_hydra.plan.queues.events import (
    ActionDone,
    DeviceJoined,
    DeviceLost,
    ShardArrived,
    VisitAdded,
    VisitCancelled,
    VisitRestarted,
    VisitsExpected,
    WorkerEvent,
)
from cerebro_hydra.plan.queues.evictor import Evictor
from cerebro_hydra.plan.queues.pick import PICKS, Rule, oldest_first, sharp
from cerebro_hydra.plan.queues.visit import Visit
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.registry import FLUSHED
from cerebro_hydra.plan.schedules.validate import validate_order
from cerebro_hydra.plan.simulate.worker import WorkerSimulation, WorkerTimeline
from tests.examples import examples
from tests.plan.rules import at_random, fifo

NOTHING_FOLLOWS = (0.0, VisitsExpected(False))  # so that SHARP looks ahead

RULES: dict[str, Rule] = {**PICKS, "fifo": fifo}


@st.composite
def ties(draw: st.DrawFn, shards: int) -> tuple[tuple[int, ...], ...]:
    if shards == 1 or draw(st.booleans()):
        return ()
    group = draw(st.lists(st.integers(0, shards - 1), min_size=2, max_size=3, unique=True))
    return (tuple(group),)


@st.composite
def specs(draw: st.DrawFn, visit: int, devices: int = 1, pipelined: bool = False) -> VisitSpec:
    shards = draw(st.integers(devices if pipelined else 1, 4))
    graph = TaskGraph(
        shards,
        microbatches=draw(st.integers(1, 6 if pipelined else 4)),
        window=draw(st.integers(1, 3)),
        barrier=draw(st.booleans()),
        tied=draw(ties(shards)),
        training=draw(st.integers(0, 3)) > 0,
    )
    if not graph.training:
        graph = replace(graph, window=1, barrier=False, tied=())
    by_modules = not pipelined and draw(st.booleans())
    schedules = ["sequential"] if by_modules else list(FLUSHED)[pipelined:]
    schedule = draw(st.sampled_from(schedules))
    evaluates = schedule != "sequential" and not graph.training  # of which nothing is kept
    # Units have one task or many, and a device is given one of them ahead or several.
    scale = draw(st.sampled_from([1.0, 0.01, 0.002]))
    apart = draw(st.booleans())
    shard = st.builds(
        ShardSpec,
        state=st.integers(1, 10),
        gradients=st.integers(0, 10) if apart else st.just(0),
        optimizer=st.integers(0, 10) if apart else st.just(0),
        activations=st.integers(0, 5),
        boundary=st.integers(0, 3),
        forward=st.integers(1, 3).map(scale.__mul__),
        backward=st.integers(1, 3).map(scale.__mul__),
        update=st.integers(0, 1).map(scale.__mul__),
        forward_writes=st.booleans(),
    ).map(lambda each: replace(each, state=each.state + each.gradients + each.optimizer))
    spec = VisitSpec(
        visit,
        graph,
        tuple(draw(st.lists(shard, min_size=shards, max_size=shards))),
        by_modules=by_modules,
        recompute=draw(st.booleans()) or evaluates,
        fused=draw(st.booleans()),
        later_seconds=float(draw(st.integers(0, 10))),
        schedule=schedule,
        devices=draw(st.integers(2 if pipelined else 1, devices)),
        whole=draw(st.integers(0, 3)) == 0,
        at_home=draw(st.booleans()),
    )
    places = draw(st.permutations(range(devices)))[: len(spec.shares())]
    return replace(spec, places=tuple(places)) if draw(st.booleans()) else spec


@st.composite
def worlds(draw: st.DrawFn, pipelined: bool = False) -> dict[str, object]:
    """Draw runs and devices; ``pipelined``: a few visits with several lists, in little memory."""
    devices = draw(st.integers(2, 3) if pipelined else st.integers(1, 4))
    number = draw(st.integers(1, 3 if pipelined else 5))
    visits = [draw(specs(visit, devices, pipelined and visit < 2)) for visit in range(number)]
    slack = st.sampled_from([0, 1, 5] if pipelined else [0, 1, 5, 20, 1000])
    need = max(spec.device_need for spec in visits)
    host_need = max(spec.host_state_bytes + spec.host_boundary_bytes for spec in visits)
    budgets: list[int | None] = [need + draw(slack)]
    for device in range(1, devices):
        # What has a place may not lie elsewhere.
        shares = [
            zip(spec.places or range(devices), spec.shares(), strict=False) for spec in visits
        ]
        least = max(
            (share.need for each in shares for at, share in each if at == device), default=1
        )
        budgets.append(draw(st.none() | st.integers(least, 2 * need)))
    rule = draw(st.sampled_from([*RULES, "random"]))
    return {
        "specs": visits,
        "budgets": budgets,
        "host_budget": draw(st.none() | slack.map(lambda more: host_need + more)),
        "rule": RULES.get(rule) or at_random(draw(st.integers(0, 9))),
        "seconds": seconds_of(visits, draw(st.sampled_from([0.0, 0.5, 3.0]))),
        "double_buffering": draw(st.booleans()),
    }


def seconds_of(visits: list[VisitSpec], move: float):
    def seconds(action: Action) -> float:
        shard = visits[action.trial].shards[action.shard]
        match action.kind:
            case ActionKind.F:
                return shard.forward
            case ActionKind.B:
                return shard.backward
            case ActionKind.U:
                return shard.update
        return move

    return seconds


def simulate(world, later: list[tuple[float, WorkerEvent]]) -> WorkerTimeline:
    later = [NOTHING_FOLLOWS, *later]
    simulation = WorkerSimulation(**world, later=later, observe=WorkerState.validate)
    timeline = simulation.run()
    for place, budget in simulation.check.budgets.items():
        assert budget is None or simulation.check.peak[place] <= budget
    return timeline


def check_order(timeline: WorkerTimeline, visits: list[VisitSpec]) -> None:
    actions = [each for each in timeline.given if isinstance(each, Action)]
    for spec in visits:
        mine = [action for action in actions if action.trial == spec.visit]
        validate_order(mine, {spec.visit: spec.graph})


def check_changes(timeline: WorkerTimeline, visits: list[VisitSpec]) -> None:
    """Check that what is published has every change of the schedule once, in its order.

    Each part of a state has its own, and an update finds every gradient of its window, once.
    """
    home: dict[tuple[int, int], dict[Part, list[Action]]] = {}
    there: dict[tuple[int, int], dict[Part, list[Action]]] = {}
    sent = set()
    for done in timeline.done:
        action, key = done.action, (done.action.trial, done.action.shard)
        graph, shard = visits[key[0]].graph, visits[key[0]].shards[key[1]]
        task, parts = replace(action, device=None), action.parts or shard.sizes
        if action.kind is ActionKind.RECV:
            home[key] = {part: [] for part in shard.sizes}
        elif action.device == HOST or not graph.training:
            continue
        elif action.kind is ActionKind.LOAD:
            before = {} if Part.PARAMETERS in parts else there[key]
            there[key] = before | {part: home[key][part].copy() for part in parts}
        elif action.kind is ActionKind.SPILL:
            for part, changes in there[key].items():
                if part in parts or (part is Part.GRADIENTS and not changes):
                    home[key][part] = changes.copy()
                assert home[key][part] == changes, f"{action} loses changes"
        elif action.kind is ActionKind.SEND:
            windows = map(visits[key[0]].lists, range(graph.windows))
            mine = [t for w in windows for tasks in w for t in tasks if t.shard == key[1]]
            for part in shard.sizes.keys() - {Part.GRADIENTS}:
                assert home[key][part] == [t for t in mine if part in written_by(t, visits[key[0]])]
            assert not home[key].get(Part.GRADIENTS)
            sent.add(key)
        elif action.kind.computes:
            if action.kind is ActionKind.U and Part.GRADIENTS in shard.sizes:
                window = graph.window_of(task.microbatch or 0)
                backwards = [replace(task, kind=ActionKind.B, microbatch=m) for m in window]
                assert there[key][Part.GRADIENTS] == backwards
                there[key][Part.GRADIENTS] = []
            for part in written_by(task, visits[key[0]]):
                at_home = visits[key[0]].updates_at_home and part is Part.OPTIMIZER
                (home if at_home else there)[key][part].append(task)
    expected = {(s.visit, k) for s in visits if s.graph.training for k in range(s.graph.shards)}
    assert sent == expected


def written_by(task: Action, visit: VisitSpec) -> set[Part]:
    """Return the parts of its state that a task changes for good."""
    shard = visit.shards[task.shard]
    parts = {*shard.sizes}
    buffers = {Part.PARAMETERS} if shard.forward_writes else set()
    match task.kind:
        case ActionKind.F:
            return buffers
        case ActionKind.B:  # hooks of modules write, too
            own = {Part.GRADIENTS if Part.GRADIENTS in parts else Part.PARAMETERS}
            return own | (buffers if visit.by_modules else set())
        case _:
            return parts - {Part.GRADIENTS}


def check_boundaries(timeline: WorkerTimeline, visits: list[VisitSpec]) -> None:
    """Check that a task finds what those before it left in DRAM, also if it is done again."""
    there: dict[tuple[int, int], int | None] = {}
    for done in sorted(timeline.done, key=lambda done: done.begin):
        visit, microbatch = done.action.trial, done.action.microbatch
        if visits[visit].stays or done.action.kind not in (ActionKind.F, ActionKind.B):
            continue
        place = (visit, (microbatch or 0) % visits[visit].most_open)
        if done.action.kind is ActionKind.F and done.action.shard == 0:
            there[place] = microbatch
        assert there[place] == microbatch, f"{done.action} finds what {there[place]} left"


@settings(max_examples=examples(150))
@given(worlds() | worlds(pipelined=True))
def test_every_run_ends_in_order_and_within_every_budget(world) -> None:
    timeline = simulate(world, [])
    assert {timeline.outcome(spec.visit) for spec in world["specs"]} == {"finished"}
    check_order(timeline, world["specs"])
    check_changes(timeline, world["specs"])
    check_boundaries(timeline, world["specs"])


@settings(max_examples=examples(150))
@given(worlds() | worlds(pipelined=True), st.data())
def test_cancelled_runs_leave_nothing_and_the_others_end(world, data) -> None:
    moment = st.floats(0, 60, allow_nan=False)
    visits = world["specs"]
    numbers = data.draw(st.lists(st.sampled_from(range(len(visits))), min_size=1, unique=True))
    later: list[tuple[float, WorkerEvent]] = [
        (data.draw(moment), VisitCancelled(n)) for n in numbers
    ]
    later += data.draw(st.lists(st.sampled_from(later), max_size=2))  # said twice
    simulation = WorkerSimulation(**world, later=later, observe=WorkerState.validate)
    timeline = simulation.run()
    check_order(timeline, [spec for spec in visits if spec.visit not in numbers])
    assert {timeline.outcome(s.visit) for s in visits if s.visit not in numbers} <= {"finished"}
    ledger = simulation.state.ledger
    assert simulation.state.visits == {}
    assert (list(ledger), ledger.host_used) == ([], 0)


@settings(max_examples=examples(150))
@given(worlds() | worlds(pipelined=True), st.data())
def test_a_lost_device_costs_tasks_and_no_run(world, data) -> None:
    later: list[tuple[float, WorkerEvent]] = []
    part = data.draw(st.sampled_from([1 / 4, 1 / 400, 1 / 2000]))  # of the time that tasks take
    for device in range(len(world["budgets"])):
        moment = 0.0
        for _ in range(data.draw(st.integers(0, 2))):
            moment += data.draw(st.integers(1, 60)) * part
            later.append((moment, DeviceLost(device)))
            moment += (data.draw(st.integers(0, 20)) + 0.4) * part
            later += [(moment, DeviceJoined(device))] * data.draw(st.integers(1, 2))
    timeline = simulate(world, later)
    visits = world["specs"]
    assert {timeline.outcome(spec.visit) for spec in visits} == {"finished"}
    check_changes(timeline, visits)
    check_boundaries(timeline, visits)
    event(f"restarts: {sum(isinstance(a, VisitRestarted) for a in timeline.given)}")


class LooksAtAll(WorkerState):
    """Decides anew about every device and visit, whatever has changed."""

    def _decide(self) -> bool:
        self._note_all()
        return super()._decide()


@settings(max_examples=examples(100))
@given(worlds() | worlds(pipelined=True), st.data())
def test_what_has_not_changed_need_not_be_looked_at(world, data) -> None:
    devices, visits = range(len(world["budgets"])), range(len(world["specs"]))
    moment = st.integers(1, 120).map(lambda quarters: quarters / 4)
    lost = data.draw(st.lists(st.tuples(moment, st.sampled_from(devices)), max_size=3))
    later: list[tuple[float, WorkerEvent]] = [(at, DeviceLost(device)) for at, device in lost]
    later += [(at + 0.6, DeviceJoined(device)) for at, device in lost]
    cancelled = data.draw(st.lists(st.tuples(moment, st.sampled_from(visits)), max_size=2))
    later += [NOTHING_FOLLOWS, *((at, VisitCancelled(visit)) for at, visit in cancelled)]
    world["rule"] = data.draw(st.sampled_from(list(RULES.values())))
    simulation, all_of_it = (WorkerSimulation(**world, later=later) for _ in range(2))
    all_of_it.state.__class__ = LooksAtAll
    assert simulation.run().given == all_of_it.run().given


def one_run_with_a_loss(spec: VisitSpec, at: float) -> tuple[WorkerTimeline, list[str]]:
    """Lose the only device for a while, and return the tasks that it ended as well."""
    later: list[tuple[float, WorkerEvent]] = [(at, DeviceLost(0)), (at + 0.5, DeviceJoined(0))]
    seconds = seconds_of([spec], 0.0)
    timeline = WorkerSimulation([spec], [None], None, sharp, seconds, later=later).run()
    check_changes(timeline, [spec])
    return timeline, [str(d.action) for d in timeline.done if d.action.kind.computes]


SHARDS = (ShardSpec(1), ShardSpec(1))


def test_tasks_whose_changes_died_with_the_device_are_done_again() -> None:
    spec = VisitSpec(0, TaskGraph(2, 1), SHARDS)  # F0 0-1, F1 1-2, B1 2-4, B0 4-6
    timeline, tasks = one_run_with_a_loss(spec, at=4.5)
    # Shard 1 was written back after its last update, so it need not be done again.
    assert " ".join(tasks) == "t0s0F0@0 t0s1F0@0 t0s1B0@0 t0s1U0@0 t0s0B0@0 t0s0U0@0"
    held = VisitSpec(0, TaskGraph(2, 2, window=2), SHARDS)
    timeline, tasks = one_run_with_a_loss(held, at=4.5)
    assert tasks.count("t0s1B0@0") == 2
    assert not any(isinstance(each, VisitRestarted) for each in timeline.given)


def test_a_run_that_lost_changes_of_an_older_microbatch_begins_anew() -> None:
    spec = VisitSpec(0, TaskGraph(2, 2), SHARDS)
    timeline, tasks = one_run_with_a_loss(spec, at=6.5)
    assert VisitRestarted(0) in timeline.given
    assert tasks.count("t0s0F0@0") == 2
    updating = VisitSpec(0, TaskGraph(1, 2), (ShardSpec(1, update=1.0),))  # U1 7-8
    timeline, _ = one_run_with_a_loss(updating, at=7.5)
    assert VisitRestarted(0) in timeline.given


def test_a_cancelled_visit_stays_nowhere_once_its_device_is_lost() -> None:
    specs = [
        VisitSpec(
            visit,
            TaskGraph(shards, 1, training=False),
            (ShardSpec(1),) * shards,
            recompute=False,
        )
        for visit, shards in enumerate((1, 2, 1, 1))
    ]
    later: list[tuple[float, WorkerEvent]] = [(0.25, VisitCancelled(2)), (6.25, VisitCancelled(1))]
    for at, device in ((0.25, 0), (6.25, 1)):
        later += [(at, DeviceLost(device)), (at + 0.5, DeviceJoined(device))]
    WorkerSimulation(
        specs,
        [2, None],
        None,
        oldest_first,
        seconds_of(specs, 3.0),
        double_buffering=False,
        later=later,
        observe=lambda state: state.validate(),
    ).run()


def test_what_a_task_has_beside_its_shard_counts() -> None:
    spec = VisitSpec(0, TaskGraph(2, 1), (ShardSpec(4, activations=5), ShardSpec(4, activations=5)))
    simulation = WorkerSimulation([spec], [9], None, sharp, seconds_of([spec], 0.0))
    simulation.run()
    assert simulation.check.peak[0] == 9


def test_a_device_that_counts_no_activations_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = VisitSpec(0, TaskGraph(2, 1), (ShardSpec(4, activations=5), ShardSpec(4, activations=5)))
    monkeypatch.setattr(Evictor, "activations", lambda evictor, queue, unit: 0)
    with pytest.raises(InvalidSchedule, match="13 bytes are resident, but the budget is 9"):
        WorkerSimulation([spec], [9], None, sharp, seconds_of([spec], 0.0)).run()


def test_a_change_that_is_not_done_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    put_back = Visit.put_back

    def forgetful(visit: Visit, tasks: Iterable[Action]) -> None:
        put_back(visit, [task for task in tasks if task.kind is not ActionKind.B])

    monkeypatch.setattr(Visit, "put_back", forgetful)
    with pytest.raises(AssertionError):
        one_run_with_a_loss(VisitSpec(0, TaskGraph(2, 1), SHARDS), at=4.5)


def test_a_cancelled_run_has_its_boundary_values_until_its_task_ends() -> None:
    spec = VisitSpec(0, TaskGraph(2, 1), (ShardSpec(1, boundary=3), ShardSpec(1, boundary=3)))
    state = WorkerState([None], 20, sharp)
    state.handle([VisitAdded(spec)])
    (load,) = state.handle([ShardArrived(0, 0)])
    ((task,),) = state.handle([ActionDone(load, 1.0)])
    state.handle([VisitCancelled(0)])
    assert state.ledger.host_pinned == 6, "the task writes there"
    state.handle([ActionDone(task, 1.0)])
    assert state.ledger.host_pinned == 0
    state.validate()


def test_a_visit_that_is_cancelled_while_its_first_shard_comes_has_nothing_beside_it() -> None:
    training = VisitSpec(0, TaskGraph(1, 1), (ShardSpec(1),), recompute=False)
    shards = ShardSpec(1), ShardSpec(1, boundary=1)
    evaluation = VisitSpec(1, TaskGraph(2, 1, training=False), shards, by_modules=True)
    visits = [training, evaluation]
    WorkerSimulation(
        visits,
        [2],
        None,
        fifo,
        seconds_of(visits, 0.5),
        later=[(1.25, VisitCancelled(1))],
        observe=WorkerState.validate,
    ).run()


def test_a_visit_that_begins_anew_when_shards_were_sent_may_move_the_others_to_disk() -> None:
    quick = tuple(ShardSpec(state, forward=0.01, backward=0.01) for state in (1, 5, 7))
    first = VisitSpec(0, TaskGraph(3, 1, barrier=True, tied=((0, 1),)), quick)
    evaluation = VisitSpec(1, TaskGraph(1, 4, training=False), (ShardSpec(1),), recompute=False)
    third = VisitSpec(2, TaskGraph(2, 1), (ShardSpec(1), ShardSpec(2, boundary=3)))
    visits = [first, evaluation, third]
    later: list[tuple[float, WorkerEvent]] = [
        *((1.75, DeviceLost(0)), (1.85, DeviceJoined(0)), (2.1, DeviceLost(0))),
        *((2.7, DeviceJoined(0)), (12.75, DeviceLost(1)), (12.85, DeviceJoined(1))),
    ]
    world = {
        "specs": visits,
        "budgets": [7, None],
        "host_budget": 12,
        "rule": oldest_first,
        "seconds": seconds_of(visits, 0.5),
        "double_buffering": False,
    }
    timeline = simulate(world, later)
    assert VisitRestarted(0) in timeline.given
    assert {timeline.outcome(visit) for visit in range(3)} == {"finished"}
