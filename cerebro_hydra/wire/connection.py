"""Keeps one end of a socket on an event loop, which hears lines of bounded length."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
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
    """Talks to one peer in lines; the thread of its event loop alone calls it.

    Each line goes to `on_line`. A line of more than `limit` bytes, or one that `on_line` raises
    on, ends the connection. `gone` is done when the socket is closed.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.on_line: Callable[[bytes], None] = _ignore
        self.loop = asyncio.get_running_loop()
        self.gone = self.loop.create_future()
        self.received = bytearray()

    def write(self, line: bytes) -> None:
        """Write a line, unless this end has hung up."""
        if not self.transport.is_closing():
            self.transport.write(line)

    def hang_up(self, reason: str) -> None:
        """Say goodbye after all that was written; a peer that does not read has some seconds."""
        self.write(encode("bye", reason))
        self.transport.close()
        abort = self.loop.call_later(GOODBYE_SECONDS, self.transport.abort)
        self.gone.add_done_callback(lambda _: abort.cancel())

    # ------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the socket, which another protocol may have used before."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Hand over the lines that are complete; hang up where one grows beyond its limit."""
        searched = len(self.received)
        self.received += data
        while (end := self.received.find(b"\n", searched)) >= 0:
            line = bytes(self.received[:end])
            del self.received[: end + 1]
            searched = 0
            try:
                self.on_line(line)
            except Exception as error:
                _log.exception("a message can't be handled")
                self.hang_up(f"a message can't be handled: {type(error).__name__}: {error}")
            if self.transport.is_closing():
                return
        if len(self.received) > self.limit:
            self.hang_up(f"a line of more than {self.limit} bytes came")
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Release whoever waits for the socket."""
        self.gone.set_result(None)


def _ignore(_: Any) -> None:
    """Do nothing."""
