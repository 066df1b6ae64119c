"""Keeps one end of a socket on an event loop, which hears lines of bounded length.

A listener takes connections on one port, from whoever knows the secret of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar, cast

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.wire.address import bracketed, listening_socket, prepare
from cerebro_hydra.wire.credentials import Credentials

LONGEST_MESSAGE = 256 << 20
"""Bytes of JSON in one message. The largest are those with the states of custom metrics."""

Message = dict[str, Any]

_log = logging.getLogger(__name__)

GREETING_SECONDS = 5.0
"""Seconds in which a connection must be encrypted, if it is to be, and show the secret."""

_STRANGERS = 256  # connections at most that have not shown the secret yet
_CONNECTIONS = 4096  # connections at most in all
_RETRY_SECONDS = 1.0  # seconds to wait where no connection can be accepted

GOODBYE_SECONDS = 5.0
"""Seconds, at most, that a peer has to hang up after a goodbye."""


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


C = TypeVar("C", bound=Connection)


class Listener(Generic[C]):
    """Serves the connections of one port, on a thread of its own.

    A connection's first line must be the secret. `admit()` then makes the `Connection` that
    handles all that follows. Whoever shows another line, or none in `GREETING_SECONDS`, is hung up
    on, and nothing more is read of it. A connection that waits costs a socket and no thread; of
    those that have not shown the secret, there are 256 at most: the oldest makes room.

    `say_goodbye` is awaited by `close`, with no new connections meanwhile.

    Raises:
        ConfigurationError: if `host` means all addresses.
        SetupError: if `host` can't be listened on.
    """

    def __init__(
        self,
        host: str,
        credentials: Credentials,
        admit: Callable[[], C],
        say_goodbye: Callable[[], Awaitable[None]],
        name: str,
    ) -> None:
        self.connections: set[C] = set()
        self._secret = credentials.secret.encode()
        self._admit = admit
        self._say_goodbye = say_goodbye
        self._strangers: dict[asyncio.Task[None], None] = {}  # by age
        self._tls: dict[str, Any] = {}
        if credentials.certificate is not None:
            self._tls["ssl"] = credentials.certificate.server_context()
            self._tls["ssl_handshake_timeout"] = GREETING_SECONDS
            self._tls["ssl_shutdown_timeout"] = GOODBYE_SECONDS
        listening = listening_socket(host)
        port = listening.getsockname()[1]
        self.uri = f"{'tls' if self._tls else 'tcp'}://{bracketed(host)}:{port}"
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._listen(listening, started),), name=name, daemon=True
        )
        self._thread.start()
        self._loop = started.result()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function soon on the listener's thread, unless that has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Stop listening, say goodbye, and end the thread."""
        self.call(lambda: self._stop.set())
        self._thread.join()

    async def _listen(
        self, listening: socket.socket, started: Future[asyncio.AbstractEventLoop]
    ) -> None:
        self._stop = asyncio.Event()
        accepting = asyncio.create_task(self._accept(listening))
        started.set_result(asyncio.get_running_loop())
        await self._stop.wait()
        ending = [accepting, *self._strangers]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        listening.close()
        await self._say_goodbye()

    async def _accept(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # a flood of connections leaves time for those who are here
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:
                _log.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if len(self._strangers) + len(self.connections) >= _CONNECTIONS:
                accepted.close()
                continue
            if len(self._strangers) >= _STRANGERS:
                oldest = next(iter(self._strangers))
                oldest.cancel()
                del self._strangers[oldest]
            prepare(accepted)
            task = loop.create_task(self._greet(accepted))
            self._strangers[task] = None
            task.add_done_callback(lambda task: self._strangers.pop(task, None))

    async def _greet(self, accepted: socket.socket) -> None:
        """Wait until a connection has shown the secret, or has gone."""
        loop, transport = asyncio.get_running_loop(), None
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                transport, greeting = await loop.connect_accepted_socket(
                    lambda: _Greeting(self._secret, self._welcome), accepted, **self._tls
                )
                await greeting.decided
        except TimeoutError:
            if transport is not None:
                greeting.hang_up(f"no greeting came within {GREETING_SECONDS:.1f} s")
        except OSError:
            pass  # it has gone, or speaks no TLS
        except asyncio.CancelledError:
            if transport is not None:
                transport.abort()

    def _welcome(self) -> C:
        connection = self._admit()
        self.connections.add(connection)
        connection.gone.add_done_callback(lambda _: self.connections.discard(connection))
        return connection


class _Greeting(Connection):
    """Reads a connection's first line, which must be the secret."""

    def __init__(self, secret: bytes, welcome: Callable[[], Connection]) -> None:
        super().__init__(limit=len(secret))
        self.on_line = self._compare
        self.decided = self.loop.create_future()
        self._secret = secret
        self._welcome = welcome

    def connection_lost(self, error: Exception | None) -> None:
        """End the wait for the first line."""
        super().connection_lost(error)
        self._decide()

    def _compare(self, line: bytes) -> None:
        if not hmac.compare_digest(line, self._secret):
            self.hang_up("the secret of this run is missing or wrong")
            return
        more, self.received = bytes(self.received), bytearray()
        connection = self._welcome()
        self.transport.set_protocol(connection)
        connection.connection_made(self.transport)
        connection.data_received(more)
        self._decide()

    def _decide(self) -> None:
        if not self.decided.done():
            self.decided.set_result(None)
