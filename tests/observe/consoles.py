"""Consoles that keep what is printed, texts that are kept as files, and a run with many trials."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cerebro_hydra.observe import Decision, RunView, TrialAdmitted
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from tests.observe.conftest import begin, fold

GOLDEN = Path(__file__).with_name("golden")


def terminal(width: int = 160) -> Console:
    environment = {"TERM": "xterm"}  # whatever the tests run in
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system=None,
        _environ=environment,
    )


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def page(width: int = 160) -> Console:
    return Console(file=io.StringIO(), width=width, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def drawn(renderable: Any, width: int = 160) -> str:
    console = page(width)
    console.print(renderable)
    return printed(console)


def crowd(num_trials: int) -> RunView:
    """Trials with ten parameters, of which the last two run; the first is the best so far."""
    names = ["learning_rate", "lambda_value", "batch_size", "model", *"abcdef"]
    started, *admitted = begin(num_trials)
    view = fold([started])
    for each in admitted:
        assert isinstance(each, TrialAdmitted)
        params = {name: 0.123456789 + each.spec.trial for name in names}
        view.apply(TrialAdmitted(replace(each.spec, params=params)))
    view.apply(Decision(0, 0.0, ev.WorkerJoined(0, "a", (0,)), ()))
    for trial in range(num_trials):
        if trial < num_trials - 2:
            told: Any = ins.EndEpoch(trial, 0, {"train_loss": 1.0, "val_loss": 1.0 + trial})
        else:
            told = ins.StartSubEpoch(trial, trial, 1, 0, (0,), 0, "a", ins.StateSource(0, None), {})
        view.apply(Decision(0, 0.0, ev.TrialStopped(0, ""), (told,)))
    return view
