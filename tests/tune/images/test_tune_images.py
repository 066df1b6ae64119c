"""Searches over bytes of pictures: decoded by agents, resumed, replayed, predicted with."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.testing.local_backend import Arrays
from cerebro_hydra.tune import GridSearch, hp_choice
from tests.recipe.decoding import pictures
from tests.tune.test_tune_search import arguments


def search(path: Path, **changes: Any) -> GridSearch:
    given = {
        "estimator_gen_fn": pictures.searched,
        "search_space": {"by": hp_choice(["jpeg", "function"])},
        "feature_columns": ["image"],
        "validation": 0.25,
        "num_epochs": 1,
    }
    return GridSearch(**arguments(path, **{**given, **changes}))


@pytest.mark.slow
def test_a_search_over_bytes_hops_goes_on_replays_and_predicts(tmp_path: Path) -> None:
    data = Arrays(pictures.table(80))
    first = search(tmp_path).fit(data)
    result = search(tmp_path, num_epochs=3).fit(data, resume=first.run_path)
    for trial in result.trials:
        report = cerebro_hydra.replay(result.run_path, trial.trial_id, pictures.searched)
        assert report.identical, str(report)
    assert max(trial.history["val_accuracy"][-1] for trial in result.trials) > 0.6
    best = result.get_best_model()
    with pytest.raises(ConfigurationError, match=r"'image' holds bytes or images, .* factory="):
        best.save(str(tmp_path / "model"))
    rows = data.arrays["image"][:5]
    found = best.predict({"image": list(rows)})
    x = pictures.cropped({"image": [torch.from_numpy(pictures.from_bytes(c)) for c in rows]}, False)
    with torch.no_grad():
        assert torch.equal(torch.from_numpy(found), best.torch()(x["image"]))


def gray_if_torn(cell: bytes) -> Any:
    try:
        return pictures.from_bytes(cell)
    except OSError:
        return np.full((3, 14, 16), 128, np.uint8)


def lenient_or_not(params: dict[str, Any]) -> Recipe:
    recipe = pictures.searched({"by": "jpeg"})
    return recipe if params["by"] == "jpeg" else replace(recipe, decode={"image": gray_if_torn})


@pytest.mark.long
def test_a_row_that_is_torn_ends_the_trial_that_cannot_decode_it(tmp_path: Path) -> None:
    table = pictures.table(60)
    for row in (20, 40):
        table["image"][row] = table["image"][row][:200]
    given = {"by": hp_choice(["jpeg", "function"])}
    changes = {"estimator_gen_fn": lenient_or_not, "search_space": given}
    strict, lenient = search(tmp_path, **changes).fit(Arrays(table)).trials
    assert (strict.status, lenient.status) == ("failed", "finished")
    told = r"column 'image': row \d+ of (train|val) partition \d .* is a damaged JPEG image of 200 "
    assert re.search(told, strict.error or ""), strict.error
