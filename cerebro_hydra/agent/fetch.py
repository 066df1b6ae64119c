"""Fetches one state to this agent, shard by shard, from a peer or from the store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cerebro_hydra.agent.shard_store import Shard, ShardStore, State
from cerebro_hydra.errors import StoreError, TransferError
from cerebro_hydra.plan.events import Hop
from cerebro_hydra.shards.digest import digest
from cerebro_hydra.shards.layout import Bytes
from cerebro_hydra.storage.run_folder import RunFolder
from cerebro_hydra.wire.messages import ShardKey
from cerebro_hydra.wire.shard_client import ShardClient

Connect = Callable[[str], ShardClient]

TRIES = 3
RETRY_SECONDS = 1.0
"""Seconds between tries; together the tries outlast the time in which a dead owner is noticed."""


@dataclass(frozen=True)
class FetchRequest:
    """A state and where it is: at a peer's address, or in the store (no address)."""

    trial: int
    visit: int
    shards: int
    incarnation: str | None
    uri: str | None


@dataclass
class Fetch:
    """One state on its way here, on a thread of its own; its shards appear in the shard store.

    A fetch that fails retracts the state, which ends the waits for it; `error` says why. `on_hop`
    is given the cost of each part of the state as it comes.
    """

    request: FetchRequest
    shard_store: ShardStore
    folder: RunFolder
    connect: Connect
    on_hop: Callable[[Hop], None]
    on_whole: Callable[[int, int], None]
    error: str | None = None
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _client: ShardClient | None = None

    def start(self) -> Fetch:
        state = self.shard_store.expect(self.request.trial, self.request.visit, self.request.shards)
        name = f"fetch-{self.request.trial}-{self.request.visit}"
        threading.Thread(target=self._run, args=(state,), name=name, daemon=True).start()
        return self

    def cancel(self) -> None:
        """End the fetch; shards that are here already stay until the state is dropped."""
        self._cancelled.set()
        if self._client is not None:
            self._client.cancel()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def _run(self, state: State) -> None:
        request = self.request
        try:
            for number in range(request.shards):
                receive = self._from_store if request.uri is None else self._retry
                self.shard_store.put(state, number, receive(number))
        except Exception as error:
            self.error = str(error) or type(error).__name__
            self.shard_store.retract(state)
            return
        finally:
            if self._client is not None:
                self._client.cancel()
        if not self.cancelled:
            self.on_whole(request.trial, request.visit)

    def _retry(self, number: int) -> Shard:
        """Ask the owner, a few times: a transfer may break while both ends live."""
        for _ in range(TRIES - 1):
            try:
                return self._from_peer(number)
            except TransferError:
                if self._cancelled.wait(RETRY_SECONDS):
                    raise
        return self._from_peer(number)

    def _from_peer(self, number: int) -> Shard:
        request = self.request
        assert request.uri is not None and request.incarnation is not None
        if self._client is None:
            self._client = self.connect(request.uri)
        if self.cancelled:
            raise TransferError("cancelled")
        key = ShardKey(request.trial, request.visit, number, request.incarnation)
        store = self.shard_store
        fetched = self._client.fetch(key, store.segments.digests(), store.segments.allocate)
        self.on_hop(Hop(fetched.bytes_moved, fetched.bytes_saved, fetched.seconds))
        segments = {
            name: (each.digest, store.segment(each.digest) if each.buffer is None else each.buffer)
            for name, each in fetched.segments.items()
        }
        return Shard(segments, fetched.cursor)

    def _from_store(self, number: int) -> Shard:
        request = self.request
        try:
            entry = self.folder.read_state(request.trial, request.visit)["shards"][number]
            segments = {name: self._object(entry[name]) for name in ("frozen", "trainable")}
        except StoreError as error:
            raise TransferError(str(error)) from error
        return Shard(segments, entry["cursor"] or {})

    def _object(self, name: str) -> tuple[str, Bytes]:
        held = self.shard_store.segments.get(name)
        if held is not None:
            self.on_hop(Hop(0, held.nbytes, 0.0))
            return name, held
        begun = time.perf_counter()
        with self.folder.open_object(name) as file:
            buffer = self.shard_store.segments.allocate(file.seek(0, os.SEEK_END))
            file.seek(0)
            rest = buffer.data
            while count := file.readinto(rest):  # type: ignore[attr-defined]
                rest = rest[count:]
        if (found := digest(buffer)) != name:
            raise TransferError(f"object {name} of the run folder is damaged: it has {found}")
        self.on_hop(Hop(buffer.nbytes, 0, time.perf_counter() - begun))
        return name, buffer
