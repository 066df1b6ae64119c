"""Whole runs with the features and kinds of models that users bring: all replay to the bit."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import cerebro_hydra
from cerebro_hydra.errors import AllTrialsFailed, ReplayError
from cerebro_hydra.observe.view import RunView
from cerebro_hydra.replay.record import read_trial
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.testing.local_backend import Arrays
from tests.end_to_end import models
from tests.end_to_end.runs import assert_replays, classes, search
from tests.end_to_end.trials import meta_models, rich_models
from tests.end_to_end.trials.meta_models import WIDTH

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("space", "devices"),
    [
        ({"scale": [0.5, 2.0], "leaves": [True, False]}, {}),
        ({"scale": [0.5, 2.0], "leaves": [True, False]}, {"devices_per_worker": 2}),
        ({"scale": [0.5, 1, 2, 3], "leaves": [False]}, {"device_memory": 20_000, "residents": 4}),
    ],
)
def test_trials_of_a_process_find_their_own_settings_and_nothing_of_others_steps(
    tmp_path: Path, space: dict[str, list[float]], devices: dict[str, int]
) -> None:
    result = search(
        tmp_path, rich_models.configured, space, classes(120), resources=devices,
        evaluation_metric="loss", num_epochs=2,
    )  # fmt: skip
    assert rich_models.Configured.power == 1.0, "nor has the driver what a factory has set"
    for trial in result.trials:
        assert trial.status == "finished", trial.error
        rich_models.Configured.penalties.clear()  # as in a process of its own
        rich_models.Configured.power = 1.0
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.identical, str(report)


@pytest.mark.parametrize("devices", [0, 2])
def test_layers_that_models_share_are_refused_where_trials_take_turns(
    tmp_path: Path, devices: int
) -> None:
    resources = {"devices_per_worker": devices} if devices else {}
    result = search(
        tmp_path, rich_models.of_one_trunk, {"lr": [0.1, 0.5]}, classes(120), resources=resources,
        evaluation_metric="loss",
    )  # fmt: skip
    first, second = result.trials
    assert first.status == "finished", first.error
    assert second.status == ("failed" if devices else "finished"), second.error
    if devices:
        assert "'0.weight' is the very one that the model of trial-000 has" in second.error
    for trial in (first,) if devices else (first, second):
        assert cerebro_hydra.replay(result.run_path, trial.trial_id).identical


def test_a_search_leaves_what_is_the_users_own_as_it_was(tmp_path: Path) -> None:
    array = rich_models.PRETRAINED.copy()
    for number in range(2):  # the second one finds what the first one has left
        result = search(
            tmp_path / str(number), rich_models.of_users_values, {"lr": [0.1, 0.5]}, classes(120),
            evaluation_metric="loss",
        )  # fmt: skip
        assert all(type(each) is torch.Tensor for each in rich_models.TABLES.values())
        assert np.array_equal(rich_models.PRETRAINED, array)
        one, other = (result.torch(trial.trial_id) for trial in result.trials)
        assert not torch.equal(one.last, other.last)
        assert os.listdir(Path(result.run_path, "models")), "the best one needs no source"


def weighed(rows: int = 200) -> Arrays:
    data = classes(rows)
    weights = np.random.default_rng(1).random(rows).astype(np.float32)
    return Arrays(data.arrays | {"weight": weights})


def test_every_training_feature_at_once_and_early_stopping_keeps_the_best_epoch(
    tmp_path: Path,
) -> None:
    result = search(
        tmp_path, rich_models.rich, {"lr": [0.5, 0.1], "patience": [1]}, weighed(),
        evaluation_metric="f1", num_epochs=8, sample_weight_column="weight",
    )  # fmt: skip
    assert_replays(result)
    folder, lengths = RunFolder.open(result.run_path), []
    for number, trial in enumerate(result.trials):
        assert trial.history.keys() == {"train_loss", "val_loss", "val_f1", "val_accuracy"}
        values = trial.history["val_f1"]
        assert all(0 <= value <= 1 for value in values)
        state = read_trial(folder, number).result_state
        assert trial.result_epoch == values.index(max(values)) + 1
        assert state == 2 * trial.result_epoch
        newest = 2 * len(values)  # kept for more epochs, if it was written before the trial ended
        others = set(folder.states(number)) - {newest}
        assert others | {newest} == {0, state, newest}, "what was the best before is swept"
        assert state in folder.states(number)
        lengths.append(len(values))
    assert min(lengths) < 8, "a trial stopped early"
    best = max(max(trial.history["val_f1"]) for trial in result.trials)
    assert max(result.best_trial.history["val_f1"]) == best
    averaged = result.torch().state_dict()
    number = result.trials.index(result.best_trial)
    live = trainable(folder, number, read_trial(folder, number).result_state)
    assert torch.equal(averaged["0.weight"], live["ema:0.weight"])
    assert not torch.equal(averaged["0.weight"], live["param:0.weight"])


def trainable(folder: RunFolder, trial: int, state: int) -> dict[str, torch.Tensor]:
    """Return the tensors in the trainable segments of a state."""
    found = {}
    for shard in folder.read_state(trial, state)["shards"]:
        found |= safetensors.torch.load(bytes(folder.read_object(shard["trainable"])))
    return found


def test_two_inputs_by_name_and_two_losses(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    kind = random.integers(0, 3, 120)
    data = Arrays(
        {
            "image": (random.normal(size=(120, 1, 8, 8)) + kind[:, None, None, None]).astype("f4"),
            "table": random.normal(size=(120, 5)).astype("f4"),
            "kind": kind,
            "size": random.normal(size=120).astype("f4"),
        }
    )
    result = search(
        tmp_path, rich_models.two_heads, {"lr": [0.01, 0.002]}, data,
        feature_columns=["image", "table"], label_columns=["kind", "size"],
        evaluation_metric="kind_accuracy",
    )  # fmt: skip
    assert_replays(result)
    assert max(result.best_trial.history["val_kind_accuracy"]) > 0.5


def text(rows: int = 96) -> Arrays:
    random = np.random.default_rng(3)
    lengths = random.integers(3, 13, rows)
    mask = (np.arange(12) < lengths[:, None]).astype(np.int64)
    tokens = random.integers(1, 64, (rows, 12)) * mask
    return Arrays({"input_ids": tokens, "attention_mask": mask, "labels": tokens[:, 0] % 3})


def test_a_transformer_as_it_comes_with_batches_of_any_length(tmp_path: Path) -> None:
    result = search(
        tmp_path, rich_models.bert, {"lr": [0.003], "shards": [1, 3]}, text(),
        feature_columns=["input_ids", "attention_mask"], label_columns=["labels"],
    )  # fmt: skip
    assert_replays(result)


def test_a_warm_start_begins_with_the_weights_given(tmp_path: Path) -> None:
    first = search(tmp_path / "a", models.feed_forward, {"lr": [0.1]}, classes())
    weights = {n: t.contiguous() for n, t in first.torch().state_dict().items()}
    path = str(tmp_path / "weights.safetensors")
    safetensors.torch.save_file(weights, path)
    space = {"lr": [0.1], "warm_start": [path]}
    second = search(tmp_path / "b", models.feed_forward, space, classes())
    assert_replays(second)
    began = trainable(RunFolder.open(second.run_path), 0, 0)
    for name, weight in weights.items():
        assert torch.equal(began[f"param:{name}"], weight), name
    space = {"lr": [0.1], "warm_start": [path + "x"]}
    with pytest.raises(AllTrialsFailed, match="there is no such file"):
        search(tmp_path / "c", models.feed_forward, space, classes())


# ---------------------------------------------------------------------- weights from a file


OPTIONS = {
    "feature_columns": ["tokens"], "label_columns": ["label"], "evaluation_metric": "loss",
}  # fmt: skip


def rows() -> Arrays:
    tokens = np.random.default_rng(3).integers(0, meta_models.VOCABULARY, (42, 12))
    return Arrays({"tokens": tokens, "label": tokens})


@pytest.fixture
def weights(tmp_path: Path) -> str:
    torch.manual_seed(11)
    path = str(tmp_path / "weights.safetensors")
    safetensors.torch.save_model(meta_models.LanguageModel(layers=4, width=WIDTH), path)
    return path


@pytest.mark.parametrize("cut", ["modules", pytest.param("export", marks=pytest.mark.long)])
def test_a_model_on_the_meta_device_trains_from_a_file(
    tmp_path: Path, weights: str, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cerebro_hydra.tune.admission.available_memory", lambda: float(24 << 20))
    space = {"weights": [weights], "cut": [cut], "clip": [1.0]}
    result = search(tmp_path, meta_models.on_meta, space, rows(), 1, **OPTIONS)
    report = cerebro_hydra.replay(result.run_path, "trial-000", factory=meta_models.on_cpu)
    assert report.identical, str(report)
    monkeypatch.setattr("cerebro_hydra.replay.replay_trial.available_memory", lambda: 1e6)
    with pytest.raises(ReplayError, match=r"trial-000 needs about .* of memory to be replayed"):
        cerebro_hydra.replay(result.run_path, "trial-000", factory=meta_models.on_cpu)


def test_a_model_on_the_meta_device_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(AllTrialsFailed, match="on the meta device, where tensors have no values"):
        search(tmp_path, meta_models.on_meta, {"cut": ["modules"]}, rows(), **OPTIONS)


@pytest.mark.parametrize("resources", [{}, {"device_memory": 36_000}], ids=["alone", "queues"])
def test_what_the_trials_of_a_process_share_and_each_step_sets_anew_mixes_no_two(
    tmp_path: Path, resources: dict[str, int]
) -> None:
    result = search(
        tmp_path,
        rich_models.leaving,
        {"weight": [0.01, 1.0]},
        classes(200),
        resources=resources,
        evaluation_metric="loss",
    )
    assert_replays(result)
    for trial in result.trials:
        assert trial.status == "finished"
    view = RunView.of_run(RunFolder.open(result.run_path))
    assert {trial.shards for trial in view.trials.values()} == {1}
