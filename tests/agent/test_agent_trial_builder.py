"""What an agent keeps per trial: a structure once for equal models, rows by epoch, no weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cerebro_hydra.agent.trial_builder import TrialBuilder
from cerebro_hydra.data.cache import CachedPartition
from cerebro_hydra.data.prepared import find_prepared
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.run_document import RUN_FILE, RunDocument
from tests.end_to_end import models
from tests.end_to_end.test_runs import classes, search


@pytest.mark.slow
def test_equal_models_are_exported_once_and_a_run_that_goes_on_takes_the_next_orders(
    tmp_path: Path,
) -> None:
    space = {"lr": [0.1, 0.01, 0.001], "dropout": [0.1]}
    result = search(tmp_path, models.feed_forward, space, classes(), num_epochs=1)
    document = RunDocument.from_json(RunFolder.open(result.run_path).read_json(RUN_FILE))
    store = LocalStore(str(tmp_path))
    manifest = find_prepared(store, document.fingerprint)
    part = CachedPartition.build(
        manifest.partition("train", 0), manifest, store, str(tmp_path / "cache"),
    )  # fmt: skip
    builder = TrialBuilder(document, models.feed_forward, {0: part}, {})
    built = [builder.get(trial) for trial in range(3)]
    assert len({id(runtime.engine._cut_model) for runtime in built}) == 1
    for runtime in built:
        assert all(p.numel() == 0 for p in runtime.recipe.model.parameters())

    def rows(document: RunDocument, epoch: int) -> torch.Tensor:
        windows = TrialBuilder(document, models.feed_forward, {0: part}, {}).windows(0, epoch, 0)
        return torch.cat([batch.features[0] for window in windows for batch in window])

    going_on = replace(document, first_epoch=1)
    assert torch.equal(rows(going_on, 0), rows(document, 1))
    assert not torch.equal(rows(going_on, 0), rows(document, 0))
