"""The report says how much each parameter matters, or why it does not."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from cerebro_hydra.observe import importance
from cerebro_hydra.observe.importance import FEWEST_TRIALS, importance_of
from cerebro_hydra.observe.view import TrialView


def view_of(count: int, **fixed: Any) -> Any:
    """Return trials whose loss is that of `lr` alone, of unlike lengths."""
    random, trials = Random(3), dict[int, TrialView]()
    for number in range(count):
        lr = 10 ** random.uniform(-4, 0)
        params = {
            "lr": lr,
            "<b>": random.choice([8, 16]),
            "deep": {"name": random.choice(["a", [1, 2]])},
            "same": 1,
            **fixed,
        }
        trial = TrialView(number, f"trial-{number:03d}", params, status="stopped")
        for epoch in range(1 + number % 3):  # who trains on gets far better
            trial.epochs[epoch] = {"val_loss": lr / (1 + 99 * epoch)}
        trials[number] = trial
    return SimpleNamespace(trials=trials, metric="val_loss", direction="min")


def test_trials_are_compared_where_all_have_been_and_the_cause_is_found() -> None:
    found = importance_of(view_of(30), now=True)
    assert max(found.shares, key=found.shares.__getitem__) == "lr" and found.shares["lr"] > 0.9
    assert set(found.shares) == {"lr", "<b>", "deep.name"}, "what never changes is left out"
    assert "within the first epoch, which 30 trials have ended" in found.note
    assert importance_of(view_of(30), now=True) == found
    short = view_of(30)
    for trial in short.trials.values():
        trial.epochs = {0: trial.epochs[0]}
    assert importance_of(short, now=True) == found, "who trains on is not compared by that"


def test_many_options_are_compared_too() -> None:
    """Optuna's own way with options takes 2 to the power of their number."""
    view, random = view_of(60), Random(3)
    losses = [random.random() for _ in range(30)]
    for number, trial in view.trials.items():
        trial.params["net"] = f"net-{number % 30}"
        trial.epochs = {0: {"val_loss": losses[number % 30]}}
    found = importance_of(view, now=True)
    assert max(found.shares, key=found.shares.__getitem__) == "net" and found.shares["net"] > 0.9


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    few = importance_of(view_of(FEWEST_TRIALS - 1), now=True)
    assert not few.shares and "from 10 trials on that have measured val_loss; here 9" in few.note
    failed = view_of(FEWEST_TRIALS)
    failed.trials[0].status = "failed"
    assert "here 9 have" in importance_of(failed, now=True).note
    later = importance_of(view_of(FEWEST_TRIALS), now=False)
    assert not later.shares and "cerebro-hydra report tells it" in later.note
    same = importance_of(view_of(12, lr=1, deep=1, **{"<b>": 1}), now=True)
    assert not same.shares and "No parameter" in same.note
    monkeypatch.setattr(importance, "find_spec", lambda _: None)
    missing = importance_of(view_of(12), now=True)
    assert not missing.shares and "pip install 'cerebro-hydra[optuna]'" in missing.note
