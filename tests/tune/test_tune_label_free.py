"""Searches without labels: run by agents in processes, resumed, replayed, saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.testing.local_backend import Arrays
from cerebro_hydra.tune import GridSearch, hp_choice
from tests.conformance import label_free
from tests.tune.test_tune_search import arguments, rows


class Codes:
    """Measures the largest difference, which no mean over rows gives."""

    def start(self) -> float:
        return 0.0

    def update(self, state: float, outputs: tuple[Tensor, ...], features: Tensor) -> float:
        return max(state, (outputs[0] - features).abs().max().item())

    def merge(self, state: float, other: float) -> float:
        return max(state, other)

    def compute(self, state: float) -> float:
        return state


def denoising(params: dict[str, Any]) -> Recipe:
    """A VAE that is given noisy rows, by the name of its argument, and gives clean ones."""
    model = label_free.VAE(16, 8, params["code"])

    def noisy(batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
        x = batch["features"]
        return {"x": x + 0.1 * torch.randn_like(x) if training else x, "features": x}

    return Recipe(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        label_free.elbo,
        {"mse": (label_free.reconstruction, "min"), "largest": (Codes(), "min")},
        batch_size=16,
        shards=["decoder"],
        collate=noisy,
    )


def search(path: Path, **changes: Any) -> GridSearch:
    given = {
        "estimator_gen_fn": denoising,
        "search_space": {"code": hp_choice([2, 4])},
        "label_columns": None,
        "evaluation_metric": "mse",
        "num_epochs": 1,
    }
    return GridSearch(**arguments(path, **{**given, **changes}))


@pytest.mark.slow
def test_a_search_without_labels_hops_goes_on_and_replays(tmp_path: Path) -> None:
    data = Arrays({"features": rows().arrays["features"]})
    first = search(tmp_path).fit(data)
    result = search(tmp_path, num_epochs=2).fit(data, resume=first.run_path)
    for trial in result.trials:
        assert sorted(trial.visit_log) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        report = cerebro_hydra.replay(result.run_path, trial.trial_id, denoising)
        assert report.identical, str(report)
        assert len(trial.history["val_largest"]) == 2
    best = result.get_best_model()
    history = best.history
    assert history["val_mse"][-1] < history["val_mse"][0]
    best.save(str(tmp_path / "model"))
    x = torch.from_numpy(data.arrays["features"][:5])
    with torch.no_grad():
        outputs = best.torch()(x)
        loaded = cerebro_hydra.load_model(str(tmp_path / "model"))
        assert all(map(torch.equal, loaded.torch()(x), outputs))
    assert not torch.equal(F.relu(outputs[1]), outputs[1])
    table = pd.DataFrame({"features": list(data.arrays["features"][:5])})
    with pytest.warns(UserWarning, match="gives 3 tensors, and transform takes the first 1, as"):
        first = loaded.transform(table)
    assert list(first) == ["features", "output"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = loaded.transform(table)  # it is told once
        both = loaded.set_output_columns(["rebuilt", "code"]).transform(table)
    for column in (again.output, both.rebuilt):
        assert np.array_equal(np.stack(column), np.stack(first.output))
    assert list(both) == ["features", "rebuilt", "code"]
    with pytest.raises(ConfigurationError, match="one for each tensor that forward gives"):
        loaded.set_output_columns([])


def test_what_does_not_fit_is_refused_before_anything_trains(tmp_path: Path) -> None:
    data = Arrays({"features": rows().arrays["features"]})
    with pytest.raises(cerebro_hydra.errors.AllTrialsFailed, match="without the label 'label'"):
        search(tmp_path, label_columns=["label"]).fit(rows())
    with pytest.raises(ConfigurationError, match="no column 'label'"):
        search(tmp_path, label_columns=["label"]).fit(data)
