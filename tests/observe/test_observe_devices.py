"""What workers tell of their devices, in every view: the live table, the report and the trace."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import StoreError
from cerebro_hydra.observe import Decision, RunView
from cerebro_hydra.observe.planned import PlannedRun, WorkerLane, lanes_of
from cerebro_hydra.observe.report import render
from cerebro_hydra.observe.text import summary
from cerebro_hydra.observe.timeline import Timeline, read_run, trace
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.actions import HOST
from cerebro_hydra.plan.messages.device_work import DeviceWork
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.run_document import PLAN_FILE
from tests.observe.conftest import added, begin, fold, written
from tests.observe.test_observe_trace import faults

TASKS = ((0.5, 1.5, ((0, 1.0),)), (2.0, 4.0, ((0, 0.5), (1, 1.0))))
MOVES = ((0.0, 0.5, ((0, 0.25),)),)


def told(incarnation: str, devices: int = 2, budget: int | None = 1000) -> ev.DevicesWorked:
    """Tell of four seconds, in which each device computed for two and a half."""
    works = [
        DeviceWork(n, 2.5, 0.25, 5_000 + n, 3_000, 800 + n, budget, TASKS, MOVES)
        for n in range(devices)
    ]
    dram = DeviceWork(HOST, 0.0, 0.25, 700, 600, 9_000, None, (), MOVES)
    return ev.DevicesWorked(incarnation, 4.0, (*works, dram))


def decisions(workers: int = 1, devices: int = 2, budget: int | None = 1000) -> list[Decision]:
    """Two trials; each worker tells of its devices twice, the second time in another process."""
    records: list[tuple[float, Any, tuple[Any, ...]]]
    records = [(0.0, added(each), ()) for each in begin(2)[1:]]
    source = ins.StateSource(0, None)
    for worker in range(workers):
        for life, now in (("a", 10.0), ("b", 13.9)):
            name, attempt = f"{life}{worker}", len(records)
            start = ins.StartSubEpoch(attempt, 0, 1, 0, (0,), worker, name, source, {})
            join = ev.WorkerJoined(worker, name, (worker,), devices, devices + 1)
            done = ev.SubEpochDone(attempt, name, 4, 1.0, (), 9, 3.0, ev.Hop(0, 0, 0.0))
            records += [(now - 4, join, (start,)), (now, told(name, devices, budget), ())]
            records.append((now, done, ()))
            if life == "a":
                records.append((now, ev.WorkerLost(name, "killed"), ()))
                records.append((now, told(name, devices, budget), ()))  # too late to count
    return [Decision(seq, *record) for seq, record in enumerate(records)]


def folded(*args: Any) -> tuple[RunView, Timeline]:
    records, timeline = [*begin(2), *decisions(*args)], Timeline()
    for record in records:
        timeline.apply(record)
    timeline.lay_out()
    return fold(records), timeline


def devices_run(path: Path, *args: Any) -> RunFolder:
    return written(path, begin(2), decisions(*args))


def test_what_was_told_is_added_up_and_lanes_never_overlap() -> None:
    view, timeline = folded()
    assert {key: lane.totals for key, lane in timeline.lanes.items()} == view.devices
    assert view.devices.keys() == {(0, 0), (0, 1), (0, HOST)}
    device = view.devices[0, 1]
    found = device.promoted, device.spilled, device.peak, device.budget
    assert found == (10_002, 6_000, 801, 1000)
    assert view.working_seconds == pytest.approx(8.0)
    assert view.busy([device]) == view.busy() == pytest.approx(5.0 / 8.0)
    for lane in timeline.lanes.values():
        for spans in (lane.tasks, lane.moves):
            assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert timeline.lanes[0, 0].tasks[0] == (6.5, 7.5, ((0, 1.0),))
    assert [moment for moment, _ in timeline.lanes[0, 0].told] == [10.0, 13.9]


def test_a_long_run_has_no_more_spans_than_can_be_drawn() -> None:
    timeline = Timeline()
    timeline.apply(Decision(0, 0.0, ev.WorkerJoined(0, "a", (0,), 1, 2), ()))
    for n in range(1, 1001):
        timeline.apply(Decision(n, 4.0 * n, told("a", 1), ()))
    lane = timeline.lanes[0, 0]
    assert 100 < len(lane.tasks) <= 1000
    assert sum(seconds for _, _, work in lane.tasks for _, seconds in work) == pytest.approx(2500)


def test_bars_of_a_clock_that_was_set_back_stay_within_the_run() -> None:
    timeline = Timeline()
    for seq, event in enumerate((ev.WorkerJoined(0, "a", (0,), 1, 2), told("a", 1))):
        timeline.apply(Decision(seq, 3.0 * seq, event, ()))
    spans = timeline.lanes[0, 0].tasks + timeline.lanes[0, 0].moves
    assert all(0.0 <= begin <= end <= 3.0 for begin, end, _ in spans)


@pytest.mark.parametrize("queues", [True, False])
def test_busy_is_one_share_wherever_it_is_told(tmp_path: Path, queues: bool) -> None:
    kept = [d for d in decisions() if queues or not isinstance(d.event, ev.DevicesWorked)]
    told_of = [replace(each, seq=seq) for seq, each in enumerate(kept)]
    view = fold([*begin(2), *told_of])
    share = f"{view.busy():.0%}"
    assert share == ("62%" if queues else "38%")  # 10 of 16 s, or as their sub-epochs tell
    page = render(written(tmp_path, begin(2), told_of))
    assert f"Devices busy</dt><dd>{share[:-1]} %" in page
    if queues:
        assert f"2 devices {share} busy" in summary(view)
        assert page.count(f">{share[:-1]} %</td>") == 2


def test_no_device_is_busy_or_idle_while_no_driver_is_at_work() -> None:
    *before, last = decisions()
    resumed = replace(last, seq=last.seq + 1, time=last.time + 1000, event=ev.RunResumed())
    view = fold([*begin(2), *before, last, resumed])
    assert view.working_seconds == pytest.approx(8.0)


def test_the_summary_says_how_busy_devices_were_and_what_went_to_disk() -> None:
    view, _ = folded(1, 1, None)
    said = "1 device 62% busy, peak 800 B, 10.0 kB promoted, 6.0 kB spilled, 1.2 kB to disk"
    assert said in summary(view)


def test_the_trace_has_two_threads_per_device_and_counters_of_its_memory(tmp_path: Path) -> None:
    content = trace(devices_run(tmp_path))
    assert faults(content) == []
    events = content["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    computing = [e for e in events if e.get("cat") == "device"]
    moving = [e for e in events if e.get("cat") == "transfer"]
    assert {names[e["tid"]] for e in computing} == {"device 0", "device 1"}
    assert {names[e["tid"]] for e in moving} == {
        f"{place} transfers" for place in ("device 0", "device 1", "DRAM")
    }
    both = next(e for e in computing if e["name"] == "trial-000, trial-001")
    assert both["args"] == {"seconds": {"trial-000": 0.5, "trial-001": 1.0}}
    counters = [e for e in events if e["ph"] == "C"]
    assert [e["args"] for e in counters if e["name"] == "peak bytes of device 1"] == [
        {"in use": 801, "budget": 1000}
    ] * 2
    moved = [e["args"] for e in counters if e["name"] == "bytes moved of device 0"]
    assert moved[-1] == {"promoted": 10_000, "spilled": 6_000}


def test_the_report_has_a_lane_and_a_row_per_device(tmp_path: Path) -> None:
    page = render(devices_run(tmp_path))
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])  # type: ignore[index]
    names = [(lane["worker"], lane["name"], lane["computes"]) for lane in data["devices"]]
    assert names == [(0, "device 0", True), (0, "device 1", True), (0, "DRAM", False)]
    assert data["devices"][0]["tasks"][0] == [6.5, 7.5, [[0, 1.0]]]
    rows = re.findall(r"<tr>\s*<td>(worker .*?)</tr>", page, re.DOTALL)
    cells = [re.sub(r"<.*?>", " ", row).split() for row in rows]
    assert " ".join(cells[1]) == (
        "worker 0, device 1 62 % 5.0 s 0.5 s 3.0 s 10.0 kB 6.0 kB 801 B 1.0 kB"
    )
    assert " ".join(cells[2]) == "worker 0, DRAM – – 0.5 s – 1.4 kB 1.2 kB 9.0 kB no limit"


def test_a_run_without_queues_has_no_devices_in_its_report(tmp_path: Path) -> None:
    page = render(devices_run(tmp_path, 0))
    assert 'id="devices"' not in page and "device copying" not in page


def test_a_plan_is_shown_beside_what_happened_lane_by_lane(tmp_path: Path) -> None:
    folder = devices_run(tmp_path)
    assert PlannedRun.read(folder) is None and "<h2>Plan</h2>" not in render(folder)
    bars = ((0, "train", 0.0, 6.0), (9, "evaluate", 6.0, 8.0))
    lanes = (WorkerLane(0, 2, 7.0, 8.0, (bars,)), WorkerLane(3, 1, 2.0, 2.5))
    plan = PlannedRun(("plan: 2 shards & <b>",), 8.0, 16.0, lanes)
    plan.write(folder)
    assert PlannedRun.read(folder) == plan
    page = render(folder)
    assert "plan: 2 shards &amp; &lt;b&gt;" in page
    assert "8 s were expected, 16 s without a plan" in page
    (did,) = lanes_of(read_run(folder)[1])
    assert did.tasks == 2 and did.work == pytest.approx(6.0)
    cells = re.findall(r"<td>worker (\d)</td>(.*?)</tr>", page, re.S)
    told = {worker: re.findall(r'"num">([^<]*)</td>', row) for worker, row in cells}
    assert told["0"] == ["2", "2", "7.0 s", "6.0 s", "8.0 s", f"{did.end:.1f} s"]
    assert told["3"] == ["1", "–", "2.0 s", "–", "2.5 s", "–"]
    width = round(600 / max(did.end, 8.0), 2)
    assert f'class="c0 train" style="left:0.0%;width:{width}%"' in page
    assert 'class="cx evaluate"' in page, "a trial that the run never had is grey"
    for broken in ({"told": 3}, {"lanes": [{}]}):
        folder.write_json(PLAN_FILE, broken)
        with pytest.raises(StoreError, match=r"plan\.json"):
            render(folder)
