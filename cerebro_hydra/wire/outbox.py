"""One direction of a control connection: queued messages, heartbeats, and silence."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa


def encode(value: Any) -> bytes:
    """Return `value` as compact JSON; raises TypeError for what JSON can't say."""
    return json.dumps(value, separators=(",", ":")).encode()


class Outbox:
    """A queue with its writing thread, so that a sender never waits for the network.

    A frame on the wire is a JSON list of all messages that were waiting (an empty list is a
    heartbeat), or a JSON object that ends the conversation.
    """

    def __init__(
        self, write: Callable[[bytes], None], finish: Callable[[], None], interval: float
    ) -> None:
        self._write = write
        self._finish = finish
        self._interval = interval
        self._waiting: list[bytes] = []
        self._last: bytes | None = None
        self._ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="wire-outbox", daemon=True)

    def start(self) -> None:
        """Begin to write; what was put before is sent first."""
        self._thread.start()

    def put(self, message: Mapping[str, Any]) -> bool:
        """Queue a message in its present state; False if the connection has ended."""
        encoded = encode(message)
        with self._changed:
            if self._ending:
                return False
            self._waiting.append(encoded)
            self._changed.notify()
        return True

    def end(self, last: Mapping[str, Any] | None = None) -> None:
        """Write what is queued, then `last`, then stop. A second call changes nothing."""
        with self._changed:
            if self._ending:
                return
            self._ending = True
            self._last = None if last is None else encode(last)
            self._changed.notify()

    def abandon(self) -> None:
        """Stop without writing what is queued: the connection is gone."""
        with self._changed:
            self._ending = True
            self._waiting.clear()
            self._last = None
            self._changed.notify()

    def join(self) -> None:
        """Wait for the writing thread to end, if it was started."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._write_next():
                pass
            self._finish()
        except (pa.ArrowException, OSError):
            self.abandon()  # the reading side learns the reason from its own stream

    def _write_next(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending, self._interval)
            messages, self._waiting = self._waiting, []
            ending, last = self._ending, self._last
        if messages or not ending:
            self._write(b"[" + b",".join(messages) + b"]")
        if ending and last is not None:
            self._write(last)
        return not ending


class Silence:
    """Notices that nothing was heard for `limit` seconds.

    A tick counts at most two intervals, so that a pause of this process (a thread that held
    the interpreter) isn't taken for silence of the peer.
    """

    def __init__(self, limit: float, interval: float) -> None:
        self.limit = limit
        self._most = 2 * interval
        self._heard = False
        self._silent = 0.0
        self._last = time.monotonic()

    def heard(self) -> None:
        """Note that a frame arrived."""
        self._heard = True

    def tick(self) -> bool:
        """Return whether the limit is passed; called once per interval by one thread."""
        now = time.monotonic()
        self._silent = 0.0 if self._heard else self._silent + min(now - self._last, self._most)
        self._heard = False
        self._last = now
        return self._silent >= self.limit
