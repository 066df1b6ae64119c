"""Metrics of torchmetrics in whole searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_f1_score

import cerebro_hydra
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import GridSearch, hp_choice


def of_batch(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return a macro F1, which is no mean over rows."""
    return multiclass_f1_score(outputs, labels, 4, "macro")


def measured(params: dict[str, Any]) -> Recipe:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    return Recipe(
        model,
        torch.optim.SGD(model.parameters(), lr=params["lr"]),
        nn.CrossEntropyLoss(),
        metrics={
            "f1": torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro"),
            "auroc": "auroc",
            "batch": (of_batch, "max"),
        },
        batch_size=16,
        shards=["2"],
    )


@pytest.mark.long
def test_a_search_ranks_by_the_figure_of_all_rows_and_replays_it(tmp_path: Path, capsys) -> None:
    random = np.random.default_rng(1)
    labels = random.integers(0, 4, 131)
    features = (random.normal(size=(131, 16)) + labels[:, None]).astype(np.float32)
    result = GridSearch(
        backend=LocalBackend(2),
        store=LocalStore(str(tmp_path)),
        estimator_gen_fn=measured,
        search_space={"lr": hp_choice([0.0, 0.1])},
        num_epochs=2,
        evaluation_metric="f1",
        validation=0.3,
        verbose=1,
    ).fit(Arrays({"features": features, "label": labels}))
    assert capsys.readouterr().out.count("metric 'batch' is ") == 1
    best = result.best_trial
    assert best.params == {"lr": 0.1}
    assert best.history.keys() == {"train_loss", "val_loss", "val_f1", "val_auroc", "val_batch"}
    other = result.trials[0].history
    assert best.history["val_f1"][-1] > other["val_f1"][-1]
    assert best.history["val_batch"] != best.history["val_f1"]
    assert cerebro_hydra.replay(result.run_path, best.trial_id).identical
