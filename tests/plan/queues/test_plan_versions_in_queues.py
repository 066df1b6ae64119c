"""PipeDream and 2BW in the queues of a worker: in little memory, beside others, with losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan.queues.events import (
    DeviceJoined,
    DeviceLost,
    VisitCancelled,
    WorkerEvent,
)
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.pipedream import pipedream_graph
from cerebro_hydra.plan.schedules.two_buffers import two_buffers_graph
from tests.examples import examples
from tests.plan.queues.test_plan_worker_chaos import (
    RULES,
    check_boundaries,
    check_changes,
    check_order,
    seconds_of,
    simulate,
    specs,
)


@st.composite
def stale(draw: st.DrawFn, visit: int, devices: int) -> VisitSpec:
    """Draw a visit whose tasks read older weights."""
    spec = draw(specs(visit, devices, pipelined=True))
    shards, microbatches = spec.graph.shards, draw(st.integers(1, 7))
    name = draw(st.sampled_from(["pipedream", "2bw"]))
    if name == "pipedream":
        graph = pipedream_graph(
            TaskGraph(shards, microbatches, 1), spec.devices, vertical_sync=draw(st.booleans())
        )
    else:
        least = max(1, min(spec.devices, shards) - 1)
        window = draw(st.integers(least, 3))
        graph = TaskGraph(shards, microbatches, window, spec.graph.barrier, spec.graph.tied)
        graph = two_buffers_graph(graph, spec.devices)
    return replace(spec, graph=graph, schedule=name)


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    """Draw one or two such visits, and perhaps another, in little memory."""
    devices = draw(st.integers(2, 3))
    visits = [draw(stale(visit, devices)) for visit in range(draw(st.integers(1, 2)))]
    if draw(st.booleans()):
        visits.append(draw(specs(len(visits), devices, pipelined=draw(st.booleans()))))
    slack = st.sampled_from([0, 1, 5, 1000])
    need = max(spec.device_need for spec in visits)
    host_need = max(spec.host_state_bytes + spec.host_boundary_bytes for spec in visits)
    return {
        "specs": visits,
        "budgets": [need + draw(slack) for _ in range(devices)],
        "host_budget": draw(st.none() | slack.map(lambda more: host_need + more)),
        "rule": RULES[draw(st.sampled_from(list(RULES)))],
        "seconds": seconds_of(visits, draw(st.sampled_from([0.0, 0.5, 3.0]))),
        "double_buffering": draw(st.booleans()),
    }


@settings(max_examples=examples(150))
@given(worlds())
def test_every_visit_ends_and_reads_its_versions(world: dict[str, Any]) -> None:
    timeline = simulate(world, [])
    assert {timeline.outcome(spec.visit) for spec in world["specs"]} == {"finished"}
    check_order(timeline, world["specs"])
    check_changes(timeline, world["specs"])
    check_boundaries(timeline, world["specs"])


@settings(max_examples=examples(150))
@given(worlds(), st.data())
def test_a_lost_device_costs_tasks_and_no_visit(world: dict[str, Any], data: st.DataObject) -> None:
    later: list[tuple[float, WorkerEvent]] = []
    for device in range(len(world["budgets"])):
        moment = 0.0
        for _ in range(data.draw(st.integers(0, 2))):
            moment += data.draw(st.integers(1, 60)) / 4
            later.append((moment, DeviceLost(device)))
            moment += data.draw(st.integers(0, 20)) / 4 + 0.1
            later.append((moment, DeviceJoined(device)))
    timeline = simulate(world, later)
    assert {timeline.outcome(spec.visit) for spec in world["specs"]} == {"finished"}
    check_changes(timeline, world["specs"])
    check_boundaries(timeline, world["specs"])


@settings(max_examples=examples(100))
@given(worlds(), st.integers(0, 240))
def test_a_cancelled_visit_stops_no_other(world: dict[str, Any], quarters: int) -> None:
    *others, last = world["specs"]
    timeline = simulate(world, [(quarters / 4, VisitCancelled(last.visit))])
    assert {timeline.outcome(spec.visit) for spec in others} <= {"finished"}
    check_order(timeline, others)
