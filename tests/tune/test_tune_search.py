from __future__ import annotations

import contextlib
import io
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cerebro_hydra
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.errors import AllTrialsFailed, ConfigurationError, ReplayError, StoreError
from cerebro_hydra.plan.messages.events import TrialProposed
from cerebro_hydra.storage import LocalStore, RunFolder, estimator_factories
from cerebro_hydra.storage.digest import decode_document, encode_document
from cerebro_hydra.storage.run_document import TRIAL_FILE
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import (
    GridSearch,
    RandomSearch,
    SearchResult,
    hp_choice,
    hp_loguniform,
    hp_uniform,
)
from cerebro_hydra.tune.decisions import AskAndTell
from cerebro_hydra.tune.trial import all_failed
from tests.golden import assert_golden, refusal
from tests.tune import tune_models
from tests.tune.searchers import RUN


def rows(count: int = 121) -> Arrays:
    random = np.random.default_rng(1)
    labels = random.integers(0, 4, count)
    features = random.normal(size=(count, 16)) + labels[:, None]
    return Arrays({"features": features.astype(np.float32), "label": labels})


def arguments(path: Path, **changes: Any) -> dict[str, Any]:
    return {
        "backend": LocalBackend(2),
        "store": LocalStore(str(path)),
        "estimator_gen_fn": tune_models.small,
        "search_space": {"lr": hp_choice([0.1])},
        "num_epochs": 2,
        "evaluation_metric": "accuracy",
        "verbose": 0,
        **changes,
    }


WRONG: dict[str, tuple[Any, ...]] = {
    "backend": (None,),
    "batch_seconds": (0,),
    "audit_share": (2, True),
    "sub_epoch_seconds": ("9",),
    "store": ("/some/folder",),
    "estimator_gen_fn": (3,),
    "search_space": ({"lr": 0.1}, {"lr": [0.1]}, {}, {"lr": hp_uniform(0, 1)}),
    "num_epochs": (0, 2.0, True),
    "evaluation_metric": (None,),
    "observers": (print, [print]),
    "validation": (None,),
    "feature_columns": (["label"],),
    "label_columns": ([],),
    "seed": (-1,),
    "order": ("random",),
    "time_budget": ("soon", 0, -1, "0h", True),
    "target": ({}, "accuracy", {"accuracy": "high"}, {"accuracy": float("nan")}, {3: 1}),
    "verbose": (None,),
}


def test_unusable_argument_is_refused_by_name_value_and_remedy(tmp_path: Path) -> None:
    found = {
        f"{name} = {value!r}": refusal(partial(GridSearch, **arguments(tmp_path, **{name: value})))
        for name, values in WRONG.items()
        for value in values
    }
    assert_golden(Path(__file__).with_name("golden") / "refused_arguments.txt", found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"feature_columns": ["pixels"]}, "no column 'pixels'; its columns are .*'features'"),
        ({"validation": "split"}, "no column 'split'"),
        ({"evaluation_metric": "recall"}, "'recall', which is not measured; .*'loss', 'accuracy'"),
    ],
)
def test_what_does_not_fit_the_data_or_the_estimator_stops_before_any_agent(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    backend = LocalBackend(2)
    search = GridSearch(**arguments(tmp_path, backend=backend, **changes))
    launcher = backend.agents
    with pytest.raises(ConfigurationError, match=said):
        search.fit(rows())
    assert backend.agents is launcher, "agents were launched"
    with pytest.raises(ConfigurationError, match=r"fit got a builtins.dict; give a Spark Data"):
        search.fit({"features": [1.0], "label": [0]})


def test_fit_raises_with_every_reason_once_when_no_trial_can_be_built(tmp_path: Path) -> None:
    search = GridSearch(**arguments(tmp_path, search_space={"width": hp_choice([-1, -1, -2])}))
    with pytest.raises(AllTrialsFailed) as raised:
        search.fit(rows())
    text = str(raised.value)
    assert re.match(r"all 3 trials failed: .*no layer is -1 wide \(.*tune_models.py, line", text)
    assert "\n1 of them: ValueError: no layer is -2 wide" in text
    assert "Traceback" not in text


def test_errors_that_differ_in_the_address_of_an_object_are_one_reason() -> None:
    errors = [f"ValueError: no use for <object object at {id(each):#x}>" for each in (1, "a")]
    said = "all 2 trials failed: ValueError: no use for <object object>"
    assert str(all_failed(errors)) == said


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchResult, str]:
    """The one run of this file, with what it printed.

    Two widths train, with a good and a hopeless learning rate each; one width can't be built.
    """
    space = {"width": hp_choice([-1, 8, 6]), "lr": hp_choice([1e-6, 0.1])}
    path = tmp_path_factory.mktemp("search")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = GridSearch(**arguments(path, search_space=space, verbose=1)).fit(rows())
    return result, printed.getvalue()


@pytest.fixture
def result(searched: tuple[SearchResult, str]) -> SearchResult:
    """The result of the run as its folder has it, so that no test changes another's."""
    return SearchResult.open(searched[0].run_path)


