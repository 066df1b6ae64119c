"""What consoles are told of a run: as lines, in a table that redraws itself, or in a log."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from cerebro_hydra.observe import (
    Decision,
    NotSaved,
    OutputLine,
    Progress,
    Record,
    RunEnded,
    RunView,
    SlowBatch,
    WorkersMissing,
    console_observer,
)
from cerebro_hydra.observe.console import (
    LiveTable,
    LogLines,
    NotebookScreen,
    PlainLines,
    abbreviated,
    final_table,
    frame,
)
from cerebro_hydra.observe.text import duration, summary
from cerebro_hydra.observe.view import human_bytes
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.waits import to_stdout
from tests.golden import assert_golden
from tests.observe.conftest import CRASHES, Simulate, begin, fold
from tests.observe.consoles import GOLDEN, crowd, drawn, page, pipe, printed, terminal
from tests.observe.test_observe_devices import folded

QUIET, FIRST = ev.TrialStopped(0, ""), ins.StateSource(0, None)
NAME = "[lr[/b] :x:"
METRICS = {"loss": "min", NAME: "max"}
NAMED = begin(1, metrics=METRICS, evaluation_metric=NAME, params={NAME: NAME, "cut": ["red", "0"]})


def troubled() -> list[Record]:
    """A run with all that is told of beside progress: printed lines, troubles, audited steps."""
    uncut = ins.TrainUncut(1, "at step 7, in epoch 1 on partition 0 (worker 1): parameter 'w'")
    starts = [ins.StartSubEpoch(n, 0, n + 1, 0, (n,), 0, "a", FIRST, {}) for n in range(2)]
    done = [
        ev.SubEpochDone(n, "a", 4, 1.0, (), 9, 1.0, ev.Hop(0, 0, 0.0), seconds)
        for n, seconds in enumerate((0.0, 0.5))
    ]
    told: list[tuple[Any, ...]] = [
        (ev.WorkerJoined(0, "a", (0, 1)), *starts),
        *((each,) for each in done),
        (ev.AuditFailed(3, "a", uncut.difference), uncut),
        (ev.WorkerGivenUp(1, (1,), "it did not come within 300 s"),),
        (ev.CheckpointFailed(0, 2, "a", "the disk is full"),),
        (ev.StateDiffers(0, 2, (1,)),),
        (QUIET, ins.ChangeCut(0, 2, 1, 3), ins.ChangeCut(1, 2, 2, 3, inherited=True)),
    ]
    return [
        *begin(2, reader="Arrow 26.0.1 (petastorm is not installed)"),
        OutputLine(worker=0, trial=1, stream="stdout", line="lr is [0.1]"),
        OutputLine(worker=0, trial=None, stream="stdout", line="import"),
        *(SlowBatch(1, 0, 2, 3, seconds=31.0, median=median) for median in (0.25, None)),
        WorkersMissing((1, 3), 90.0, 300.0),
        NotSaved("the journal", "No space left on device"),
        *(Decision(seq, 0.0, event, tuple(rest)) for seq, (event, *rest) in enumerate(told)),
        RunEnded(1.0),
    ]


def losses(*values: float) -> Callable[[int, int], float]:
    return lambda trial, epoch: values[epoch]


STORIES: dict[str, Callable[[Simulate], list[Record]]] = {
    "three trials": lambda simulate: simulate(3)[1],
    "lost workers": lambda simulate: simulate(4, CRASHES[1:])[1],
    "an early end": lambda simulate: simulate(
        1, patience=1, keep="best", loss=losses(0.25, 0.5, 0.75)
    )[1],
    "a kept best epoch": lambda simulate: simulate(1, keep="best", loss=losses(0.5, 0.25, 0.75))[1],
    "a kept last epoch": lambda simulate: simulate(1, loss=losses(0.5, 0.25, 0.75))[1],
    "an interrupt": lambda simulate: [*(whole := simulate(3)[1])[: len(whole) // 2], RunEnded(1.0)],
    "troubles": lambda simulate: troubled(),
    "odd names": lambda simulate: [*NAMED, OutputLine(0, 0, "stdout", "[/] :100:"), RunEnded(1.0)],
}


@pytest.mark.parametrize("story", STORIES)
def test_what_is_told_of_a_run_in_every_view(
    story: str,
    simulate: Simulate,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines, scrolled, screen = pipe(), page(), terminal()
    views = PlainLines(lines), LiveTable(scrolled), LiveTable(screen), console_observer(0)
    with caplog.at_level(logging.INFO, "cerebro_hydra.trials"):
        for record in STORIES[story](simulate):
            for view in views:
                view.on_record(record)
    assert capfd.readouterr() == ("", "")
    shown = printed(scrolled)
    assert all(line.rstrip() in printed(screen) for line in shown.splitlines()), "above the table"
    log = "".join(f"{record.levelname}: {record.getMessage()}\n" for record in caplog.records)
    parts = {"lines": printed(lines), "table": shown, "log": log}
    assert_golden(GOLDEN / f"told_of_{story.replace(' ', '_')}.txt", parts)


def at_work() -> RunView:
    """One trial that waits, and one that trains, with a result and a loss."""
    start = ins.StartSubEpoch(0, 1, 4, 1, (1,), 0, "a", FIRST, {})
    ended = ins.EndEpoch(1, 0, {"train_loss": 0.7, "val_loss": 0.61234})
    events = [(ev.WorkerJoined(0, "a", (0,)), start), (QUIET, ended), (QUIET, start)]
    return fold(
        [
            *begin(2),
            *(Decision(0, 0.0, event, (instruction,)) for event, instruction in events),
            Progress(worker=0, trial=1, epoch=1, partition=1, step=1, steps=4, loss=0.54321),
        ]
    )


def scored() -> RunView:
    """Three trials that finished, one of them without a number."""
    view = fold(begin(3, evaluation_metric="accuracy"))
    for trial, accuracy in enumerate([0.5, 0.75, float("nan")]):
        metrics = {"train_loss": 1.0, "val_loss": 1.0, "val_accuracy": accuracy}
        told = (ins.EndEpoch(trial, 0, metrics), ins.FinishTrial(trial, "finished", "", 4))
        view.apply(Decision(0, 0.0, ev.TrialStopped(trial, ""), told))
    return view


VIEWS: dict[str, Callable[[], RunView]] = {
    "trials at work": at_work,
    "trials with scores": scored,
    "five trials": lambda: crowd(5),
    "thirty trials": lambda: crowd(30),
    "odd names": lambda: fold(NAMED),
    "devices of two workers": lambda: folded(2)[0],
    "devices of thirty workers": lambda: folded(30)[0],
    "workers without queues": lambda: folded(0)[0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_frames_and_final_tables_at_any_width(name: str) -> None:
    view, parts = VIEWS[name](), {}
    for width, height in ((60, 40), (80, 12), (160, 40), (300, 40)):
        text = drawn(frame(view, width, height), width)
        parts[f"frame of {width} x {height}"] = text
        parts[f"final table of {width}"] = drawn(final_table(view, width), width)
        for part in (text, parts[f"final table of {width}"]):
            assert all(len(line) <= width for line in part.splitlines())
    parts["summary"] = summary(view)
    assert_golden(GOLDEN / f"shown_of_{name.replace(' ', '_')}.txt", parts)


def test_view_suits_where_it_is_watched_from() -> None:
    assert isinstance(console_observer(1, terminal()), LiveTable)
    assert isinstance(console_observer(1, pipe()), PlainLines)
    assert isinstance(console_observer(0, terminal()), LogLines)


def test_live_table_gives_the_cursor_back_in_the_middle_of_a_run(simulate: Simulate) -> None:
    console = terminal()
    observer = LiveTable(console)
    for record in simulate(2)[1][:5]:
        observer.on_record(record)
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert printed(console).count(hide) == 1
    assert show not in printed(console)
    observer.close()
    assert printed(console).count(show) == 1


def test_short_names_stay_apart() -> None:
    short = abbreviated(["learning_rate", "lr", "batch_size", "optimizer", "weightDecay", "layers"])
    assert list(short.values()) == ["learning_rate", "lr", "bs", "opti", "wD", "laye"]


def test_the_bar_tells_how_far_the_run_is(simulate: Simulate) -> None:
    shares, seen, view = [], set[str](), RunView()
    for record in simulate(4)[1]:
        view.apply(record)
        shares.append(view.share_done)
        bar = drawn(frame(view, 120, 40), 120).splitlines()[-2]
        seen.update(re.findall(r"\d of 4 trials finished, about [^ ]* .* left", bar))
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    assert len(seen) > 5
    assert "4 of 4 trials finished" in bar


def test_time_left_is_never_less_than_that_of_one_trial_alone(simulate: Simulate) -> None:
    _, records = simulate(1)
    view = fold(records[: len(records) // 2])
    assert view.seconds_left() == view.eta(view.trials[0])


def test_a_notebook_has_one_display_that_changes(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[tuple[str, bool]]()
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()

    def publish(data: dict[str, str], *_: Any, update: bool = False, **__: Any) -> None:
        sent.append((data["text/html"], update))

    monkeypatch.setattr(shell.display_pub, "publish", publish)
    screen = NotebookScreen(80)
    screen.show(frame(fold(simulate(2)[1][:9]), 80, 40))
    screen.close()
    assert [update for _, update in sent] == [False, True, True]
    shown, left = sent[1][0], sent[2][0]
    assert shown.startswith("<pre") and left == ""
    assert "trial-001" in shown and "color:" in shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (4800, "1 h 20 min")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (12_345_678, "12.3 MB"), (5 * 10**12, "5.0 TB")]
)
def test_bytes_read_well(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_tables_have_a_column_of_rungs_where_trials_were_compared() -> None:
    view = crowd(3)
    assert "rung" not in drawn(frame(view, 200, 40), 200) + drawn(final_table(view, 200), 200)
    view.apply(Decision(0, 0.0, ev.TrialPaused(0, 27), ()))
    for table in (frame(view, 200, 40), final_table(view, 200)):
        (row,) = (line for line in drawn(table, 200).splitlines() if "trial-000" in line)
        assert "27" in row.split()
        assert "paused" in row.split()
        assert "rung" in drawn(table, 200)


def test_a_live_table_shows_below_itself_what_is_waited_for(simulate) -> None:
    screen = terminal()
    table = LiveTable(screen)
    for record in simulate(2)[1][:5]:
        table.on_record(record)
    assert to_stdout.rewrite("starting 2 workers (3 s)")
    assert "starting 2 workers (3 s)" in printed(screen)
    count = printed(screen).count("starting")
    assert to_stdout.rewrite("")
    assert printed(screen).count("starting") == count
    table.close()
    assert not to_stdout.rewrite("nobody shows this")
