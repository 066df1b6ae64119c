"""A whole run on a store that is reached by URL alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro_hydra
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.errors import DataError
from cerebro_hydra.storage import LocalStore, RunFolder, Store
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import GridSearch, hp_choice
from tests.end_to_end.remote_models import SharedStore, feed_forward

pytestmark = pytest.mark.slow


def search(store: Store) -> Any:
    return GridSearch(
        backend=LocalBackend(2),
        store=store,
        estimator_gen_fn=feed_forward,
        search_space={"lr": hp_choice([0.01, 0.001]), "frozen": hp_choice([True])},
        num_epochs=1,
        evaluation_metric="accuracy",
        order="seeded",
        verbose=0,
    )


def last_states(result: Any) -> list[Any]:
    folder = RunFolder.open(result.run_path)
    states = [folder.read_state(trial, max(folder.states(trial))) for trial in range(2)]
    return [[(s["frozen"], s["trainable"]) for s in state["shards"]] for state in states]


def test_run_on_a_remote_store_has_the_bits_of_a_local_one_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    random = np.random.default_rng(7)
    labels = random.integers(0, 4, 200)
    features = (random.normal(size=(200, 16)) + labels[:, None] / 3).astype(np.float32)
    data = Arrays({"features": features, "label": labels})
    store = SharedStore(f"shared://{tmp_path}/store")

    result = search(store).fit(data)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    for trial in result.trials:
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.identical, str(report)
    assert list(scratch.iterdir()) == []  # neither caches nor copies stay
    assert last_states(search(LocalStore(str(tmp_path / "local"))).fit(data)) == last_states(result)

    # Rows of another partition are met by the agents, which name the files that the user knows.
    (fingerprint,) = store.list(f"{store.prefix}/data")
    manifest = find_prepared(store, fingerprint)
    infos = [manifest.partition("train", index) for index in range(2)]
    parts = [f"{store.data_path(fingerprint)}/{info.path}" for info in infos]
    (file,) = store.list(parts[0])
    first, second = (store.read(f"{part}/{file}") for part in parts)
    store.write(f"{parts[0]}/{file}", second)
    store.write(f"{parts[1]}/{file}", first)
    with pytest.raises(DataError, match=rf"in '{parts[0]}'|in '{parts[1]}'"):
        search(store).fit_on_prepared_data()
