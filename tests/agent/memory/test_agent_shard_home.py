"""The home of a shard holds memory only while the shard is in DRAM."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cerebro_hydra.agent.memory.shard_store import Shard, ShardHome
from cerebro_hydra.storage.digest import digest
from tests.agent.standins import empty_store

SIZES = {"trainable": 3000, "gradients": 1000}


def test_a_home_gives_its_memory_back_on_disk_and_has_its_bytes_again(tmp_path: Path) -> None:
    store = empty_store()
    state, named = store.expect(0, 0, 1), {}
    for name in ("frozen", "trainable"):
        buffer = store.segments.allocate(3000)
        buffer[:] = 1
        named[name] = digest(buffer), buffer
    store.put(state, 0, Shard(named, {}))
    del named, buffer
    pool = store.segments.pool
    before = pool.leased
    held = store.follow(0, 0)(0)
    assert held is not None
    home = ShardHome(held, store.segments, str(tmp_path))
    for number, slab in enumerate(home.room_for(SIZES).values()):
        slab[:] = 7 + number
    del slab
    home.changed({"step": 1}, has_gradients=True)
    assert pool.leased == before + sum(SIZES.values())
    home.to_disk()
    assert pool.leased == before
    home.to_dram()
    assert pool.leased == before + sum(SIZES.values())
    found = {name: set(np.unique(slab).tolist()) for name, slab in home.slabs.items()}
    assert found == {"frozen": {1}, "trainable": {7}, "gradients": {8}}
    home.changed({"step": 2}, has_gradients=False)
    assert pool.leased == before + SIZES["trainable"], "gradients need no place any more"
    home.leave_dram()
    assert pool.leased == before
