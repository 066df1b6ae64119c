"""The verdict is not "identical" for what no tensor of the replay shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from cerebro_hydra.errors import StoreError
from cerebro_hydra.recipe import PlainTrainer, Recipe, state_tensors
from cerebro_hydra.replay.compare import Expected, ReplayReport, compare
from cerebro_hydra.replay.record import TrialRecord, _apply
from cerebro_hydra.replay.states import Replayed, SavedState, read_saved
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_folder import RunFolder

METRICS = {"train_loss": 0.5}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(LocalStore(str(tmp_path)), "run")


def recipe() -> Recipe:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model=model, optimizer=optimizer, loss=nn.MSELoss(), batch_size=2)


def saved_of(trial: Recipe) -> SavedState:
    tensors = state_tensors(trial)
    kept = {name: t.clone() for name, t in tensors.items() if name != "buffer:scratch"}
    return SavedState(kept, [[{"lr": 0.1}], [{"lr": 0.1}]])


def verdict(
    folder: RunFolder, trial: Recipe, saved: SavedState, metrics: dict[int, dict[str, float]]
) -> ReplayReport:
    expected = Expected("trial-000", [(0, 0)], [], [], 1, None, metrics, saved)
    document = SimpleNamespace(threads=1, device="cpu", numerics="fast")
    run: Any = SimpleNamespace(folder=folder, document=document)
    replayed = Replayed([METRICS])
    replayed.keep(PlainTrainer(trial, 0, 1))
    return compare(trial, trial.model.state_dict(), replayed, expected, run)


def other_rate(shard: int) -> Callable[[SavedState], object]:
    return lambda saved: saved.groups[shard][0].update(lr=0.2)


@pytest.mark.parametrize(
    ("change", "epochs", "difference"),
    [
        (id, 1, None),
        (
            lambda saved: saved.tensors.pop("buffer:1.running_mean"),
            1,
            "buffer:1.running_mean exists only in the replay",
        ),
        (id, 2, "train_loss of epoch 2: the run has 0.5, the replay None"),
        (other_rate(0), 1, "lr of param group 0 in shard 0: the run has 0.2, the replay 0.1"),
        (other_rate(1), 1, "lr of param group 0 in shard 1: the run has 0.2, the replay 0.1"),
    ],
)
def test_only_what_agrees_in_all_is_identical(
    folder: RunFolder, change: Callable[[SavedState], object], epochs: int, difference: str | None
) -> None:
    trial = recipe()
    saved = saved_of(trial)
    change(saved)
    report = verdict(folder, trial, saved, dict.fromkeys(range(epochs), METRICS))
    assert (report.first_difference, report.identical) == (difference, difference is None)


def state_of(folder: RunFolder, content: bytes) -> str:
    """Write a state of one shard whose segments are both `content`, and return their digest."""
    name = digest(content)
    shard = {"frozen": name, "trainable": name, "cursor": {"groups": []}}
    folder.write_state(0, 1, {"trial": 0, "state": 1, "shards": [shard]})
    folder.write_object(name, content)
    return name


def test_a_flipped_bit_that_both_sides_would_read_is_refused(folder: RunFolder) -> None:
    """A frozen segment belongs to the initial state too, so no comparison could show its damage."""
    content = bytearray(safetensors.torch.save({"param:unused": torch.zeros(4)}))
    name = state_of(folder, bytes(content))
    assert list(read_saved(folder, 0, 1).tensors) == ["param:unused"]
    content[-1] ^= 1
    Path(folder.path, "objects", f"{name}.safetensors").write_bytes(content)
    with pytest.raises(StoreError, match=f"object {name} is damaged: .*{digest(content)}"):
        read_saved(folder, 0, 1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        safetensors.torch.save({"param:a": torch.zeros(2)}, {"param:a": "none"}),
        safetensors.torch.save({"param:a": torch.zeros(2)}, {"param:b": "0"}),
        safetensors.torch.save({"exists": torch.ones(3, dtype=torch.uint8)}),
    ],
)
def test_an_object_that_is_no_segment_is_refused(folder: RunFolder, content: bytes) -> None:
    name = state_of(folder, content)
    with pytest.raises(StoreError, match=f"object {name} of .* (is no segment|contradicts)"):
        read_saved(folder, 0, 1)


def test_a_redo_takes_back_the_metrics_of_its_epochs() -> None:
    record = TrialRecord()
    for state in (1, 2):
        _apply(
            record, {"type": "Commit", "state": state, "epoch": (state - 1) // 2, "partitions": [0]}
        )
    _apply(record, {"type": "EndEpoch", "epoch": 0, "metrics": METRICS})
    _apply(record, {"type": "Redo", "visits": [1, 2]})
    assert (record.visits, record.metrics) == ({}, {})
