"""A search over modules with a training step of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cerebro_hydra
from tests.end_to_end.runs import classes, two_rates
from tests.recipe.stepped_modules import Stepped, stepped


@pytest.mark.long
def test_a_search_measures_what_steps_log_and_replays_and_saves_the_module(tmp_path: Path) -> None:
    result = two_rates(tmp_path, stepped, "hits")
    measured = ("train_loss", "val_loss", "val_hits", "val_accuracy", "val_logits")
    assert result.best_trial.history.keys() == {*measured}
    module = result.torch()
    assert type(module) is Stepped and module.seen > 0
    result.get_best_model().save(str(tmp_path / "saved"))
    loaded = cerebro_hydra.load_model(str(tmp_path / "saved")).torch()
    rows = torch.from_numpy(classes(131).arrays["features"])
    with torch.no_grad():
        assert torch.allclose(loaded(rows)[0], module(rows), atol=1e-6)
