"""Fetches that end badly or too late harm no other."""

from __future__ import annotations

import threading
from typing import Any

from cerebro_hydra.agent.fetch import FetchRequest
from cerebro_hydra.agent.fetch_manager import FetchManager
from cerebro_hydra.errors import Cancelled
from tests.agent.standins import SECONDS, Peer, empty_store


class Bench:
    """FetchManager of one agent with two peers."""

    def __init__(self) -> None:
        self.shard_store = empty_store()
        self.peers = {"uri-a": Peer(1), "uri-b": Peer(2)}
        self.whole: list[tuple[int, int]] = []
        self.told = threading.Event()
        folder: Any = None
        connect: Any = self.peers.__getitem__
        self.fetch_manager = FetchManager("me", self.shard_store, folder, connect, self.on_whole)

    def on_whole(self, trial: int, visit: int) -> None:
        self.whole.append((trial, visit))
        self.told.set()

    def bring(self, owner: str) -> Peer:
        self.fetch_manager.fetch(FetchRequest(0, 3, 1, owner, f"uri-{owner}"))
        peer = self.peers[f"uri-{owner}"]
        assert peer.asked.wait(SECONDS)
        return peer


def test_a_fetch_that_ends_late_leaves_the_next_one_of_that_state_alone() -> None:
    bench = Bench()
    lost = bench.bring("a")
    bench.fetch_manager.drop(0, 3)
    found = bench.bring("b")
    lost.error = Cancelled("its owner is gone")
    lost.answer.set()
    assert lost.left.wait(SECONDS)
    found.answer.set()
    assert bench.told.wait(SECONDS)
    assert bench.shard_store.whole(0, 3)
    assert bench.shard_store.wait(0, 3, 0).buffers["trainable"][0] == found.fill


def test_a_shard_that_comes_late_is_not_taken_for_one_of_the_next_fetch() -> None:
    bench = Bench()
    lost = bench.bring("a")
    bench.fetch_manager.drop(0, 3)
    found = bench.bring("b")
    lost.answer.set()
    assert lost.left.wait(SECONDS)
    assert not bench.shard_store.whole(0, 3)
    assert bench.whole == []
    found.answer.set()
    assert bench.told.wait(SECONDS)
    assert bench.whole == [(0, 3)]
