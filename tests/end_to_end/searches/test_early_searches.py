"""Whole runs of searches that stop early: what goes on, rests and is stopped has plain bits."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.observe import Decision, RunView
from cerebro_hydra.observe.report import render
from cerebro_hydra.plan.messages.events import TrialPaused, TrialProposed, TrialStopped
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.run_document import SEARCH_FILE
from cerebro_hydra.tune import (
    ASHASearch,
    GridSearch,
    HyperbandSearch,
    MedianStopping,
    SearchResult,
    hp_choice,
)
from cerebro_hydra.verification import verify
from tests.end_to_end.runs import Tape, assert_replays, bits, classes
from tests.end_to_end.searches.early_searches import halving, modelled, search
from tests.processes import start_python

pytestmark = pytest.mark.slow

DRIVER = "tests.end_to_end.searches.early_searches"


def ends(result: SearchResult) -> Counter[tuple[str, int]]:
    """Return how many trials came to each end, after how many epochs."""
    return Counter((trial.status, len(trial.history["train_loss"])) for trial in result.trials)


def decided(tape: Tape) -> list[Any]:
    """Return who was stopped, and why, in the order of what the search decided."""
    return tape.of(TrialStopped)


def test_halving_repeats_its_trials_its_decisions_and_its_bits(tmp_path: Path) -> None:
    tapes = [Tape(), Tape()]
    first, second = (
        halving(tmp_path / str(at), observers=[tape]).fit(classes(120))
        for at, tape in enumerate(tapes)
    )
    assert ends(first) == {("finished", 4): 1, ("stopped", 2): 1, ("stopped", 1): 3}
    assert decided(tapes[0]) == decided(tapes[1])
    assert bits(first.run_path) == bits(second.run_path)
    assert_replays(first)
    assert verify(first.run_path).ok
    assert first.best_trial.status == "finished"
    table = first.to_pandas().set_index("trial_id")
    assert sorted(table.rung) == [1, 1, 1, 2, 2]
    page = render(RunFolder.open(first.run_path))
    assert "<button>Rung</button>" in page
    for trial, rung in table.rung.items():
        stopped = table.status[trial] == "stopped"
        assert not stopped or f"after epoch {rung}" in page


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """A run that nothing disturbs."""
    return halving(tmp_path_factory.mktemp("calm")).fit(classes(120))


@pytest.mark.parametrize("arrivals", [pytest.param(3, marks=pytest.mark.long), 6])
def test_halving_whose_driver_is_killed_midway_decides_as_the_calm_run(
    tmp_path: Path, calm: SearchResult, arrivals: int
) -> None:
    """Five trials come to the first rung, and two to the second one."""
    driver = start_python("-m", DRIVER, tmp_path, arrivals, "halving")
    driver.wait(300)
    assert driver.returncode == -signal.SIGKILL
    (run,) = (tmp_path / "runs").iterdir()
    before = RunView.of_run(RunFolder.open(str(run)))
    assert not all(trial.over for trial in before.trials.values()), "it had ended before"
    assert any(trial.rung for trial in before.trials.values())
    options = {"checkpoint": "sub-epoch"}
    with pytest.raises(ConfigurationError, match="num_models is 6, and the run was begun with 5"):
        halving(tmp_path, num_models=6, **options).fit(classes(120), resume=str(run))
    result = halving(tmp_path, **options).fit(classes(120), resume=str(run))
    assert bits(result.run_path) == bits(calm.run_path)
    assert [trial.rung for trial in result.trials] == [trial.rung for trial in calm.trials]
    assert_replays(result)
    with pytest.raises(ConfigurationError, match="eta is 3, and the run was begun with 2"):
        halving(tmp_path, eta=3, **options).fit(classes(120), resume=str(run))
    (run / SEARCH_FILE).unlink()  # a searcher of one's own has none
    with pytest.raises(ConfigurationError, match=r"has compared its trials and is over, .*num_mod"):
        halving(tmp_path, num_models=6, **options).fit(classes(120), resume=str(run))


def test_hyperband_trains_its_brackets_at_once(tmp_path: Path) -> None:
    arguments = {"eta": 2, "num_models": 6, "order": "seeded"}
    result = search(HyperbandSearch, tmp_path, **arguments).fit(classes(120))
    begun = Counter(trial.rung for trial in result.trials)
    assert begun[None] == 2, "those of the last bracket are compared with nobody"
    assert ends(result)["finished", 4] == 4
    assert ends(result)["stopped", 1] + ends(result)["stopped", 2] == 2
    assert_replays(result)
    assert verify(result.run_path).ok


@pytest.mark.long
def test_bohb_draws_by_its_rungs_and_goes_on_after_a_kill_as_the_calm_run(tmp_path: Path) -> None:
    driver = start_python("-m", DRIVER, tmp_path / "killed", 7, "modelled")
    tape = Tape()
    calm = modelled(tmp_path / "calm", observers=[tape]).fit(classes(120))
    driver.wait(300)
    assert driver.returncode == -signal.SIGKILL
    assert ends(calm)["finished", 4] >= 3
    assert ends(calm)["stopped", 1] >= 3
    events = [decision.event for decision in tape.of(Decision)]
    drawn = [at for at, event in enumerate(events) if isinstance(event, TrialProposed)]
    rested = [at for at, event in enumerate(events) if isinstance(event, TrialPaused)]
    assert drawn[3] < rested[3] < drawn[-1], "four begin at once, and others by what they measured"
    (run,) = (tmp_path / "killed" / "runs").iterdir()
    before = RunView.of_run(RunFolder.open(str(run)))
    assert 7 <= len(before.trials) < 12, "a searcher that is told again draws the last ones"
    resumed = modelled(tmp_path / "killed", checkpoint="sub-epoch")
    result = resumed.fit(classes(120), resume=str(run))
    assert [trial.params for trial in result.trials] == [trial.params for trial in calm.trials]
    assert bits(result.run_path) == bits(calm.run_path)
    assert [trial.rung for trial in result.trials] == [trial.rung for trial in calm.trials]
    assert_replays(result)
    assert verify(result.run_path).ok


def test_asha_lets_trials_rest_and_go_on_and_ends_with_one_that_is_complete(
    tmp_path: Path,
) -> None:
    tape = Tape()
    arguments = {"num_models": 6, "eta": 2, "observers": [tape]}
    result = search(ASHASearch, tmp_path, **arguments).fit(classes(120))
    found = ends(result)
    assert found["finished", 4] >= 1
    assert sum(found.values()) == found["finished", 4] + found["stopped", 2] + found["stopped", 1]
    assert found["stopped", 1] + found["stopped", 2] >= 1
    assert {event.rung for event in tape.of(TrialPaused)} == {1, 2, None}
    assert result.best_trial.status == "finished"
    assert_replays(result)
    assert verify(result.run_path).ok
    with pytest.raises(ConfigurationError, match="num_models is 60, and the run was begun with 6"):
        search(ASHASearch, tmp_path, num_models=60, eta=2).fit(classes(120), resume=result.run_path)


def test_the_median_stops_hopeless_trials_of_a_grid(tmp_path: Path) -> None:
    rule = MedianStopping(grace_epochs=1, min_trials=2)
    space = {"lr": hp_choice([0.1, 0.05, 0.2, 1e-6, 2e-6])}
    arguments = {"search_space": space, "stopping": rule, "num_epochs": 3}
    result = search(GridSearch, tmp_path, **arguments).fit(classes(120))
    found = ends(result)
    assert found["finished", 3] + found["stopped", 1] + found["stopped", 2] == 5
    stopped = [trial for trial in result.trials if trial.status == "stopped"]
    assert stopped
    views = RunView.of_run(RunFolder.open(result.run_path)).trials
    for trial in stopped:
        assert "the median of the means of" in views[result.trials.index(trial)].reason
    assert_replays(result)