@pytest.mark.slow
def test_trial_that_can_not_be_built_fails_alone_with_its_traceback(result: SearchResult) -> None:
    assert [(t.trial_id, t.status, t.params["width"]) for t in result.trials] == [
        ("trial-000", "failed", -1),
        ("trial-001", "failed", -1),
        ("trial-002", "finished", 8),
        ("trial-003", "finished", 8),
        ("trial-004", "finished", 6),
        ("trial-005", "finished", 6),
    ]
    refused = result.trials[0]
    assert "Traceback" in (refused.error or "")
    assert "no layer is -1 wide" in (refused.error or "")
    assert (refused.history, refused.visit_log) == ({}, [])
    with pytest.raises(ConfigurationError, match=r"(?s)trial-000 is failed.*no layer is -1 wide"):
        result.torch("trial-000")


@pytest.mark.slow
def test_histories_have_one_value_per_epoch_and_best_is_the_most_accurate(
    result: SearchResult,
) -> None:
    assert result.best_trial.params["lr"] == 0.1
    history = result.get_best_model_history()
    assert list(history) == ["train_loss", "val_loss", "val_accuracy"]
    assert {len(values) for values in history.values()} == {2}
    everything = result.get_all_model_history()
    assert list(everything) == [f"trial-{number:03d}" for number in range(6)]
    assert everything[result.best_trial.trial_id] == history
    kept = [trial.result_metrics["val_accuracy"] for trial in result.trials[2:]]
    assert max(history["val_accuracy"]) == max(kept)
    assert kept[0] < kept[1]
    assert kept[2] < kept[3]


@pytest.mark.slow
def test_run_folder_alone_gives_the_same_result(
    searched: tuple[SearchResult, str], result: SearchResult
) -> None:
    fitted, _ = searched
    assert result.trials == fitted.trials
    assert result.totals == fitted.totals
    assert result.metric == "val_accuracy"
    assert result.direction == "max"
    assert repr(result) == f"SearchResult(4 of 6 trials finished, {fitted.run_path!r})"


@pytest.mark.slow
def test_torch_gives_the_model_that_was_evaluated(result: SearchResult, tmp_path: Path) -> None:
    """Running statistics, weights and eval mode: all of it shows in the accuracy."""
    store = LocalStore(str(Path(result.run_path).parents[1]))
    manifest = find_prepared(store, result.document.fingerprint)
    assert manifest is not None
    for trial in result.trials[3:5]:
        model = result.torch(trial.trial_id)
        assert not model.training
        hits = total = 0
        for index in range(2):
            info = manifest.partition("val", index)
            part = CachedPartition.build(info, manifest, store, str(tmp_path))
            with torch.no_grad():
                outputs = model(torch.from_numpy(np.array(part.columns["features"])))
            hits += int((outputs.argmax(1).numpy() == part.columns["label"]).sum())
            total += part.rows
        kept = trial.history["val_accuracy"][trial.result_epoch - 1]
        assert kept == pytest.approx(hits / total, abs=1e-6)


@pytest.mark.slow
def test_models_of_finished_trials_know_their_history_and_weights(result: SearchResult) -> None:
    finished = [trial for trial in result.trials if trial.status == "finished"]
    models = result.get_all_models()
    assert [model.trial_id for model in models] == [trial.trial_id for trial in finished]
    assert [model.history for model in models] == [trial.history for trial in finished]
    best, trial = result.get_best_model(), result.best_trial
    assert (best.trial_id, best.params) == (trial.trial_id, trial.params)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    weights, same = best.torch().state_dict(), result.torch().state_dict()
    assert all(torch.equal(weights[name], same[name]) for name in same)
    assert torch.equal(torch.rand(3), expected), "the caller's random numbers are left alone"


@pytest.mark.slow
def test_what_a_result_can_not_do_is_named(result: SearchResult, tmp_path: Path) -> None:
    trial: Any = result.best_trial
    assert result.set_output_columns(["prediction"]) is result
    uses: list[tuple[Callable[[], object], str]] = [
        *(
            (lambda wrong=wrong: result.set_output_columns(wrong), "give a list of 1 names")  # type: ignore[misc]
            for wrong in ("prediction", [])
        ),
        (
            lambda: result.get_best_model().set_output_columns([]),
            r"output_columns is .*; give a list of 1",
        ),
        (lambda: result.torch("trial-9"), r"no trial 'trial-9'; trials are \['trial-000'"),
        (lambda: result.get_model(trial), r"trial_id is a Trial; give the name .*trial_id$"),
        (
            lambda: cerebro_hydra.replay(result.run_path, trial),
            "trial_id is a Trial; give the name",
        ),
        (lambda: SearchResult.open(str(tmp_path)), "is not a run"),
    ]
    for use, said in uses:
        with pytest.raises((ConfigurationError, StoreError), match=said):
            use()


