"""An agent writes segments by content; it neither names states nor ends later checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cerebro_hydra.agent.memory.checkpoint import write_segments
from cerebro_hydra.agent.memory.shard_store import Shard
from cerebro_hydra.errors import StoreError, TransferError
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_folder import RunFolder
from tests.agent.standins import empty_store


def test_a_state_that_is_not_here_is_an_error(tmp_path: Path) -> None:
    folder = RunFolder(LocalStore(str(tmp_path)), "run")
    with pytest.raises(TransferError, match="state 3 of trial 0"):
        write_segments(folder, empty_store(), 0, 3)
    assert folder.states(0) == []


def test_an_agent_that_wakes_up_late_changes_no_state(tmp_path: Path) -> None:
    """Its trial was trained again without it, and the state of that name is another one now."""
    folder, store = RunFolder(LocalStore(str(tmp_path)), "run"), empty_store()
    again = {"trial": 0, "visit": 3, "shards": []}
    folder.write_state(0, 3, again)
    words = {name: np.frombuffer(name.encode(), np.uint8) for name in ("frozen", "trainable")}
    late = {name: (digest(word), word) for name, word in words.items()}
    store.put(store.expect(0, 3, 1), 0, Shard(late, {"step": 1}))
    written = write_segments(folder, store, 0, 3)
    assert folder.read_state(0, 3)["shards"] == []
    assert all(folder.has_object(name) for name, _ in late.values())
    assert written["shards"][0]["cursor"] == {"step": 1}


def test_what_was_written_to_after_it_was_published_is_not_stored(tmp_path: Path) -> None:
    """Its name would be that of other bytes, which nobody could read."""
    folder, store = RunFolder(LocalStore(str(tmp_path)), "run"), empty_store()
    words = {name: np.array([1, len(name)], np.uint8) for name in ("frozen", "trainable")}
    segments = {name: (digest(word), word) for name, word in words.items()}
    state = store.expect(0, 3, 1)
    store.put(state, 0, Shard(segments, {"step": 1}))
    assert store.altered(state) == []
    words["trainable"][0] = 7
    assert store.altered(state) == [0]
    with pytest.raises(StoreError, match="'trainable' of shard 0 was written to after it was"):
        write_segments(folder, store, 0, 3)
    assert not folder.has_object(segments["trainable"][0])
