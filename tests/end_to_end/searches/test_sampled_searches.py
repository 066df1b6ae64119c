"""Whole runs of searches by samplers: seeded, killed and resumed, with a study."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.samplers import GridSampler, TPESampler

from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.observe import Decision, RunView
from cerebro_hydra.plan.messages.events import TrialProposed
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.run_document import SEARCH_FILE
from cerebro_hydra.tune import SearchResult, TPESearch, hp_choice, hp_log
from cerebro_hydra.verification import verify
from tests.end_to_end.runs import Tape, assert_replays, bits, classes
from tests.end_to_end.searches.early_searches import search
from tests.end_to_end.searches.sampled_searches import SPACE, sampled
from tests.processes import start_python

pytestmark = pytest.mark.slow


def drawn(result: SearchResult) -> list[Any]:
    return [trial.params for trial in result.trials]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """A run that nothing disturbs."""
    result: SearchResult = sampled(tmp_path_factory.mktemp("calm")).fit(classes(120))
    return result


def test_a_seeded_search_draws_by_what_it_was_told_and_replays(calm: SearchResult) -> None:
    assert {trial.status for trial in calm.trials} == {"finished"}
    assert len({str(params) for params in drawn(calm)}) == len(calm.trials) == 10
    names = {tuple(params["norm"]) for params in drawn(calm)}
    assert names == {("name",), ("name", "eps")}, "an option's own parameters come with it"
    assert_replays(calm)
    assert verify(calm.run_path).ok


@pytest.mark.long
def test_a_search_whose_driver_is_killed_goes_on_as_the_calm_one(
    tmp_path: Path, calm: SearchResult
) -> None:
    driver = start_python("-m", "tests.end_to_end.searches.sampled_searches", tmp_path, 5)
    driver.wait(300)
    assert driver.returncode == -signal.SIGKILL
    (run,) = (tmp_path / "runs").iterdir()
    before = RunView.of_run(RunFolder.open(str(run)))
    assert 5 <= sum(trial.over for trial in before.trials.values()) < 10
    options = {"checkpoint": "sub-epoch"}
    with pytest.raises(ConfigurationError, match="num_models is 12, and the run was begun with 10"):
        sampled(tmp_path, num_models=12, **options).fit(classes(120), resume=str(run))
    result = sampled(tmp_path, **options).fit(classes(120), resume=str(run))
    assert bits(result.run_path) == bits(calm.run_path), "two seeded runs, one of them resumed"
    assert drawn(result) == drawn(calm)
    assert_replays(result)


PLAIN = {"lr": hp_log(1e-4, 1.0), "batch_size": hp_choice([8, 16])}


def study_at(folder: Path, **options: Any) -> optuna.Study:
    folder.mkdir(exist_ok=True)
    given = {"direction": "maximize", "sampler": TPESampler(n_startup_trials=2), **options}
    storage = f"sqlite:///{folder}/study.db"
    return optuna.create_study(storage=storage, study_name="mine", load_if_exists=True, **given)


@pytest.mark.long
def test_a_study_is_known_from_the_start_and_told_once_at_the_end(tmp_path: Path) -> None:
    study = study_at(tmp_path)
    distributions = {
        "lr": optuna.distributions.FloatDistribution(1e-4, 1.0, log=True),
        "batch_size": optuna.distributions.CategoricalDistribution([8, 16]),
    }
    for number in range(6):
        params = {"lr": 0.02 + number / 1000, "batch_size": 8}
        study.add_trial(
            optuna.create_trial(params=params, distributions=distributions, value=number / 10)
        )
    study.enqueue_trial({"lr": 0.125, "batch_size": 16})
    given = {"search_space": PLAIN, "num_models": 5, "study": study}
    seen: list[int] = []
    tape = Tape(lambda tape: seen.append(len(study.trials)))
    result = sampled(tmp_path, **given, observers=[tape]).fit(classes(120))
    assert set(seen) == {7}, "nothing is added before the end"
    assert drawn(result)[0] == {"lr": 0.125, "batch_size": 16}
    assert drawn(result)[1:] != drawn(sampled_without(tmp_path))[1:], "it knew the study's trials"
    added = study.trials[7:]
    assert [trial.params for trial in added] == drawn(result)
    for mine, theirs in zip(result.trials, added, strict=True):
        assert theirs.value == mine.result_metrics["val_accuracy"]
        assert list(theirs.intermediate_values.values()) == mine.history["val_accuracy"]
    assert study.best_trial.value == max(trial.value for trial in study.trials if trial.value)
    again = sampled(tmp_path, **{**given, "study": study_at(tmp_path)})
    assert drawn(again.fit(classes(120), resume=result.run_path)) == drawn(result)
    assert len(study_at(tmp_path).trials) == 12, "a resume tells nobody twice"
    longer = sampled(tmp_path, **given, **{"num_epochs": 3}).fit(
        classes(120), resume=result.run_path
    )
    assert {len(trial.history["train_loss"]) for trial in longer.trials} == {3}
    assert len(study.trials) == 12
    with pytest.raises(
        ConfigurationError, match="study is None, and the run was begun with 'mine'"
    ):
        sampled(tmp_path, search_space=PLAIN, num_models=5).fit(
            classes(120), resume=result.run_path
        )
    folder = RunFolder.open(result.run_path)
    assert len(folder.read_json(SEARCH_FILE)["study"]["trials"]) == 7
    assert verify(result.run_path).ok


def sampled_without(folder: Path) -> SearchResult:
    sampler = TPESampler(n_startup_trials=2)
    result: SearchResult = sampled(
        folder, search_space=PLAIN, num_models=5, num_epochs=1, sampler=sampler
    ).fit(classes(120))
    return result


def test_a_study_that_can_not_be_written_is_told_of_and_a_resume_adds_what_is_missing(
    tmp_path: Path,
) -> None:
    study = study_at(tmp_path)
    given = {"search_space": PLAIN, "num_models": 2, "num_epochs": 1}

    class Locked(optuna.Study):
        def add_trials(self, trials: Any) -> None:
            self.add_trial(next(iter(trials)))
            raise OSError("database is locked")

    locked = Locked("mine", study._storage, sampler=TPESampler())
    failing = sampled(tmp_path, **given, study=locked)
    with pytest.raises(StoreError, match="can't be added to the study 'mine': OSError: database"):
        failing.fit(classes(120))
    assert failing.result is not None and len(study.trials) == 1
    sampled(tmp_path, **given, study=study).fit(classes(120), resume=failing.result.run_path)
    assert [trial.params for trial in study.trials] == drawn(failing.result)


def test_a_study_of_the_other_direction_is_refused_before_training(tmp_path: Path) -> None:
    study = study_at(tmp_path, direction="minimize")
    tape = Tape()
    given = {"search_space": PLAIN, "num_models": 2, "study": study, "observers": [tape]}
    said = "is to minimize, and of 'accuracy' the larger is better; give .* direction=\"maximize\""
    with pytest.raises(ConfigurationError, match=said):
        sampled(tmp_path, **given).fit(classes(120))
    assert not tape.records and not study.trials
    assert not list((tmp_path / "runs").glob("*"))


def test_a_grid_of_optuna_ends_when_it_is_exhausted_and_failures_fail_alone(tmp_path: Path) -> None:
    space = {"width": hp_choice([4, -1, 8])}
    sampler = GridSampler({"width": [4, -1, 8]})
    tape = Tape()
    arguments = {"num_models": 30, "num_epochs": 1, "sampler": sampler, "observers": [tape]}
    result = sampled(tmp_path, search_space=space, **arguments).fit(classes(120))
    assert {trial.params["width"] for trial in result.trials} == {4, -1, 8}
    assert 3 <= len(result.trials) <= 3 + 4
    statuses = {(trial.params["width"], trial.status) for trial in result.trials}
    assert statuses == {(4, "finished"), (8, "finished"), (-1, "failed")}
    assert len(tape.of(TrialProposed)) <= 7


def test_tpe_trains_two_trials_for_each_partition_at_once(tmp_path: Path) -> None:
    tape = Tape()
    result = search(
        TPESearch, tmp_path, search_space=SPACE, num_models=6, num_epochs=1, observers=[tape]
    ).fit(classes(120))
    events = [decision.event for decision in tape.of(Decision)]
    proposed = [seq for seq, event in enumerate(events) if isinstance(event, TrialProposed)]
    assert proposed[:4] == [0, 1, 2, 3] and proposed[4] > 10
    assert len(result.trials) == 6
    assert_replays(result)
