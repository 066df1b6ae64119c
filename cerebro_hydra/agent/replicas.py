"""Connects the ranks of a visit with replicas: what each offers lies at its agent's own server.

A rank asks the one before it for partial sums and buffers, and the one after it for whole sums, by
the requests with which shards are fetched: so the run's secret, its limits and TLS hold for them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cerebro_hydra.errors import Cancelled, TransferError
from cerebro_hydra.plan.messages.instructions import Evaluate, StartSubEpoch
from cerebro_hydra.shards.engine.layout import Memory
from cerebro_hydra.shards.replicas.gradient_chain import Kind
from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.messages import Bytes, ShardRequest
from cerebro_hydra.wire.shards import Look, ShardClient

PEER_SECONDS = 60.0
"""How long a rank whose peer is gone waits to be told so, which takes as long as a heartbeat."""

_KINDS: tuple[Kind, ...] = ("buffers", "partial", "sum")


@dataclass(frozen=True)
class _Message:
    """Is what a rank offers; see `Publication`."""

    memory: Sequence[Bytes]

    @property
    def segments(self) -> Mapping[str, tuple[str, Bytes]]:
        """Return the parts by their numbers, without digests: those of the state are compared."""
        return {str(number): ("", part) for number, part in enumerate(self.memory)}

    @property
    def cursor(self) -> Mapping[str, object]:
        """Return nothing."""
        return {}


def _number(kind: Kind, number: int) -> int:
    """Return what a message is called on the wire, where shards have their numbers."""
    return number * len(_KINDS) + _KINDS.index(kind)


class ReplicaLinks:
    """Connects the rank of one attempt with the others; the thread that computes uses it.

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
        self._offered: dict[int, _Message] = {}
        self._clients: dict[int, ShardClient] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._waited, self._waits_since = 0.0, math.inf
        self.rank, self.ranks = task.rank, len(task.replicas)

    def send(self, kind: Kind, number: int, memory: Sequence[Memory]) -> None:
        """Offer a message in place of the last one of its kind; see `RankLinks`."""
        message = _Message([each.numpy() for each in memory if each.numel()])
        kept = {n: m for n, m in self._offered.items() if n % len(_KINDS) != _KINDS.index(kind)}
        self._offered = kept | {_number(kind, number): message}
        self._changed()

    def look(self, number: int) -> _Message | None:
        """Find a message that is offered; called by the server's thread.

        Raises:
            TransferError: there will be none.
        """
        if self._over.is_set():
            raise TransferError(f"attempt {self._task.attempt} is over at rank {self.rank}")
        return self._offered.get(number)

    def receive(self, kind: Kind, number: int, rank: int, memory: Sequence[Memory]) -> None:
        """Fill memory with the message of another rank; see `RankLinks`.

        Raises:
            TransferError: the other one is gone, and nobody has told so for a minute.
            Cancelled: the attempt was taken back.
        """
        task, parts = self._task, [each.numpy() for each in memory if each.numel()]
        request = ShardRequest(
            task.trial,
            task.state,
            task.replicas[rank],
            (_number(kind, number),),
            attempt=task.attempt,
        )
        left = iter(parts)

        def allocate(nbytes: int) -> Bytes:
            part = next(left, None)
            if part is None or part.nbytes != nbytes:
                raise TransferError(f"rank {rank} has {nbytes} bytes where there are others here")
            return part

        self._waits_since = time.monotonic()
        try:
            for _ in self._client(rank).fetch(request, lambda digest: None, allocate):
                pass
        except (TransferError, OSError) as error:
            # A trial is not to blame if a peer is gone: its loss ends the attempt by itself.
            if self._over.wait(PEER_SECONDS):
                raise self._cancelled() from None
            raise TransferError(str(error)) from error
        finally:
            self._waited, self._waits_since = self.waited, math.inf

    @property
    def waited(self) -> float:
        """Return the seconds that this rank has waited for others until now; for any thread."""
        return self._waited + max(0.0, time.monotonic() - self._waits_since)

    def _client(self, rank: int) -> ShardClient:
        with self._lock:
            if self._over.is_set():
                raise self._cancelled()
            if rank not in self._clients:
                self._clients[rank] = ShardClient(self._uris[rank], self._credentials)
            return self._clients[rank]

    def _cancelled(self) -> Cancelled:
        return Cancelled(f"attempt {self._task.attempt} was taken back")

    def cancel(self) -> None:
        """End every wait, and offer nothing any more; called from any thread."""
        with self._lock:
            self._over.set()
            for client in self._clients.values():
                client.cancel()
                client.close()
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
