"""Runs that end by their time or their target keep the best so far, and go on later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.messages.events import RunSuspended, SubEpochDone
from cerebro_hydra.plan.messages.instructions import EndEpoch
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import RandomSearch, SearchResult
from cerebro_hydra.tune.decisions import Target
from cerebro_hydra.verification import verify
from tests.end_to_end.runs import Tape, assert_replays, bits, classes
from tests.end_to_end.searches.early_searches import search

pytestmark = pytest.mark.slow


def drawn(folder: Path, **options: Any) -> Any:
    """Return a search of four trials of six epochs."""
    given = {"num_models": 4, "num_epochs": 6, "order": "seeded", **options}
    return search(RandomSearch, folder, **given)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    result: SearchResult = drawn(tmp_path_factory.mktemp("calm")).fit(classes(120))
    return result


def reached(result: SearchResult) -> float:
    """Return what the best trial has reached some epochs before its end."""
    return max(result.best_trial.history["val_accuracy"][:3])


def test_a_run_ends_with_the_trial_that_reached_its_target_and_goes_on_as_the_calm_one(
    tmp_path: Path, calm: SearchResult, capsys: pytest.CaptureFixture[str]
) -> None:
    target = reached(calm)
    search, tape = drawn(tmp_path, target={"accuracy": target}), Tape()
    search.observers, search.verbose = (tape,), 1
    result = search.fit(classes(120))
    (suspended,) = tape.of(RunSuspended)
    assert "has reached val_accuracy" in suspended.reason
    said = capsys.readouterr().out
    assert f"the run ended for now: {suspended.reason}" in said and "resume it" in said
    assert any(trial.status == "paused" for trial in result.trials)
    best = result.best_trial
    assert best.result_metrics["val_accuracy"] >= target
    for trial in result.trials:
        if trial.has_result:
            assert cerebro_hydra.replay(result.run_path, trial.trial_id).identical
    rows = torch.from_numpy(classes(120).arrays["features"][:8])
    assert result.get_best_model().torch()(rows).shape == (8, 4)
    assert verify(result.run_path).ok
    again = Tape()
    ended = drawn(tmp_path, target={"val_accuracy": target}, observers=[again])
    assert ended.fit(classes(120), resume=result.run_path).best_trial == best
    assert not again.records, "the target is reached"
    whole = drawn(tmp_path).fit(classes(120), resume=result.run_path)
    assert bits(whole.run_path) == bits(calm.run_path)
    assert_replays(whole)


@pytest.mark.long
def test_a_run_whose_time_is_over_ends_wherever_it_is_and_goes_on(
    tmp_path: Path,
) -> None:
    tape, long = Tape(), {"num_epochs": 24}  # takes several times as long as the budget
    calm = drawn(tmp_path / "calm", **long).fit(classes(120))
    result = drawn(tmp_path, time_budget="1.5s", observers=[tape], **long).fit(classes(120))
    suspended = tape.of(RunSuspended)
    assert [event.reason for event in suspended] == ["its time_budget of 1.5 seconds is spent"]
    before = len(tape.of(SubEpochDone))
    assert before < 4 * 24 * 2
    for trial in result.trials:
        if trial.has_result:
            assert cerebro_hydra.replay(result.run_path, trial.trial_id).identical
    after = Tape()
    whole = drawn(tmp_path, observers=[after], **long).fit(classes(120), resume=result.run_path)
    assert bits(whole.run_path) == bits(calm.run_path)
    assert before + len(after.of(SubEpochDone)) <= 4 * 24 * 2 + 4, "what was saved is not repeated"
    assert not after.of(RunSuspended)


def test_a_target_that_is_not_measured_is_refused_before_training(tmp_path: Path) -> None:
    backend = LocalBackend(2)
    launcher = backend.agents
    with pytest.raises(ConfigurationError, match=r"'val_f1', which is not measured; .* 'accuracy'"):
        drawn(tmp_path, target={"f1": 0.9}, backend=backend).fit(classes(120))
    assert backend.agents is launcher, "agents were launched"


@pytest.mark.parametrize(("name", "value"), [("val_loss", 0.3), ("val_accuracy", 0.9)])
def test_a_loss_reaches_its_target_from_above(name: str, value: float) -> None:
    target = Target({name: 0.5}, lambda: {"loss": "min", "accuracy": "max"})
    assert "trial 2 has reached" in target.reached([EndEpoch(2, 0, {name: value})])
    assert not target.reached([EndEpoch(2, 0, {name: 1.0 - value})])
    overflowed = float("-inf" if name == "val_loss" else "inf")
    assert not target.reached([EndEpoch(2, 0, {name: overflowed})])
