"""Pictures of schedules: what is drawn of each task, and those in docs/schedules.md."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.pipedream import pipedream_graph
from cerebro_hydra.plan.schedules.registry import SCHEDULES
from cerebro_hydra.plan.schedules.two_buffers import two_buffers_graph
from cerebro_hydra.plan.simulate.worker import DoneAction, WorkerTimeline
from tests.observe.task_picture import task_picture
from tests.plan.action_text import parse_action
from tests.plan.schedules.test_plan_gpipe import simulate

DOCS = Path(__file__).parents[2] / "docs"
DEVICES, MICROBATCHES, WINDOW = 4, 8, 4

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(schedule: str) -> WorkerTimeline:
    """Return 8 microbatches in windows of 4 on 4 devices; a model's forward takes 4 seconds."""
    shards = DEVICES * (2 if schedule == "interleaved" else 1)
    graph = TaskGraph(shards, MICROBATCHES, WINDOW)
    if schedule == "pipedream":
        graph = pipedream_graph(replace(graph, window=1), DEVICES)
    elif schedule == "2bw":
        graph = two_buffers_graph(graph, DEVICES)
    share = DEVICES / shards
    costs = (ShardSpec(8, 3, 2, forward=share, backward=2 * share),) * shards
    spec = VisitSpec(0, graph, costs, schedule=schedule, devices=DEVICES)
    return simulate([spec], DEVICES)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_pictures_of_the_docs_are_those_of_the_simulator(schedule: str) -> None:
    picture = task_picture(timeline_of(schedule).done, DEVICES)
    path = DOCS / "schedules" / f"{schedule}.svg"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(picture)
    assert path.read_text() == picture
    assert f"(schedules/{schedule}.svg)" in (DOCS / "schedules.md").read_text()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_task_is_drawn_once_and_none_over_another(schedule: str) -> None:
    timeline = timeline_of(schedule)
    root = ElementTree.fromstring(task_picture(timeline.done, DEVICES))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.get("fill") in ("#56b4e9", "#e69f00")]
    computed = [each for each in timeline.done if each.action.kind.computes]
    updates = [each for each in computed if str(each.action.kind) == "U"]
    assert len(boxes) == len(computed) - len(updates)
    assert len(list(root.iter(f"{SVG}line"))) == len(updates)
    lanes: dict[str, list[tuple[float, float]]] = {}
    for box in boxes:
        x, width = float(box.attrib["x"]), float(box.attrib["width"])
        lanes.setdefault(box.attrib["y"], []).append((x, x + width))
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))


def test_what_the_page_says_of_waiting_is_what_the_pictures_show() -> None:
    rows = re.findall(r"^\| `\"(\w+)\"` \|.*\| ([\d.]+) of ([\d.]+) s \|$", _page(), re.M)
    assert [row[0] for row in rows] == list(SCHEDULES)
    for schedule, waited, makespan in rows:
        timeline = timeline_of(schedule)
        idle = timeline.makespan * DEVICES - timeline.busy
        assert (idle / DEVICES, timeline.makespan) == pytest.approx(
            (float(waited), float(makespan))
        )


def _page() -> str:
    return (DOCS / "schedules.md").read_text()


def test_ranges_of_a_device_are_told_apart_by_their_shade() -> None:
    names = ("t0s0F0@0", "t0s1F0@0", "t0s4F0@0", "t0s0U0@0", "t0s0LOAD@0")
    done = [DoneAction(parse_action(name), n, n + 1.0) for n, name in enumerate(names)]
    picture = task_picture(done, 1)
    assert picture.count('fill="#56b4e9"') == 3
    assert picture.count('fill-opacity="0.5"') == 1
    assert picture.count("<line") == 1


def test_a_number_stands_where_there_is_room_for_it() -> None:
    task = parse_action("t0s0F10@0")
    drawn = [task_picture([DoneAction(task, 0.0, end)], 1) for end in (1.0, 2.0)]
    assert [">10<" in picture for picture in drawn] == [False, True]
