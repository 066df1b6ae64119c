"""Owners of shards for tests, which publish what they are told to, and receivers of one request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.messages import FetchedShard, ShardRequest
from cerebro_hydra.wire.shards import Look, ShardClient, ShardServer


@dataclass(frozen=True)
class Published:
    segments: dict[str, tuple[str, Any]]
    cursor: dict[str, Any] = field(default_factory=dict)


def noise(nbytes: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, nbytes, dtype=np.uint8)


def sha(buffer: np.ndarray) -> str:
    return hashlib.sha256(buffer).hexdigest()


def empty(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, dtype=np.uint8)


def nothing(digest: str) -> None:
    """Hold no segment."""


def request(*shards: int) -> ShardRequest:
    return ShardRequest(trial=4, state=2, incarnation="owner", shards=shards or (0,))


def fetch(
    client: ShardClient,
    *shards: int,
    held: Callable[[str], Any] = nothing,
    allocate: Callable[[int], Any] = empty,
) -> list[FetchedShard]:
    return list(client.fetch(request(*shards), held, allocate))


class Owner:
    """A ShardServer whose shards a test publishes; an exception is raised instead."""

    def __init__(self, credentials: Credentials, *shards: Published | Exception) -> None:
        self.shards: dict[int, Published | Exception] = dict(enumerate(shards))
        self.asked: SimpleQueue[ShardRequest] = SimpleQueue()
        self.server = ShardServer("127.0.0.1", credentials, self._follow, sha)
        self.uri = self.server.uri

    def publish(self, number: int, shard: Published | Exception) -> None:
        self.shards[number] = shard
        self.server.look_again()

    def _follow(self, request: ShardRequest) -> Look:
        self.asked.put(request)
        return self._look

    def _look(self, number: int) -> Published | None:
        shard = self.shards.get(number)
        if isinstance(shard, Exception):
            raise shard
        return shard
