"""Whole runs of searches that stop early: what goes on, rests and is stopped has plain bits."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.observe import Decision, RunView
from cerebro_hydra.observe.report import render
from cerebro_hydra.plan.messages.events import TrialPaused, TrialProposed
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.run_document import RUN_FILE, SEARCH_FILE
from cerebro_hydra.storage.run_folder import read_document
from cerebro_hydra.tune import ASHASearch, SearchResult
from cerebro_hydra.verification import verify
from tests.end_to_end.runs import Tape, assert_replays, bits, classes
from tests.end_to_end.searches.early_searches import halving, modelled, search
from tests.processes import start_python

pytestmark = pytest.mark.slow

DRIVER = "tests.end_to_end.searches.early_searches"


def ends(result: SearchResult) -> Counter[tuple[str, int]]:
    """Return how many trials came to each end, after how many epochs."""
    return Counter((trial.status, len(trial.history["train_loss"])) for trial in result.trials)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """A run that nothing disturbs."""
    return halving(tmp_path_factory.mktemp("calm")).fit(classes(120))


def test_halving_stops_most_trials_at_its_rungs_and_tells_of_it(calm: SearchResult) -> None:
    assert ends(calm) == {("finished", 4): 1, ("stopped", 2): 1, ("stopped", 1): 3}
    assert_replays(calm)
    assert verify(calm.run_path).ok
    assert calm.best_trial.status == "finished"
    table = calm.to_pandas().set_index("trial_id")
    assert sorted(table.rung) == [1, 1, 1, 2, 2]
    page = render(RunFolder.open(calm.run_path))
    assert "<button>Rung</button>" in page
    for trial, rung in table.rung.items():
        stopped = table.status[trial] == "stopped"
        assert not stopped or f"after epoch {rung}" in page


def test_halving_whose_driver_is_killed_midway_decides_as_the_calm_run(
    tmp_path: Path, calm: SearchResult
) -> None:
    """Five trials come to the first rung, and two to the second one."""
    driver = start_python("-m", DRIVER, tmp_path, 6, "halving")
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
    folder = RunFolder.open(str(run))
    (run / SEARCH_FILE).unlink()
    with pytest.raises(StoreError, match=r"search.json' is gone, and the run began with it.*resto"):
        halving(tmp_path, eta=3, **options).fit(classes(120), resume=str(run))
    assert any("search.json' is gone" in problem for problem in verify(str(run)).problems)
    folder.write_json(SEARCH_FILE, {"num_models": 5, "eta": 3, "grace_epochs": 1})
    with pytest.raises(StoreError, match=r"search.json' is not what the run began with; restore"):
        halving(tmp_path, eta=3, **options).fit(classes(120), resume=str(run))
    (run / SEARCH_FILE).unlink()  # a searcher of one's own has none
    folder.write_json(RUN_FILE, replace(read_document(folder), search=None).to_json())
    with pytest.raises(ConfigurationError, match=r"has compared its trials and is over, .*num_mod"):
        halving(tmp_path, num_models=6, **options).fit(classes(120), resume=str(run))


def test_halving_that_was_ended_by_its_target_goes_on_with_its_rungs(
    tmp_path: Path, calm: SearchResult
) -> None:
    first = max(trial.history["val_accuracy"][0] for trial in calm.trials)
    result = halving(tmp_path, target={"accuracy": first}).fit(classes(120))
    assert any(trial.status == "paused" for trial in result.trials)
    assert result.best_trial.result_metrics["val_accuracy"] >= first
    whole = halving(tmp_path).fit(classes(120), resume=result.run_path)
    assert bits(whole.run_path) == bits(calm.run_path)
    assert [trial.rung for trial in whole.trials] == [trial.rung for trial in calm.trials]
    assert_replays(whole)


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
