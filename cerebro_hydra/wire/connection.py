"""Keeps one side of a control connection: lines of JSON, heartbeats, and exactly one end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.wire.heartbeat import GOODBYE_SECONDS

LONGEST_MESSAGE = 256 << 20
"""Bytes of JSON in one message. The largest are those with the states of custom metrics."""

Message = dict[str, Any]

_log = logging.getLogger(__name__)


def encode(kind: str, value: Any) -> bytes:
    """Return the line of one message.

    Raises:
        TypeError: JSON can't express the value.
        ConfigurationError: the line is longer than `LONGEST_MESSAGE`.
    """
    line = json.dumps({kind: value}, separators=(",", ":")).encode()
    if len(line) > LONGEST_MESSAGE:
        raise ConfigurationError(
            f"a {kind} of {len(line) >> 20} MiB is too long for one message, which may have "
            f"{LONGEST_MESSAGE >> 20} MiB; use smaller metric states"
        )
    return line + b"\n"


class Connection(asyncio.Protocol):
    """Talks to one peer on an event loop, whose thread alone calls everything but `send`.

    A line is `{kind: value}`; an empty one is a heartbeat. Until `open` is called, lines go to
    `on_line`, none may be longer than `limit`, and after `greeting_seconds` the connection ends.
    From then on messages go to `on_message`. `on_end(reason)` is called once, when the peer says
    goodbye, its process dies, it is silent for too long, or `hang_up` is called.

    `connections` holds this object for as long as its socket is open.
    """

    def __init__(self, connections: set[Connection], limit: int, greeting_seconds: float) -> None:
        self.limit = limit
        self.on_line: Callable[[bytes], None] = self._hear
        self.on_message: Callable[[Message], None] = _ignore
        self.on_end: Callable[[str], None] = _ignore
        self._loop = asyncio.get_running_loop()
        self.gone = self._loop.create_future()
        self._connections = connections
        self._greeting_seconds = greeting_seconds
        self._received = bytearray()
        self._missed_beats = 0
        self._opened = self._ended = False

    def send(self, message: Mapping[str, Any]) -> bool:
        """Queue a message in its present state, from any thread; False if this has ended."""
        line = encode("message", message)
        if self._ended:
            return False
        try:
            self._loop.call_soon_threadsafe(self.write, line)
        except RuntimeError:  # the loop has ended
            return False
        return True

    def write(self, line: bytes) -> None:
        """Write a line, unless this has ended."""
        if not self._ended and not self._transport.is_closing():
            self._transport.write(line)

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
            self._transport.write(encode("bye", reason))
        if not self._opened:
            self._transport.close()

    # ------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the peer a few seconds to open the conversation."""
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        seconds = self._greeting_seconds
        reason = f"no greeting came within {seconds:.1f} s"
        self._timer = self._loop.call_later(seconds, self.hang_up, reason)

    def data_received(self, data: bytes) -> None:
        """Hand over the lines that are complete; hang up where one grows beyond its limit."""
        self._missed_beats = 0
        searched = len(self._received)
        self._received += data
        while (end := self._received.find(b"\n", searched)) >= 0:
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            searched = 0
            try:
                self.on_line(line)
            except Exception as error:
                _log.exception("a message can't be handled")
                self.hang_up(f"a message can't be handled: {type(error).__name__}: {error}")
            if self._transport.is_closing():
                return
        if len(self._received) > self.limit:
            self.hang_up(f"a line of more than {self.limit} bytes came")
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """End, if no goodbye did, and release whoever waits for the socket."""
        self._end(f"the connection broke: {error}" if error else "the connection broke")
        self._timer.cancel()
        self._connections.discard(self)
        self.gone.set_result(None)

    # ------------------------------------------------------------------ the conversation

    def _hear(self, line: bytes) -> None:
        if not line:
            return
        ((kind, value),) = json.loads(line).items()
        if kind == "bye":
            self._end(str(value))
            self._transport.close()
        elif not self._ended:
            self.on_message(value)

    def _beat(self) -> None:
        # Beats are counted, not seconds: a pause of this process is no silence of the peer.
        if self._missed_beats * self._heartbeat_seconds >= self._silence_seconds:
            self.hang_up(f"no heartbeat for {self._silence_seconds:.1f} s")
            self._transport.abort()  # the goodbye waits in the peer's socket; nobody waits here
        else:
            self._missed_beats += 1
            self.write(b"\n")
            self._timer = self._loop.call_later(self._heartbeat_seconds, self._beat)

    def _end(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._timer.cancel()
        grace = min(GOODBYE_SECONDS, self._silence_seconds) if self._opened else GOODBYE_SECONDS
        self._timer = self._loop.call_later(grace, self._transport.abort)
        try:
            self.on_end(reason)
        except Exception:
            _log.exception("on_end failed (%s)", reason)


def _ignore(_: Any) -> None:
    """Do nothing."""