@pytest.mark.slow
def test_another_process_is_told_whose_factory_it_may_import(
    result: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimator_factories, "_remembered", {})
    name = "tests.tune.tune_models:small"
    again = SearchResult.open(result.run_path)
    assert again.document.factory == name
    assert again.get_best_model_history() == result.get_best_model_history()
    for use in (again.get_model("trial-002").torch, lambda: again.torch("trial-002")):
        with pytest.raises(ConfigurationError, match=f"{name}.*trust=True.*factory="):
            use()
    for told in ({"factory": name}, {"factory": tune_models.small}, {"trust": True}):
        assert isinstance(SearchResult.open(result.run_path, **told).torch(), torch.nn.Sequential)


@pytest.mark.slow
def test_run_without_a_recorded_factory_says_how_to_give_it(
    result: SearchResult, tmp_path: Path
) -> None:
    shutil.copytree(Path(result.run_path).parents[1], tmp_path / "store")
    folder = RunFolder(LocalStore(tmp_path / "store"), Path(result.run_path).name)
    folder.write_json("run.json", {**folder.read_json("run.json"), "factory": None})
    for trust in (False, True):
        with pytest.raises(ReplayError, match="give it as factory="):
            SearchResult.open(folder.path, trust=trust).torch("trial-002")


@pytest.mark.slow
def test_factory_of_another_model_is_refused(result: SearchResult) -> None:
    def wider(params: dict[str, Any]) -> Any:
        return tune_models.small({**params, "width": 9})

    with pytest.raises(ReplayError, match="the factory that the run was started with"):
        SearchResult.open(result.run_path, factory=wider).torch()


@pytest.mark.slow
def test_a_notebook_shows_four_digits_and_why_a_trial_failed(result: SearchResult) -> None:
    shown = result._repr_html_()
    assert "ValueError: no layer is -1 wide (" in shown and "Traceback" not in shown
    assert f"<td>{result.best_trial.result_metrics['val_loss']:.4g}</td>" in shown


@pytest.mark.slow
def test_progress_names_each_structure_once_and_ends_with_the_best_first(
    searched: tuple[SearchResult, str],
) -> None:
    _, printed = searched
    assert printed.count("2 shards, cut by modules") == 2
    assert "trial-002: 2 shards" in printed
    assert "trial-004: 2 shards" in printed
    said = (
        "trial-000 (width=-1, lr=1e-06) failed before training: ValueError: no layer is -1 wide ("
    )
    assert said in printed
    assert "best first by val_accuracy (higher is better)" in printed
    assert "4 of 6 trials finished" in printed


def test_a_run_with_a_trial_that_this_version_can_not_train_is_refused_before_anything_begins(
    tmp_path: Path,
) -> None:
    """Earlier versions wrote pick rules as the schedules of trials."""
    learned = {"search_space": {"lr": hp_choice([0.1, 0.2])}}
    path = GridSearch(**arguments(tmp_path, num_epochs=1, **learned)).fit(rows()).run_path
    run, trial = RunFolder.open(path), Path(path, "trials", "trial-001", TRIAL_FILE)
    written = decode_document(str(trial), trial.read_bytes())
    spec = {**written["spec"], "schedule": "sharp"}
    trial.write_bytes(encode_document({**written, "spec": spec}))
    before = run.read_json("run.json"), run.journal_end()
    backend = LocalBackend(2)
    search = GridSearch(**arguments(tmp_path, backend=backend, num_epochs=2, **learned))
    launchers = [backend.agents]
    with pytest.raises(StoreError) as refused:
        search.fit(rows(), resume=path)
    assert re.search(
        r"trial-001/trial.json'.*schedule is 'sharp', which this version of cerebro_hydra can't "
        r"train; open the run with the version that wrote it, or train its trials in a new run, "
        r"without schedule and with pick='sharp' of the backend$",
        str(refused.value),
    )
    assert [backend.agents] == launchers, "agents were launched"
    assert before == (run.read_json("run.json"), run.journal_end())


DRAWN = {"lr": hp_loguniform(-3, -1), "width": hp_choice([8, 16])}


def searching(path: Path, **changes: object) -> RandomSearch:
    return RandomSearch(**{"num_models": 3, **arguments(path, search_space=DRAWN, **changes)})


def test_candidates_depend_on_the_seed_alone(tmp_path: Path) -> None:
    first = searching(tmp_path).candidates()
    assert first == searching(tmp_path).candidates()
    assert first == searching(tmp_path, num_models=5).candidates()[:3]
    assert first != searching(tmp_path, seed=1).candidates()
    begun = AskAndTell(searching(tmp_path).searcher(RUN), 2, 2).begin()
    assert [each.params for each in begun if isinstance(each, TrialProposed)] == first


@pytest.mark.parametrize("number", [0, 2.0, True, None])
def test_a_number_of_models_that_is_none_is_refused(tmp_path: Path, number: object) -> None:
    with pytest.raises(ConfigurationError, match=f"num_models is {number!r}; it is a whole"):
        searching(tmp_path, num_models=number)
