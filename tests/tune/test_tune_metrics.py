"""Metrics of torchmetrics in whole searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_f1_score

from cerebro_hydra.recipe import Recipe
from tests.end_to_end.runs import two_rates


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
    result = two_rates(tmp_path, measured, "f1", verbose=1)
    assert capsys.readouterr().out.count("metric 'batch' is ") == 1
    best = result.best_trial
    assert best.history.keys() == {"train_loss", "val_loss", "val_f1", "val_auroc", "val_batch"}
    other = result.trials[0].history
    assert best.history["val_f1"][-1] > other["val_f1"][-1]
    assert best.history["val_batch"] != best.history["val_f1"]
