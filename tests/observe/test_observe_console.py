"""What consoles are told of a run, as lines, in a table or in a log."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from cerebro_hydra.observe import (
    Decision,
    OutputLine,
    Record,
    RunEnded,
    SlowBatch,
    WorkersMissing,
    console_observer,
)
from cerebro_hydra.observe.console import LiveTable, LogLines, PlainLines, frame
from cerebro_hydra.observe.text import duration
from cerebro_hydra.observe.view import human_bytes
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.simulate.run import WorkerCrash
from tests.observe.conftest import begin
from tests.observe.consoles import drawn, pipe, printed, terminal

PRINTED = OutputLine(worker=0, trial=1, stream="stdout", line="lr is [0.1]")


@pytest.mark.parametrize("median", [0.25, None])
def test_a_slow_batch_is_told_of_in_every_view(
    caplog: pytest.LogCaptureFixture, median: float | None
) -> None:
    slow = SlowBatch(worker=1, trial=0, epoch=2, partition=3, seconds=31.0, median=median)
    usual = "it is the first" if median is None else "the median is 0.25 s"
    said = (
        "[trial-000] a batch of epoch 3 on partition 3 (worker 1) has taken 31 s so far, and "
        f"{usual}; if it hangs, batch_seconds= would fail the trial and replace the agent"
    )
    views: list[tuple[Any, Console]] = [
        (PlainLines(console := pipe()), console),
        (LiveTable(console := terminal()), console),
    ]
    for view, console in views:
        for record in begin(1):
            view.on_record(record)
        view.on_record(slow)
        view.close()
        assert said in " ".join(printed(console).split())
    with caplog.at_level(logging.WARNING, "cerebro_hydra.trials"):
        LogLines().on_record(slow)
    assert caplog.messages == [said]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            WorkersMissing((1, 3), 90.0, 300.0),
            "waiting for workers 1, 3 for 1 min 30 s; after 5 min 00 s (join_timeout) others take "
            "over their partitions",
        ),
        (
            Decision(7, 0.0, ev.WorkerGivenUp(1, (1,), "it did not come within 300 s"), ()),
            "others take over the partitions of worker 1: it did not come within 300 s",
        ),
    ],
)
def test_missing_workers_are_told_of_in_every_view(
    caplog: pytest.LogCaptureFixture, record: Any, said: str
) -> None:
    views: list[tuple[Any, Console]] = [
        (PlainLines(console := pipe()), console),
        (LiveTable(console := terminal()), console),
    ]
    for view, console in views:
        for each in [*begin(1), record]:
            view.on_record(each)
        view.close()
        assert said in " ".join(printed(console).split())
    with caplog.at_level(logging.WARNING, "cerebro_hydra.trials"):
        LogLines().on_record(record)
    assert caplog.messages == [said]


def test_a_failed_audit_is_told_of_in_every_view(caplog: pytest.LogCaptureFixture) -> None:
    uncut = ins.TrainUncut(1, "at step 7, in epoch 1 on partition 0 (worker 1): parameter 'w'")
    decision = Decision(0, 0.0, ev.AuditFailed(3, "a", uncut.difference), (uncut,))
    said = (
        "trial-001 is trained again from its first state, in one piece, because its training in "
        f"shards differs from the uncut model: {uncut.difference}"
    )
    views: list[tuple[Any, Console]] = [
        (PlainLines(console := pipe()), console),
        (LiveTable(console := terminal()), console),
    ]
    for view, console in views:
        for record in begin(2):
            view.on_record(record)
        view.on_record(decision)
        view.close()
        assert said in " ".join(printed(console).split())
        assert view.view.trials[1].uncut_because == uncut.difference
    with caplog.at_level(logging.WARNING, "cerebro_hydra.trials"):
        LogLines().on_record(decision)
    assert caplog.messages == [said]


def test_the_summary_counts_audited_steps() -> None:
    console = pipe()
    lines = PlainLines(console)
    for record in begin(1):
        lines.on_record(record)
    source = ins.StateSource(0, None)
    starts = [ins.StartSubEpoch(n, 0, n + 1, 0, n, 0, "a", source, {}) for n in range(2)]
    lines.on_record(Decision(0, 0.0, ev.WorkerJoined(0, "a", (0, 1)), tuple(starts)))
    for number, seconds in enumerate((0.0, 0.5)):
        done = ev.SubEpochDone(number, "a", 4, 1.0, (), 9, 1.0, ev.Hop(0, 0, 0.0), seconds)
        lines.on_record(Decision(number + 1, 0.0, done, ()))
    assert lines.view.audit_seconds == 0.5
    lines.on_record(RunEnded(1.0))
    assert "; 1 audited step has the bits of the uncut model" in printed(console)


def test_view_suits_where_it_is_watched_from() -> None:
    assert isinstance(console_observer(1, terminal()), LiveTable)
    assert isinstance(console_observer(1, pipe()), PlainLines)
    assert isinstance(console_observer(0, terminal()), LogLines)


@pytest.mark.parametrize("width", [80, 160])
def test_names_and_values_are_shown_as_they_are(width: int) -> None:
    name, line = "[lr[/b] :x:", "[/] :100: [red]"
    metrics = {"loss": "min", name: "max"}
    records: list[Record] = [
        *begin(1, metrics=metrics, evaluation_metric=name, params={name: name}),
        replace(PRINTED, trial=0, line=line),
        RunEnded(1.0),
    ]
    for make, console in (
        (LiveTable, Console(file=io.StringIO(), width=width, color_system=None)),
        (PlainLines, pipe()),
    ):
        observer = make(console)
        for record in records:
            observer.on_record(record)
        assert line in printed(console)
        assert f"best first by val_{name} (higher is better)" in printed(console)
        assert printed(console).count(name) >= 4  # title, two headings, value
    assert name in drawn(frame(observer.view, 160, 40))


def test_plain_lines_tell_each_epoch_of_each_trial_once(simulate: Callable[..., Any]) -> None:
    _, records = simulate(3)
    console = pipe()
    observer = PlainLines(console)
    for record in records:
        observer.on_record(record)
    told = re.findall(r"^(trial-\d{3}) epoch (\d)/3: train_loss", printed(console), re.M)
    assert sorted(told) == [(f"trial-{t:03d}", str(e)) for t in range(3) for e in (1, 2, 3)]
    assert "\n3 trials in all\n" in printed(console)
    assert len(printed(console).splitlines()) < 30, "not one line per event"


def test_plain_lines_tell_of_lost_workers_and_repeated_work(simulate: Callable[..., Any]) -> None:
    _, records = simulate(
        4, (WorkerCrash(2.25, 0, 0.1), WorkerCrash(4.0, 1, 1.0), WorkerCrash(6.6, 0, 3.0))
    )
    console = pipe()
    observer = PlainLines(console)
    for record in records:
        observer.on_record(record)
    assert "worker 0 lost: killed" in printed(console)
    assert "repeats sub-epochs" in printed(console)


@pytest.mark.parametrize("make", [terminal, pipe])
def test_what_reads_the_rows_is_said_at_the_start(make: Callable[[], Console]) -> None:
    console = make()
    observer = console_observer(1, console)
    for record in begin(1, reader="Arrow 26.0.1 (petastorm is not installed)"):
        observer.on_record(record)
    observer.close()
    assert "rows are read by Arrow 26.0.1 (petastorm is not installed)" in printed(console)


@pytest.mark.parametrize("make", [terminal, pipe])
def test_a_trial_that_stopped_early_says_so(
    make: Callable[[], Console], simulate: Callable[..., Any]
) -> None:
    _, records = simulate(
        1, patience=1, keep="best", loss=lambda _, epoch: [0.25, 0.5, 0.75][epoch]
    )
    console = make()
    observer = console_observer(1, console)
    for record in records:
        observer.on_record(record)
    assert "finished early, best 1" in printed(console)
    assert "0.25" in printed(console)


@pytest.mark.parametrize("make", [terminal, pipe])
@pytest.mark.parametrize(
    ("keep", "status", "told"),
    [
        ("best", "finished, best 2", "best: trial-000 after its best epoch, 2 of 3: val_loss 0.25"),
        ("last", "finished", "best: trial-000 after its last epoch, 3 of 3: val_loss 0.75"),
    ],
)
def test_the_epoch_of_the_result_is_told(
    keep: str,
    status: str,
    told: str,
    make: Callable[[], Console],
    simulate: Callable[..., Any],
) -> None:
    _, records = simulate(1, keep=keep, loss=lambda _, epoch: [0.5, 0.25, 0.75][epoch])
    console = make()
    observer = console_observer(1, console)
    for record in records:
        observer.on_record(record)
    assert f"{status} " in printed(console)
    assert told in printed(console)


def test_plain_lines_say_why_a_trial_stopped_early(simulate: Callable[..., Any]) -> None:
    _, records = simulate(1, patience=1, loss=lambda _, epoch: [0.25, 0.5, 0.75][epoch])
    console = pipe()
    observer = PlainLines(console)
    for record in records:
        observer.on_record(record)
    why = "stopped early: val_loss was best after epoch 1 (0.25) and not better for 1 epoch"
    assert f"trial-000 {why}\n" in printed(console)


@pytest.mark.parametrize("make", [terminal, pipe])
def test_lines_of_user_code_carry_their_trial(
    make: Callable[[], Console], simulate: Callable[..., Any]
) -> None:
    _, records = simulate(2)
    console = make()
    observer = console_observer(1, console)
    outside = replace(PRINTED, trial=None, line="import")
    for record in [records[0], PRINTED, outside, *records[1:]]:
        observer.on_record(record)
    assert "[trial-001] lr is [0.1]" in printed(console)
    assert "[worker-0] import" in printed(console)


def test_quiet_prints_nothing_and_logs_what_user_code_printed(
    simulate: Callable[..., Any],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, records = simulate(2)
    observer = console_observer(0)
    with caplog.at_level(logging.INFO, logger="cerebro_hydra.trials"):
        for record in [*records, PRINTED]:
            observer.on_record(record)
    assert capfd.readouterr() == ("", "")
    assert [record.getMessage() for record in caplog.records] == ["[trial-001] lr is [0.1]"]


@pytest.mark.parametrize("make", [terminal, pipe])
def test_what_had_not_ended_is_interrupted(
    make: Callable[[], Console], simulate: Callable[..., Any]
) -> None:
    _, records = simulate(3)
    console = make()
    observer = console_observer(1, console)
    for record in [*records[: len(records) // 2], RunEnded(1.0)]:
        observer.on_record(record)
    assert "0 of 3 trials finished, 3 interrupted in 1 s" in printed(console)
    assert len(re.findall(r"trial-\d{3}.* interrupted", printed(console))) == 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (4800, "1 h 20 min")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (12_345_678, "12.3 MB"), (5 * 10**12, "5.0 TB")],
)
def test_bytes_read_well(count: int, text: str) -> None:
    assert human_bytes(count) == text
