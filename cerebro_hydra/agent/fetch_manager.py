"""Fetches of states to this agent: one for each state, whoever asks first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from cerebro_hydra.agent.fetch import Connect, Fetch, FetchRequest
from cerebro_hydra.agent.shard_store import ShardStore
from cerebro_hydra.plan.events import Hop
from cerebro_hydra.shards.layout import Bytes
from cerebro_hydra.storage.run_folder import RunFolder

_THREADS = 32  # a fetch that waits for its turn holds no other up: owners need nothing from here
_NO_HOP = Hop(0, 0, 0.0)


class FetchManager:
    """Starts and ends fetches, which share some threads. Thread-safe.

    Args:
        incarnation: this agent, whose own states need no fetch.
        on_whole: called with (trial, visit) when all of a fetched state is here.
    """

    def __init__(
        self,
        incarnation: str,
        shard_store: ShardStore,
        folder: RunFolder,
        connect: Connect,
        on_whole: Callable[[int, int], None],
    ) -> None:
        self._incarnation = incarnation
        self._shard_store = shard_store
        self._folder = folder
        self._connect = connect
        self._on_whole = on_whole
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch")
        self._fetches: dict[tuple[int, int], Fetch] = {}
        self._hops: dict[int, Hop] = {}

    def fetch(self, request: FetchRequest) -> None:
        """Start fetching a state, unless it is here, on its way, or made here."""
        key = (request.trial, request.visit)
        with self._lock:
            if request.incarnation == self._incarnation or self._shard_store.whole(*key):
                return
            under_way = self._fetches.get(key)
            if under_way is not None:
                usable = under_way.error is None and not under_way.cancelled
                if usable and under_way.request.incarnation == request.incarnation:
                    return
                under_way.cancel()
            self._fetches[key] = Fetch(
                request,
                self._shard_store,
                self._folder,
                self._connect,
                partial(self._add_hop, request.trial),
                self._on_whole,
            ).start(self._threads)

    def error(self, trial: int, visit: int) -> str | None:
        """Return why a state could not be fetched; None if nothing went wrong."""
        with self._lock:
            fetch = self._fetches.get((trial, visit))
            return None if fetch is None else fetch.error

    def take_hop(self, trial: int) -> Hop:
        """Return what was moved for a trial since the last call, so that no byte counts twice."""
        with self._lock:
            return self._hops.pop(trial, _NO_HOP)

    def read_stored(self, name: str, segment: Bytes) -> None:
        """Read a segment that the store has, by its digest, into memory of its size.

        Raises:
            StoreError: the store lacks it, or it is damaged there.
        """
        self._folder.read_object(name, lambda nbytes: segment)

    def _add_hop(self, trial: int, hop: Hop) -> None:
        with self._lock:
            total = self._hops.get(trial, _NO_HOP)
            self._hops[trial] = Hop(
                total.bytes_moved + hop.bytes_moved,
                total.bytes_saved + hop.bytes_saved,
                total.seconds + hop.seconds,
            )

    def drop(self, trial: int, visit: int) -> None:
        """Forget a state, and end its fetch."""
        with self._lock:
            fetch = self._fetches.pop((trial, visit), None)
            if fetch is not None:
                fetch.cancel()
            self._shard_store.withdraw(trial, visit)

    def forget(self, trial: int) -> None:
        """Forget a trial that is over; its states are dropped one by one."""
        with self._lock:
            self._hops.pop(trial, None)
        self._shard_store.forget(trial)

    def close(self) -> None:
        """End every fetch, and wait for their threads."""
        with self._lock:
            for fetch in self._fetches.values():
                fetch.cancel()
        self._threads.shutdown(cancel_futures=True)
