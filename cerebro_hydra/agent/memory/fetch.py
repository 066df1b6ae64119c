"""Fetches states to this agent, shard by shard, from a peer or from the store: each only once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from cerebro_hydra.agent.memory.out_of_memory import memory_that_ran_out
from cerebro_hydra.agent.memory.shard_store import Shard, ShardHome, ShardStore, State
from cerebro_hydra.errors import StoreError, TransferError
from cerebro_hydra.plan.messages.events import Hop
from cerebro_hydra.shards.engine.layout import Bytes
from cerebro_hydra.storage.run_folder import DamagedObject, RunFolder
from cerebro_hydra.wire.messages import FetchedShard, ShardRequest
from cerebro_hydra.wire.shards import DigestDiffers, ShardClient

Connect = Callable[[str], AbstractContextManager[ShardClient]]

TRIES = 3
RETRY_SECONDS = 1.0
"""Seconds between tries; together the tries outlast the time in which a dead owner is noticed."""

STORE_PAUSES = (1.0, 4.0, 16.0)
"""Seconds between tries to read from the store, which may be away for a moment."""

_log = logging.getLogger(__name__)


class StateAltered(TransferError):
    """The bytes of a published shard are no longer what was announced of them."""


@dataclass(frozen=True)
class FetchRequest:
    """A state and where it is: at a peer's address, or in the store (no address)."""

    trial: int
    state: int
    shards: int
    incarnation: str | None
    uri: str | None


@dataclass
class Fetch:
    """One state on its way here; its shards appear in the shard store as they come.

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
    altered: bool = False
    """Whether it failed because the bytes at their source are not what was announced of them."""
    lacking: str | None = None
    """What memory the state did not fit into, if that is why it failed."""
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _client: ShardClient | None = None

    def start(self, threads: Executor) -> Fetch:
        """Announce the state, and fetch it on one of some threads."""
        state = self.shard_store.expect(self.request.trial, self.request.state, self.request.shards)
        threads.submit(self._run, state)
        return self

    def cancel(self) -> None:
        """End the fetch; shards that are here already stay until the state is dropped."""
        with self._lock:
            self._cancelled.set()
            if self._client is not None:
                self._client.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether the fetch was taken back."""
        return self._cancelled.is_set()

    def _run(self, state: State) -> None:
        request = self.request
        try:
            if request.uri is None:
                for number in range(request.shards):
                    self.shard_store.put(state, number, self._patiently_from_store(number))
            else:
                self._from_peer(state, request.uri)
        except Exception as error:
            self.error = str(error) or type(error).__name__
            self.altered = isinstance(error, StateAltered)
            self.lacking = memory_that_ran_out(error)
            self.shard_store.retract(state)
            return
        if not self.cancelled:
            self.on_whole(request.trial, request.state)

    def _from_peer(self, state: State, uri: str) -> None:
        """Ask the owner, a few times: a transfer may break while both ends live."""
        missing, tries = set(range(self.request.shards)), 0
        while missing:
            try:
                for shard in self._ask(uri, missing):
                    self.on_hop(Hop(shard.bytes_moved, shard.bytes_saved, shard.seconds))
                    self.shard_store.put(state, shard.number, Shard(shard.segments, shard.cursor))
                    missing.remove(shard.number)
                    tries = 0
                    del shard  # while the next one is waited for, these bytes may be spilled
            except TransferError as error:
                if isinstance(error, DigestDiffers):
                    self._ask_owner(uri, error)
                tries += 1
                if tries == TRIES or self._cancelled.wait(RETRY_SECONDS):
                    raise

    def _ask_owner(self, uri: str, differs: DigestDiffers) -> None:
        """Ask the owner of a damaged shard for the digest of its own bytes.

        Raises:
            StateAltered: they were damaged there, so that to ask for them again is in vain.
        """
        request, incarnation = self.request, self.request.incarnation or ""
        asked = ShardRequest(request.trial, request.state, incarnation, (differs.shard,))
        with self.connect(uri) as client:
            try:
                self._use(client)
                there = client.verify(asked).get(differs.shard, {}).get(differs.segment)
            except TransferError:
                return  # whether it is there at all is found when it is asked for again
            finally:
                self._use(None)
        if there not in (None, differs.announced):
            raise StateAltered(
                f"{asked} from {uri}: its owner says that segment {differs.segment!r} was written "
                f"to after it was published: it has digest {there}, announced was "
                f"{differs.announced}"
            ) from differs

    def _ask(self, uri: str, missing: Iterable[int]) -> Iterator[FetchedShard]:
        request = self.request
        assert request.incarnation is not None
        with self.connect(uri) as client:
            try:
                self._use(client)
                yield from client.fetch(
                    ShardRequest(
                        request.trial, request.state, request.incarnation, tuple(sorted(missing))
                    ),
                    self.shard_store.segments.get,
                    self.shard_store.segments.allocate,
                )
            finally:
                self._use(None)  # from here on it is another fetch's

    def _use(self, client: ShardClient | None) -> None:
        with self._lock:
            self._client = client
            if client is not None and self.cancelled:
                raise TransferError("cancelled")

    def _patiently_from_store(self, number: int) -> Shard:
        altered = False
        for pause in STORE_PAUSES:
            try:
                return self._from_store(number)
            except TransferError as error:
                was_altered, altered = altered, isinstance(error, StateAltered)
                if (altered and was_altered) or self._cancelled.wait(pause):
                    raise  # bytes that were damaged twice, or nobody waits any more
        return self._from_store(number)

    def _from_store(self, number: int) -> Shard:
        request = self.request
        try:
            entry = self.folder.read_state(request.trial, request.state)["shards"][number]
            segments = {name: self._object(entry[name]) for name in ("frozen", "trainable")}
        except StoreError as error:
            kind = StateAltered if isinstance(error, DamagedObject) else TransferError
            raise kind(str(error)) from error
        return Shard(segments, entry["cursor"] or {})

    def _object(self, name: str) -> tuple[str, Bytes]:
        held = self.shard_store.segments.get(name)
        if held is not None:
            self.on_hop(Hop(0, held.nbytes, 0.0))
            return name, held
        begun = time.perf_counter()
        buffer = self.folder.read_object(name, self.shard_store.segments.allocate)
        self.on_hop(Hop(buffer.nbytes, 0, time.perf_counter() - begun))
        return name, buffer


