"""Keeps one side of a control connection: messages, heartbeats, and exactly one end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from cerebro_hydra.wire.connection import LONGEST_MESSAGE, Connection, Message, encode
from cerebro_hydra.wire.heartbeat import GOODBYE_SECONDS

_LONGEST_HELLO = 1 << 20  # bytes of the first line of either end

_log = logging.getLogger(__name__)


class ControlConnection(Connection):
    """Talks to one peer on an event loop, whose thread alone calls everything but `send`.

    A line is `{kind: value}`; an empty one is a heartbeat. Until `open` is called, lines go to
    `on_line`, and after `greeting_seconds` the connection ends. From then on messages go to
    `on_message`. `on_end(reason)` is called once, when the peer says goodbye, its process dies, it
    is silent for too long, or `hang_up` is called.
    """

    def __init__(self, greeting_seconds: float) -> None:
        super().__init__(_LONGEST_HELLO)
        self.on_message: Callable[[Message], None] = _ignore
        self.on_end: Callable[[str], None] = _ignore
        self._greeting_seconds = greeting_seconds
        self._missed_beats = 0
        self._opened = self._ended = False

    def send(self, message: Mapping[str, Any]) -> bool:
        """Queue a message in its present state, from any thread; False if this has ended."""
        line = encode("message", message)
        if self._ended:
            return False
        try:
            self.loop.call_soon_threadsafe(self._say, line)
        except RuntimeError:  # the loop has ended
            return False
        return True

    def open(self, heartbeat_seconds: float, silence_seconds: float) -> None:
        """Begin the conversation, with a heartbeat each `heartbeat_seconds`."""
        self._timer.cancel()
        self._opened = True
        self._heartbeat_seconds, self._silence_seconds = heartbeat_seconds, silence_seconds
        self.limit = LONGEST_MESSAGE
        self.on_line = self._hear
        self._beat()

    def hang_up(self, reason: str) -> None:
        """Write a goodbye after all that was sent; an open peer has some seconds to hang up."""
        if not self._ended:
            self._end(reason)
            self.write(encode("bye", reason))
        if not self._opened:
            self.transport.close()

    # ------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the peer a few seconds to open the conversation."""
        super().connection_made(transport)
        seconds = self._greeting_seconds
        reason = f"no greeting came within {seconds:.1f} s"
        self._timer = self.loop.call_later(seconds, self.hang_up, reason)

    def data_received(self, data: bytes) -> None:
        """Count any byte as a sign of life."""
        self._missed_beats = 0
        super().data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        """End, if no goodbye did, and release whoever waits for the socket."""
        self._end(f"the connection broke: {error}" if error else "the connection broke")
        self._timer.cancel()
        super().connection_lost(error)

    # ------------------------------------------------------------------ the conversation

    def _say(self, line: bytes) -> None:
        if not self._ended:
            self.write(line)

    def _hear(self, line: bytes) -> None:
        if not line:
            return
        ((kind, value),) = json.loads(line).items()
        if kind == "bye":
            self._end(str(value))
            self.transport.close()
        elif not self._ended:
            self.on_message(value)

    def _beat(self) -> None:
        # Beats are counted, not seconds: a pause of this process is no silence of the peer.
        if self._missed_beats * self._heartbeat_seconds >= self._silence_seconds:
            self.hang_up(f"no heartbeat for {self._silence_seconds:.1f} s")
            self.transport.abort()  # the goodbye waits in the peer's socket; nobody waits here
        else:
            self._missed_beats += 1
            self._say(b"\n")
            self._timer = self.loop.call_later(self._heartbeat_seconds, self._beat)

    def _end(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._timer.cancel()
        grace = min(GOODBYE_SECONDS, self._silence_seconds) if self._opened else GOODBYE_SECONDS
        self._timer = self.loop.call_later(grace, self.transport.abort)
        try:
            self.on_end(reason)
        except Exception:
            _log.exception("on_end failed (%s)", reason)


def _ignore(_: Any) -> None:
    """Do nothing."""
