"""A search over modules with a training step of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import cerebro_hydra
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import GridSearch, hp_choice
from tests.recipe.stepped_modules import Stepped, stepped


@pytest.mark.long
def test_a_search_measures_what_steps_log_and_replays_and_saves_the_module(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    labels = random.integers(0, 4, 131)
    features = (random.normal(size=(131, 16)) + labels[:, None]).astype(np.float32)
    result = GridSearch(
        backend=LocalBackend(2),
        store=LocalStore(str(tmp_path)),
        estimator_gen_fn=stepped,
        search_space={"lr": hp_choice([0.0, 0.1])},
        num_epochs=2,
        evaluation_metric="hits",
        validation=0.3,
        verbose=0,
    ).fit(Arrays({"features": features, "label": labels}))
    best = result.best_trial
    assert best.params == {"lr": 0.1}
    measured = ("train_loss", "val_loss", "val_hits", "val_accuracy", "val_logits")
    assert best.history.keys() == {*measured}
    for trial in result.trials:
        assert cerebro_hydra.replay(result.run_path, trial.trial_id).identical
    module = result.torch()
    assert type(module) is Stepped and module.seen > 0
    result.get_best_model().save(str(tmp_path / "saved"))
    loaded = cerebro_hydra.load_model(str(tmp_path / "saved")).torch()
    rows = torch.from_numpy(features)
    with torch.no_grad():
        assert torch.allclose(loaded(rows)[0], module(rows), atol=1e-6)
