"""A whole run on a store that is reached by URL alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.errors import DataError
from cerebro_hydra.storage import LocalStore, Store
from cerebro_hydra.testing.local_backend import LocalBackend
from tests.end_to_end.remote_models import SharedStore, feed_forward
from tests.end_to_end.runs import assert_replays, bits, classes, grid

pytestmark = pytest.mark.slow


def search(store: Store) -> Any:
    space = {"lr": [0.01, 0.001], "frozen": [True]}
    return grid(LocalBackend(2), store, feed_forward, space, num_epochs=1, order="seeded")


def test_run_on_a_remote_store_has_the_bits_of_a_local_one_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    data = classes()
    store = SharedStore(f"shared://{tmp_path}/store")

    result = search(store).fit(data)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert_replays(result)
    assert list(scratch.iterdir()) == []  # neither caches nor copies stay
    local = search(LocalStore(str(tmp_path / "local"))).fit(data)
    assert bits(local.run_path) == bits(result.run_path)

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
