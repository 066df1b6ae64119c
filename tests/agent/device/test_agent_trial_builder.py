"""What an agent keeps per trial: a structure once for equal models, rows by epoch, no weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cerebro_hydra.agent.device.builder import TrialBuilder
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.run_folder import read_document
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import GridSearch, hp_choice
from tests.tune import tune_models
from tests.tune.test_tune_search import arguments, rows


@pytest.mark.slow
def test_equal_models_are_exported_once_and_each_epoch_has_an_order_of_its_own(
    tmp_path: Path,
) -> None:
    space = {"lr": hp_choice([0.1, 0.01, 0.001])}
    options = arguments(tmp_path, backend=LocalBackend(1), search_space=space, num_epochs=1)
    result = GridSearch(**options).fit(rows(80))
    folder = RunFolder.open(result.run_path)
    document = read_document(folder)
    store = LocalStore(str(tmp_path))
    manifest = find_prepared(store, document.fingerprint)
    part = CachedPartition.build(
        manifest.partition("train", 0), manifest, store, str(tmp_path / "cache"),
    )  # fmt: skip
    builder = TrialBuilder(document, tune_models.small, {0: part}, {})
    for trial in range(3):
        builder.add(folder.read_trial(trial, document.run_id))
    built = [builder.get(trial) for trial in range(3)]
    assert len({id(each.runtime.cut_model) for each in built}) == 1
    for each in built:
        parameters = list(each.runtime.recipe.model.parameters())
        assert all(p.untyped_storage().nbytes() == p.element_size() for p in parameters)

    def rows_of(epoch: int) -> torch.Tensor:
        windows = builder.windows(0, epoch, 0)
        return torch.cat([batch.features[0] for window in windows for batch in window])

    assert torch.equal(rows_of(1), rows_of(1))
    assert not torch.equal(rows_of(1), rows_of(0))
