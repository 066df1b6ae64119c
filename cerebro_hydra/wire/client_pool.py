"""Keeps connections to owners of shards for the next fetch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.messages import Bytes
from cerebro_hydra.wire.shard_client import ShardClient

_IDLE_SECONDS = 60.0  # seconds that an idle connection is kept, by far less than its owner keeps it


class ClientPool:
    """Lends clients of owners, each to one fetch at a time. Thread-safe.

    Args:
        credentials: those of the run.
        digest: returns the digest of received bytes, by which they are checked.
    """

    def __init__(
        self, credentials: Credentials, digest: Callable[[Bytes], str] | None = None
    ) -> None:
        self._credentials = credentials
        self._digest = digest
        self._lock = threading.Lock()
        self._idle: list[tuple[ShardClient, float]] = []  # the latest last

    @contextlib.contextmanager
    def client(self, uri: str) -> Iterator[ShardClient]:
        """Lend a client of an owner, and keep its connection if it can be used again.

        Raises:
            ConfigurationError: the owner uses TLS and the credentials have no certificate, or the
                other way round.
        """
        client = self._take(uri) or ShardClient(uri, self._credentials, self._digest)
        try:
            yield client
        finally:
            with self._lock:
                if client.reusable:
                    self._idle.append((client, time.monotonic()))
                else:
                    client.close()

    def close(self) -> None:
        """Close the connections that no fetch uses."""
        with self._lock:
            for client, _ in self._idle:
                client.close()
            self._idle.clear()

    def _take(self, uri: str) -> ShardClient | None:
        """Return the idle client of an owner that was used last; close those that are too old."""
        oldest = time.monotonic() - _IDLE_SECONDS
        with self._lock:
            kept = []
            for client, since in self._idle:
                if since < oldest or client.hung_up:
                    client.close()
                else:
                    kept.append((client, since))
            self._idle = kept
            for index in reversed(range(len(kept))):
                if kept[index][0].uri == uri:
                    return kept.pop(index)[0]
        return None
