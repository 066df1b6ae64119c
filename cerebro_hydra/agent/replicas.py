"""Connects the ranks of a visit with replicas: what each offers lies at its agent's own server.

A rank asks the one before it for partial sums and buffers, and the one after it for whole sums, by
the requests with which shards are fetched: so the run's secret, its limits and TLS hold for them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cerebro_hydra.errors import Cancelled, TransferError
from cerebro_hydra.plan.messages.instructions import Evaluate, StartSubEpoch
from cerebro_hydra.shards.engine.layout import Memory
from cerebro_hydra.shards.replicas.gradient_chain import Kind
from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.messages import Bytes, ShardRequest
from cerebro_hydra.wire.shards import Look, ShardClient

PEER_SECONDS = 60.0
"""How long a rank whose peer is gone waits to be told so, which takes as long as a heartbeat."""

_KINDS: tuple[Kind, ...] = ("buffers", "partial", "sum", "parameters")
_MOST_BUCKETS = 1 << 20  # of one round


class _Message:
    """Is what a rank offers."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self.left = threading.Event()

    def sent(self) -> None:
        """Take note that the bytes may change now."""
        self.left.set()


_Place = tuple[Kind, int]
"""A kind of message, and its bucket. One of a later round takes the place of one that was read."""


class ReplicaLinks:
    """Connects the rank of one attempt with the others; the threads of its chain use it.

    Args:
        task: the visit.
        uris: where the agents of all ranks serve.
        credentials: those of the run.
        changed: called when something new is offered.
    """

    def __init__(
        self,
        task: StartSubEpoch,
        uris: Sequence[str],
        credentials: Credentials,
        changed: Callable[[], object],
    ) -> None:
        self._task, self._uris, self._credentials = task, uris, credentials
        self._changed = changed
        self._offered: dict[_Place, tuple[int, _Message]] = {}
        self._clients: dict[tuple[Kind, int], ShardClient] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._waited, self._waits_since = 0.0, math.inf
        self.rank, self.ranks = task.rank, len(task.replicas)

    def send(self, kind: Kind, number: int, bucket: int, memory: Memory) -> None:
        """Offer a message; see `RankLinks`."""
        with self._lock:
            if self._over.is_set():
                raise self._cancelled()
            self._offered[kind, bucket] = number, _Message(memory.numpy())
        self._changed()

    def settle(self) -> None:
        """Wait until all sums that were offered have left their memory; see `RankLinks`."""
        with self._lock:
            offered = [each for (kind, _), (_, each) in self._offered.items() if kind == "sum"]
        for each in offered:
            each.left.wait()
        if self._over.is_set():
            raise self._cancelled()

    def end(self) -> None:
        """Offer nothing any more; see `RankLinks`."""
        with self._lock:
            self._offered = {}

    def look(self, number: int) -> _Message | None:
        """Find a message that is offered; called by the server's thread.

        Raises:
            TransferError: there will be none.
        """
        if self._over.is_set():
            raise TransferError(f"attempt {self._task.attempt} is over at rank {self.rank}")
        number, kind = divmod(number, len(_KINDS))
        number, bucket = divmod(number, _MOST_BUCKETS)
        found = self._offered.get((_KINDS[kind], bucket))
        return found[1] if found is not None and found[0] == number else None

    def receive(
        self, kind: Kind, number: int, rank: int, memory: Sequence[Memory]
    ) -> Iterator[int]:
        """Fill memory with the messages of another rank; see `RankLinks`.

        Raises:
            TransferError: the other one is gone, and nobody has told so for a minute.
            Cancelled: the attempt was taken back.
        """
        task, first = self._task, number * _MOST_BUCKETS
        numbers = (n * len(_KINDS) + _KINDS.index(kind) for n in range(first, first + len(memory)))
        request = ShardRequest(
            task.trial, task.state, task.replicas[rank], tuple(numbers), attempt=task.attempt
        )
        try:
            client = self._client(kind, rank)
            yield from client.receive(request, [each.numpy() for each in memory])
        except (TransferError, OSError) as error:
            # A trial is not to blame if a peer is gone: its loss ends the attempt by itself.
            if self._over.wait(PEER_SECONDS):
                raise self._cancelled() from None
            raise TransferError(str(error)) from error

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Count the time; see `RankLinks`."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waited, self._waits_since = self.waited, math.inf

    @property
    def waited(self) -> float:
        """Return the seconds that this rank has waited for others until now; for any thread."""
        return self._waited + max(0.0, time.monotonic() - self._waits_since)

    def _client(self, kind: Kind, rank: int) -> ShardClient:
        """Return the client of one kind of messages, which one thread uses."""
        with self._lock:
            if self._over.is_set():
                raise self._cancelled()
            if (kind, rank) not in self._clients:
                self._clients[kind, rank] = ShardClient(self._uris[rank], self._credentials)
            return self._clients[kind, rank]

    def _cancelled(self) -> Cancelled:
        return Cancelled(f"attempt {self._task.attempt} was taken back")

    def cancel(self) -> None:
        """End every wait, and offer nothing any more; called from any thread."""
        with self._lock:
            self._over.set()
            for client in self._clients.values():
                client.cancel()
                client.close()
            for _, message in self._offered.values():
                message.sent()
            self._offered = {}
        self._changed()


class Replicas:
    """Keeps the links of the visits with replicas that were accepted here. Thread-safe.

    Those of a visit that has ended stay until the next one is accepted, for the others to end.

    Args:
        credentials: those of the run.
        changed: called when something new is offered.
    """

    def __init__(self, credentials: Credentials, changed: Callable[[], object]) -> None:
        self._credentials, self._changed = credentials, changed
        self._links: dict[int, ReplicaLinks] = {}

    def accept(self, task: StartSubEpoch, uris: Sequence[str]) -> None:
        """Take in where the ranks of a visit are, before it begins."""
        before = dict(self._links)
        self._links[task.attempt] = ReplicaLinks(
            task, uris, self._credentials, lambda: self._changed()
        )
        for attempt, links in before.items():  # all of its ranks have ended, or it was taken back
            links.cancel()
            del self._links[attempt]

    def of(self, task: StartSubEpoch) -> ReplicaLinks:
        """Return the links of a visit.

        Raises:
            Cancelled: it was taken back.
        """
        if (links := self._links.get(task.attempt)) is None:
            raise Cancelled(f"attempt {task.attempt} was taken back")
        return links

    def waited(self, task: StartSubEpoch | Evaluate) -> float:
        """Return the seconds that a task has waited for its other ranks until now."""
        links = self._links.get(task.attempt)
        return 0.0 if links is None else links.waited

    def follow(self, attempt: int) -> Look:
        """Return what looks for the messages of an attempt, which may still have to come here."""

        def look(number: int) -> _Message | None:
            links = self._links.get(attempt)
            return None if links is None else links.look(number)

        return look

    def cancel(self, attempt: int) -> None:
        """End the waits of an attempt that was taken back."""
        if (links := self._links.get(attempt)) is not None:
            links.cancel()

    def close(self) -> None:
        """End all waits."""
        for links in list(self._links.values()):
            links.cancel()
