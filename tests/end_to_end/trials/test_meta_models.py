"""Models that no process builds with values: their weights come from a file, by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import cerebro_hydra
from cerebro_hydra.errors import AllTrialsFailed, ReplayError
from cerebro_hydra.testing.local_backend import Arrays
from tests.end_to_end.runs import search
from tests.end_to_end.trials import meta_models
from tests.end_to_end.trials.meta_models import WIDTH

pytestmark = pytest.mark.slow

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