_THREADS = 32  # a fetch that waits for its turn holds no other up: owners need nothing from here
_NO_HOP = Hop(0, 0, 0.0)


class FetchManager:
    """Starts and ends fetches, which share some threads. Thread-safe.

    Args:
        incarnation: this agent, whose own states need no fetch.
        on_whole: called with (trial, state) when all of a fetched state is here.
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
        key = (request.trial, request.state)
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

    def error(self, trial: int, state: int) -> str | None:
        """Return why a state could not be fetched; None if nothing went wrong."""
        with self._lock:
            fetch = self._fetches.get((trial, state))
            return None if fetch is None else fetch.error

    def altered(self, trial: int, state: int) -> bool:
        """Return whether a state did not come because its source has other bytes than announced."""
        with self._lock:
            fetch = self._fetches.get((trial, state))
            return fetch is not None and fetch.altered

    def lacking(self, trial: int, state: int) -> str | None:
        """Return what memory a state did not fit into; None if nothing or something else failed."""
        with self._lock:
            fetch = self._fetches.get((trial, state))
            return None if fetch is None else fetch.lacking

    def take_hop(self, trial: int) -> Hop:
        """Return what was moved for a trial since the last call, so that no byte counts twice."""
        with self._lock:
            return self._hops.pop(trial, _NO_HOP)

    def mend(self, homes: Iterable[ShardHome]) -> None:
        """Read the frozen segments anew that code of a trial has written to; others share them.

        One that can't be read is forgotten, so that whoever needs it fetches it again.
        """
        for home in homes:
            try:
                if (damaged := home.damaged_frozen()) is not None:
                    self._read_stored(*damaged)
            except (StoreError, TransferError) as error:
                _log.warning("a frozen segment that a trial has changed is forgotten: %s", error)
                home.forget_frozen()

    def _read_stored(self, name: str, segment: Bytes) -> None:
        """Read a segment that the store has, by its digest, into memory of its size."""
        self._folder.read_object(name, lambda nbytes: segment)

    def _add_hop(self, trial: int, hop: Hop) -> None:
        with self._lock:
            total = self._hops.get(trial, _NO_HOP)
            self._hops[trial] = Hop(
                total.bytes_moved + hop.bytes_moved,
                total.bytes_saved + hop.bytes_saved,
                total.seconds + hop.seconds,
            )

    def drop(self, trial: int, state: int) -> None:
        """Forget a state, and end its fetch."""
        with self._lock:
            fetch = self._fetches.pop((trial, state), None)
            if fetch is not None:
                fetch.cancel()
            self._shard_store.withdraw(trial, state)

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
