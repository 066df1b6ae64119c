"""Serves the driver's end of control: agents dial in and stay connected for their whole life."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hmac
import json
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from cerebro_hydra.wire.address import bracketed, listening_socket
from cerebro_hydra.wire.connection import LONGEST_MESSAGE, Connection, Message, encode
from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.heartbeat import GOODBYE_SECONDS, HEARTBEAT_SECONDS, SILENCE_SECONDS

_GREETING_SECONDS = 5.0  # seconds in which a connection must show the secret and say hello


class ControlServer:
    """Speaks with every agent of a run, on one thread.

    An agent's first line is the secret, its second the hello. `on_hello(hello)` may refuse an agent
    by raising. Then `on_message(incarnation, message)` is called for each message, in order, and at
    the end exactly one `on_closed(incarnation, reason)`: the agent said goodbye, its connection
    broke (at once after kill -9), or nothing came for `silence_seconds`. `close()` itself calls no
    `on_closed`.

    Callbacks run one at a time on the server's thread and must return at once: while one runs, no
    agent is heard. They put what they are told into a queue. They may call `send`, but not `close`.
    `send` works from any thread, never waits, and reaches an agent from its `on_hello` on. A
    message may have `LONGEST_MESSAGE` bytes. What comes before the secret may be no longer than
    the secret itself, and who doesn't show it in a few seconds is hung up on.

    Raises:
        ConfigurationError: if `host` means all addresses.
        SetupError: if `host` can't be listened on.
    """

    def __init__(
        self,
        host: str,
        credentials: Credentials,
        on_hello: Callable[[Message], object],
        on_message: Callable[[str, Message], None],
        on_closed: Callable[[str, str], None],
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._secret = credentials.secret.encode()
        self._on_hello = on_hello
        self._on_message = on_message
        self._on_closed = on_closed
        self._heartbeat_seconds = heartbeat_seconds
        self._silence_seconds = silence_seconds
        self._connections: set[Connection] = set()
        self._agents: dict[str, Connection] = {}
        self._known: set[str] = set()
        self._closing = False
        tls: dict[str, Any] = {}
        if credentials.certificate is not None:
            tls["ssl"] = credentials.certificate.server_context()
            tls["ssl_handshake_timeout"] = _GREETING_SECONDS
            tls["ssl_shutdown_timeout"] = GOODBYE_SECONDS
        listener = listening_socket(host)
        self.uri = f"{'tls' if tls else 'tcp'}://{bracketed(host)}:{listener.getsockname()[1]}"
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._serve(listener, tls),), name="wire-control", daemon=True
        )
        self._thread.start()
        self._loop.result()
        atexit.register(self.close)

    def send(self, incarnation: str, message: Mapping[str, Any]) -> bool:
        """Queue a message for an agent and return at once; False if it isn't connected."""
        connection = self._agents.get(incarnation)
        return connection is not None and connection.send(message)

    def close(self) -> None:
        """Deliver what was sent, say goodbye to every agent, and stop; a few seconds at most."""
        atexit.unregister(self.close)
        self._closing = True
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.result().call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self, listener: socket.socket, tls: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await loop.create_server(self._connection, sock=listener, **tls)
        self._loop.set_result(loop)
        await self._stop.wait()
        server.close()
        for connection in list(self._connections):
            connection.hang_up("the driver closed the connection")
        await asyncio.gather(*(connection.gone for connection in self._connections))

    def _connection(self) -> Connection:
        connection = Connection(self._connections, len(self._secret), _GREETING_SECONDS)
        connection.on_line = partial(self._prove, connection)
        return connection

    def _prove(self, connection: Connection, line: bytes) -> None:
        if hmac.compare_digest(line, self._secret):
            connection.limit = LONGEST_MESSAGE
            connection.on_line = partial(self._greet, connection)
        else:
            connection.hang_up("the secret of this run is missing or wrong")

    def _greet(self, connection: Connection, line: bytes) -> None:
        try:
            hello = json.loads(line)
            incarnation = self._admitted(hello)
            self._agents[incarnation] = connection
            connection.on_end = partial(self._end, incarnation)
            self._on_hello(hello)
        except Exception as error:
            connection.hang_up(str(error) or type(error).__name__)
            return
        self._known.add(incarnation)  # from here on its end is reported
        connection.on_message = partial(self._on_message, incarnation)
        connection.write(encode("welcome", None))
        connection.open(self._heartbeat_seconds, self._silence_seconds)

    def _admitted(self, hello: Any) -> str:
        if not isinstance(hello, dict) or not hello.get("incarnation"):
            raise ValueError("the hello names no incarnation")
        incarnation = str(hello["incarnation"])
        if incarnation in self._agents or incarnation in self._known:
            raise ValueError(f"incarnation {incarnation} was connected before; start a new one")
        return incarnation

    def _end(self, incarnation: str, reason: str) -> None:
        del self._agents[incarnation]
        if incarnation in self._known and not self._closing:
            self._on_closed(incarnation, reason)
