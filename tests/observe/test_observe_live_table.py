"""The live table at any width and height, in a terminal and in a notebook."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from cerebro_hydra.observe import (
    Decision,
    Progress,
    RunView,
)
from cerebro_hydra.observe.console import LiveTable, NotebookScreen, abbreviated, frame
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from tests.observe.conftest import begin
from tests.observe.consoles import crowd, drawn, printed, terminal


def test_live_table_gives_the_cursor_back_in_the_middle_of_a_run(
    simulate: Callable[..., Any],
) -> None:
    _, records = simulate(2)
    console = terminal()
    observer = LiveTable(console)
    for record in records[:5]:
        observer.on_record(record)
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert printed(console).count(hide) == 1
    assert show not in printed(console)
    observer.close()
    assert printed(console).count(show) == 1


def test_frame_shows_where_each_trial_is() -> None:
    view = RunView()
    for record in begin(2):
        view.apply(record)
    started = ins.StartSubEpoch(0, 1, 4, 1, 1, 0, "a", ins.StateSource(0, None), {})
    for event, instruction in [
        (ev.WorkerJoined(0, "a", (0,)), started),
        (ev.TrialStopped(0, ""), ins.EndEpoch(1, 0, {"train_loss": 0.7, "val_loss": 0.61234})),
        (ev.TrialStopped(0, ""), started),
    ]:
        view.apply(Decision(0, 0.0, event, (instruction,)))
    view.apply(Progress(worker=0, trial=1, epoch=1, partition=1, step=1, steps=4, loss=0.54321))
    text = drawn(frame(view, 160, 40))
    row = next(line for line in text.splitlines() if "trial-001" in line)
    assert row.split() == ["trial-001", "0.1", "training", "2/3", "1", "0", "0.5432", "0.6123"]
    assert "0 of 2 trials so far finished" in text
    assert "val_loss (lower is better)" in " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_frame_has_a_line_per_trial_and_parameters_at_any_width(width: int) -> None:
    lines = drawn(frame(crowd(5), width, 40), width).splitlines()
    assert all(len(line) <= width for line in lines)
    rows = [line for line in lines if "trial-" in line]
    assert [row.split()[0] for row in rows] == [f"trial-{n:03d}" for n in range(5)]
    heading = next(line for line in lines if "val_loss ↓" in line)
    assert heading.split()[:3] == ["trial", "lr", "lv"]
    assert rows[2].split()[1:3] == ["2.123", "2.123"]
    assert any("no room here for" in line for line in lines)


def test_names_are_in_full_where_there_is_room() -> None:
    heading = drawn(frame(crowd(5), 300, 40), 300).splitlines()[1]
    assert heading.split()[:4] == ["trial", "learning_rate", "lambda_value", "batch_size"]


def test_short_names_stay_apart() -> None:
    short = abbreviated(["learning_rate", "lr", "batch_size", "optimizer", "weightDecay", "layers"])
    assert list(short.values()) == ["learning_rate", "lr", "bs", "opti", "wD", "laye"]


def test_a_low_screen_has_the_running_trials_and_the_best() -> None:
    text = drawn(frame(crowd(30), 80, 12), 80)
    assert re.findall(r"trial-\d{3}", text) == ["trial-000", "trial-001", "trial-028", "trial-029"]
    assert "and 26 more trials" in text


def test_the_bar_tells_how_far_the_run_is(simulate: Callable[..., Any]) -> None:
    _, records = simulate(4)
    shares, seen = [], set[str]()
    observer = LiveTable(terminal())
    for record in records:
        observer.view.apply(record)
        shares.append(observer.view.share_done)
        bar = drawn(frame(observer.view, 120, 40), 120).splitlines()[-2]
        seen.update(re.findall(r"\d of 4 trials finished, about [^ ]* .* left", bar))
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 1
    assert len(seen) > 5
    assert "4 of 4 trials finished" in bar


def test_time_left_is_never_less_than_that_of_one_trial_alone(simulate: Callable[..., Any]) -> None:
    _, records = simulate(1)
    view = RunView()
    for record in records[: len(records) // 2]:
        view.apply(record)
    assert view.seconds_left() == view.eta(view.trials[0])


def test_a_notebook_has_one_display_that_changes(
    simulate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[tuple[str, bool]]()
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()

    def publish(data: dict[str, str], *_: Any, update: bool = False, **__: Any) -> None:
        sent.append((data["text/html"], update))

    monkeypatch.setattr(shell.display_pub, "publish", publish)
    screen = NotebookScreen(80)
    _, records = simulate(2)
    view = RunView()
    for record in records[:9]:
        view.apply(record)
    screen.show(frame(view, 80, 40))
    screen.close()
    assert [update for _, update in sent] == [False, True, True]
    shown, left = sent[1][0], sent[2][0]
    assert shown.startswith("<pre")
    assert "trial-001" in shown
    assert "color:" in shown
    assert left == ""
