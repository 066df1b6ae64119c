"""Saved models and the archive of a run: both load where nothing of the source is known."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark import SparkContext
from torch import nn

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError, SetupError, StoreError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.export.archive import METADATA_FILE
from cerebro_hydra.testing.local_backend import Arrays
from cerebro_hydra.tune import GridSearch, SearchResult, hp_choice
from tests.processes import run_python
from tests.tune import tune_models
from tests.tune.test_tune_search import arguments, rows

ALONE = """
import json, sys
sys.modules["tests"] = None  # no source of the model
import torch, cerebro_hydra
result = cerebro_hydra.SearchResult.open(sys.argv[1])
model, loaded = result.get_best_model(), cerebro_hydra.load_model(sys.argv[2])
row = torch.ones(3, 16)
try:
    result.torch(sys.argv[3])
except cerebro_hydra.errors.ReplayError as error:
    said = str(error)
print(json.dumps({
    "outputs": [each.torch()(row)[0].tolist() for each in (model, loaded)],
    "weights": list(model.state_dict()),
    "history": model.history,
    "params": loaded.params,
    "other": sorted(result.get_model(sys.argv[3]).state_dict()),
    "said": said,
}))
"""


def jittered(params: dict[str, Any]) -> Recipe:
    """A model whose collate adds noise in training alone, and in evaluation clips."""
    recipe = tune_models.small(params)

    def collate(batch: dict[str, torch.Tensor], training: bool) -> dict[str, torch.Tensor]:
        if training:
            noise = params["noise"] * torch.randn_like(batch["features"])
            return {**batch, "features": batch["features"] + noise}
        return {**batch, "features": batch["features"].clamp(-params["clip"], params["clip"])}

    return Recipe(recipe.model, recipe.optimizer, recipe.loss, ["accuracy"], 16, collate=collate)


class Decides(nn.Module):
    """A model that is not exported, because its forward decides by values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(features if float(features.sum()) > 0 else -features)


def deciding(params: dict[str, Any]) -> Recipe:
    model = Decides()
    return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())


def search(path: Path, factory: Any, **changes: Any) -> GridSearch:
    space = {"noise": hp_choice([0.1, 10.0]), "clip": hp_choice([1.5])}
    given = {"estimator_gen_fn": factory, "search_space": space, **changes}
    return GridSearch(**arguments(path, **given))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """A run of a factory that only this process knows."""
    return search(tmp_path_factory.mktemp("store"), partial(jittered)).fit(rows())


@pytest.mark.slow
def test_a_result_opens_in_a_process_without_its_source(
    result: SearchResult, tmp_path: Path
) -> None:
    best = result.get_best_model()
    best.save(str(tmp_path / "model"))
    (other,) = {each.trial_id for each in result.get_all_models()} - {best.trial_id}
    done = run_python("-c", ALONE, result.run_path, tmp_path / "model", other)
    said = json.loads(done.stdout)
    with torch.no_grad():  # evaluation's view of collate is a part of what was saved
        expected = best.torch()(torch.ones(3, 16).clamp(-1.5, 1.5))
    assert said["outputs"] == [expected.tolist()] * 2
    assert said["weights"] == list(best.torch().state_dict())
    assert said["other"] == sorted(said["weights"])
    assert f"no archive of {other}, so it needs its source: " in said["said"]
    assert "give it as factory=" in said["said"]
    assert (said["history"], said["params"]) == (best.history, best.params)


@pytest.mark.slow
def test_a_saved_model_is_written_as_a_whole_and_never_over_another(
    result: SearchResult, tmp_path: Path
) -> None:
    model, path = result.get_best_model(), tmp_path / "a" / "model"
    model.save(str(path))
    with pytest.raises(ConfigurationError, match=r"model' exists; choose .* overwrite=True"):
        model.save(str(path))
    (path / "of-another").write_text("old")
    model.save(str(path), overwrite=True)
    names = {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()}
    assert METADATA_FILE in names and "of-another" not in names
    assert [each.name for each in path.parent.iterdir()] == ["model"]
    loaded = cerebro_hydra.load_model(str(path))
    assert (loaded.feature_columns, loaded.trial) == (["features"], result.best_trial)
    loaded.save(f"file://{tmp_path}/again")
    again = cerebro_hydra.load_model(str(tmp_path / "again"))
    assert torch.equal(again.torch()(torch.ones(2, 16))[0], loaded.torch()(torch.ones(2, 16))[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "fifo", "link to a folder", "link to nothing"])
def test_a_saved_model_takes_the_place_of_what_is_no_folder(
    result: SearchResult, tmp_path: Path, kind: str
) -> None:
    path, other = tmp_path / "model", tmp_path / "other"
    other.mkdir()
    (other / "precious").write_text("theirs")
    match kind:
        case "file":
            path.write_text("old")
        case "fifo":
            os.mkfifo(path)
        case _:
            path.symlink_to(other if "folder" in kind else tmp_path / "nowhere")
    model = result.get_best_model()
    with pytest.raises(ConfigurationError, match="model' exists; choose"):
        model.save(str(path))
    model.save(str(path), overwrite=True)
    assert cerebro_hydra.load_model(str(path)).trial == result.best_trial
    assert not path.is_symlink() and (other / "precious").read_text() == "theirs"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["dbfs:/models/m", "./s3:/models/m", "~nobody-here/m", "C:\\m"])
def test_a_model_makes_no_folder_of_a_scheme(
    result: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    with pytest.raises((ConfigurationError, SetupError)):
        result.get_best_model().save(path)
    with pytest.raises(ConfigurationError, match="path is '"):
        result.get_best_model().export(path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_saved_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match=r"can't read .*part-00000.*check the path"):
        cerebro_hydra.load_model(str(tmp_path))
    # Other tests of this process may have started a session.
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    for path in ("hdfs://far/away", "dbfs:/away", "./s3:/away"):
        with pytest.raises(SetupError, match="no Spark session; start one"):
            cerebro_hydra.load_model(path)


@pytest.mark.slow
def test_a_model_that_needs_its_source_says_why_and_how_to_load_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = {"search_space": {"lr": hp_choice([0.1])}, "evaluation_metric": "loss"}
    trained = search(tmp_path, deciding, num_epochs=1, verbose=1, **fixed).fit(rows())
    with pytest.raises(ConfigurationError, match=r"Decides can't be exported.*factory=") as error:
        trained.get_best_model().save(str(tmp_path / "model"))
    assert f"SearchResult.open('{trained.run_path}', factory=estimator_gen_fn)" in str(error.value)
    printed = capsys.readouterr().out
    assert "trial-000 needs its source: Decides can't be exported" in printed
    assert f"open it again: cerebro_hydra.SearchResult.open('{trained.run_path}')" in printed
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_the_best_epoch_is_kept_and_replays_before_the_last(tmp_path: Path) -> None:
    """Nothing is to be learned from labels at random, so that training makes the loss worse."""
    noise = Arrays({**rows().arrays, "label": np.random.default_rng(3).integers(0, 4, 121)})
    space = {"lr": hp_choice([0.2, 0.5])}
    fixed = {"search_space": space, "evaluation_metric": "loss", "order": "seeded"}
    result = search(tmp_path, tune_models.small, num_epochs=4, **fixed).fit(noise)
    for trial in result.trials:
        values = trial.history["val_loss"]
        assert trial.result_epoch == values.index(min(values)) + 1
        assert cerebro_hydra.replay(result.run_path, trial.trial_id).identical
    assert any(trial.result_epoch != 4 for trial in result.trials)
