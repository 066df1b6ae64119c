"""The examples of docs/results.md, run in order as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import GridSearch, hp_choice
from tests.tune import tune_models

PAGE = Path(__file__).parents[2] / "docs" / "results.md"


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random, backend, store = (
        np.random.default_rng(1),
        LocalBackend(2),
        LocalStore(tmp_path / "store"),
    )
    features = random.normal(size=(80, 16)).astype(np.float32)
    search = GridSearch(
        backend=backend,
        store=store,
        estimator_gen_fn=tune_models.small,
        search_space={"lr": hp_choice([0.1])},
        num_epochs=1,
        verbose=0,
    )
    rows = Arrays({"features": features, "label": random.integers(0, 4, 80)})
    names = {
        "search": search,
        "df": rows,
        "estimator_gen_fn": tune_models.small,
        "features": torch.from_numpy(features),
        "prepared": backend.prepare(store, rows, search.data_spec),
    }
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 5
    for example in examples:
        exec(example, names)
    assert names["best"].result_epoch == 1
    assert torch.equal(names["outputs"][0], names["module"](names["features"]))
