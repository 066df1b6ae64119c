from __future__ import annotations

import contextlib
import io
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cerebro_hydra
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.errors import AllTrialsFailed, ConfigurationError, ReplayError, StoreError
from cerebro_hydra.storage import LocalStore, RunFolder, estimator_factories
from cerebro_hydra.storage.digest import decode_document, encode_document
from cerebro_hydra.storage.run_document import TRIAL_FILE
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import GridSearch, SearchResult, hp_choice, hp_uniform
from cerebro_hydra.tune.trial import all_failed
from tests.tune import tune_models


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


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("backend", None, "backend is a NoneType; give a SparkBackend"),
        ("batch_seconds", 0, "batch_seconds is 0; it is a number of seconds, or None"),
        ("audit_share", 2, "audit_share is 2; it is a number from 0 to 1"),
        ("audit_share", True, "audit_share is True; it is a number from 0 to 1"),
        ("sub_epoch_seconds", "9", "sub_epoch_seconds is '9'; it is a number of seconds"),
        ("store", "/some/folder", "store is '/some/folder', a str; give a store"),
        ("estimator_gen_fn", 3, "estimator_gen_fn is 3; give a function"),
        ("search_space", {"lr": 0.1}, r"search_space\['lr'\] is 0.1"),
        ("search_space", {"lr": [0.1]}, r"'lr'.*hp_choice"),
        ("search_space", {}, "search_space is empty; give at least one"),
        ("search_space", {"lr": hp_uniform(0, 1)}, "which a grid can't go through; .*RandomSearch"),
        ("num_epochs", 0, "num_epochs is 0; it is a whole number from 1"),
        ("num_epochs", 2.0, "num_epochs is 2.0"),
        ("num_epochs", True, "num_epochs is True"),
        ("evaluation_metric", None, "evaluation_metric is None"),
        ("validation", 1.0, "validation is 1.0; a share lies between 0 and 1"),
        ("validation", 0, "validation is 0; .* None is for no validation"),
        ("validation", [0.2], r"validation is \[0.2\]; give a share"),
        ("observers", print, r"observers is .*print.*; give a list"),
        ("observers", [print], "observers holds .*print.* which has no on_record"),
        ("validation", None, "evaluation_metric is 'accuracy' and validation is None"),
        ("feature_columns", "features", r"feature_columns is 'features'; give a list: \['feat"),
        ("feature_columns", [], r"feature_columns is \[\]"),
        ("feature_columns", ["a", "a"], "feature_columns names 'a' more than once"),
        ("feature_columns", ["label"], "'label' is in feature_columns and in label_columns"),
        ("label_columns", [1], "label_columns holds 1; column names are strings"),
        ("label_columns", [], r"label_columns is \[\]; give a list of column names"),
        ("sample_weight_column", "label", "sample_weight_column is 'label', which is a feature or"),
        ("seed", -1, "seed is -1; it is a whole number from 0"),
        ("order", "random", r"order is 'random'; it is one of \('dynamic', 'seeded'\)"),
        ("verbose", None, "verbose is None"),
    ],
)
def test_unusable_argument_is_refused_by_name_value_and_remedy(
    tmp_path: Path, argument: str, value: Any, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        GridSearch(**arguments(tmp_path, **{argument: value}))


def test_positional_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        GridSearch(LocalBackend(2))  # type: ignore[misc]


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
    launchers = [backend.agents]
    with pytest.raises(ConfigurationError, match=said):
        search.fit(rows())
    assert [backend.agents] == launchers, "agents were launched"


def test_different_metrics_per_trial_are_refused(tmp_path: Path) -> None:
    space = {"metrics": hp_choice([["accuracy"], []])}
    with pytest.raises(ConfigurationError, match="trials measure different things"):
        GridSearch(**arguments(tmp_path, search_space=space)).fit(rows())


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
            part = CachedPartition.build(
                manifest.partition("val", index),
                manifest,
                store,
                str(tmp_path),
            )
            with torch.no_grad():
                outputs = model(torch.from_numpy(np.array(part.columns["features"])))
            hits += int((outputs.argmax(1).numpy() == part.columns["label"]).sum())
            total += part.rows
        assert trial.history["val_accuracy"][trial.result_epoch - 1] == pytest.approx(
            hits / total, abs=1e-6
        )


@pytest.mark.slow
def test_models_of_finished_trials_know_their_history_and_weights(result: SearchResult) -> None:
    finished = [trial for trial in result.trials if trial.status == "finished"]
    models = result.get_all_models()
    assert [model.trial_id for model in models] == [trial.trial_id for trial in finished]
    assert [model.get_history() for model in models] == [trial.history for trial in finished]
    best = result.get_best_model()
    assert (best.trial_id, best.params) == (
        result.best_trial.trial_id, result.best_trial.params
    )  # fmt: skip
    weights, same = best.torch().state_dict(), result.torch().state_dict()
    assert all(torch.equal(weights[name], same[name]) for name in same)
    with pytest.raises(ConfigurationError, match=r"output_columns is .*; give a list of 1"):
        best.set_output_columns(["a", "b"])


@pytest.mark.slow
def test_torch_leaves_the_callers_random_numbers_alone(result: SearchResult) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    result.torch()
    assert torch.equal(torch.rand(3), expected)


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


def test_what_is_no_spark_frame_is_refused_by_its_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"fit got a builtins.dict; give a Spark Data"):
        GridSearch(**arguments(tmp_path)).fit({"features": [1.0], "label": [0]})


@pytest.mark.slow
def test_output_columns_are_one_per_label(result: SearchResult) -> None:
    assert result.set_output_columns(["prediction"]) is result
    for wrong in ("prediction", ["a", "b"], []):
        with pytest.raises(ConfigurationError, match="give a list of 1 names"):
            result.set_output_columns(wrong)


@pytest.mark.slow
def test_a_notebook_shows_four_digits_and_why_a_trial_failed(result: SearchResult) -> None:
    shown = result._repr_html_()
    assert "ValueError: no layer is -1 wide (" in shown and "Traceback" not in shown
    assert f"<td>{result.best_trial.result_metrics['val_loss']:.4g}</td>" in shown


@pytest.mark.slow
def test_unknown_trial_names_the_known_ones(result: SearchResult) -> None:
    with pytest.raises(ConfigurationError, match=r"no trial 'trial-9'; trials are \['trial-000'"):
        result.torch("trial-9")
    trial: Any = result.best_trial
    with pytest.raises(ConfigurationError, match=r"trial_id is a Trial; give the name .*trial_id$"):
        result.get_model(trial)
    with pytest.raises(ConfigurationError, match="trial_id is a Trial; give the name"):
        cerebro_hydra.replay(result.run_path, trial)


def test_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a run"):
        SearchResult.open(str(tmp_path))


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
