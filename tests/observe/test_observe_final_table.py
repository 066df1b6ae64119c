"""The table of results at the end of a run."""

from __future__ import annotations

import re

from cerebro_hydra.observe import (
    Decision,
    RunView,
)
from cerebro_hydra.observe.console import final_table
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from tests.observe.conftest import begin
from tests.observe.consoles import crowd, drawn


def test_final_table_has_the_best_first_and_says_the_direction() -> None:
    view = RunView()
    for record in begin(3, evaluation_metric="accuracy"):
        view.apply(record)
    for trial, accuracy in enumerate([0.5, 0.75, float("nan")]):
        metrics = {"train_loss": 1.0, "val_loss": 1.0, "val_accuracy": accuracy}
        instructions = (ins.EndEpoch(trial, 0, metrics), ins.FinishTrial(trial, "finished", "", 4))
        view.apply(Decision(0, 0.0, ev.TrialStopped(trial, ""), instructions))
    text = drawn(final_table(view, 160))
    assert re.findall(r"trial-\d{3}", text) == ["trial-001", "trial-000", "trial-002"]
    assert "best first by val_accuracy (higher is better)" in text
    assert "★" in next(line for line in text.splitlines() if "trial-001" in line)
    assert text.count("★") == 1


def test_a_final_table_leaves_out_what_has_no_room_and_says_so() -> None:
    view = crowd(3)
    wide, narrow = drawn(final_table(view, 300), 300), drawn(final_table(view, 80), 80)
    assert "no room" not in wide
    assert "no room here for 8 columns; the report has all" in narrow
    assert "lr" in narrow
    assert all(len(line) <= 80 for line in narrow.splitlines())


def test_parameters_with_brackets_are_shown_as_they_are() -> None:
    view = RunView()
    for record in begin(1, params={"cut": ["red", "0"]}):
        view.apply(record)
    assert "['red', '0']" in drawn(final_table(view, 160))
