"""Serves the driver's end of control: agents dial in and stay connected for their whole life."""

from __future__ import annotations

import asyncio
import atexit
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cerebro_hydra.wire import listener
from cerebro_hydra.wire.connection import Message, encode
from cerebro_hydra.wire.control_connection import ControlConnection
from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.heartbeat import HEARTBEAT_SECONDS, SILENCE_SECONDS
from cerebro_hydra.wire.listener import Listener

CLOSE_SECONDS = 1.0
"""Seconds that agents have to hang up when the driver closes; they were told to stop before."""


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
    message may have `LONGEST_MESSAGE` bytes; `Listener` says what holds before the secret.

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
        self._on_hello = on_hello
        self._on_message = on_message
        self._on_closed = on_closed
        self._heartbeat_seconds = heartbeat_seconds
        self._silence_seconds = silence_seconds
        self._agents: dict[str, ControlConnection] = {}
        self._known: set[str] = set()
        self._closing = False
        self._listener = Listener(host, credentials, self._admit, self._leave, "wire-control")
        self.uri = self._listener.uri
        atexit.register(self.close)

    def send(self, incarnation: str, message: Mapping[str, Any]) -> bool:
        """Queue a message for an agent and return at once; False if it isn't connected."""
        connection = self._agents.get(incarnation)
        return connection is not None and connection.send(message)

    def close(self) -> None:
        """Deliver what was sent, say goodbye to every agent, and stop, whoever does not answer."""
        atexit.unregister(self.close)
        self._closing = True
        self._listener.close()

    async def _leave(self) -> None:
        connections = list(self._listener.connections)
        for connection in connections:
            connection.hang_up("the driver closed the connection")
        if connections:
            await asyncio.wait([each.gone for each in connections], timeout=CLOSE_SECONDS)
        for connection in connections:
            connection.transport.abort()
        await asyncio.gather(*(connection.gone for connection in connections))

    def _admit(self) -> ControlConnection:
        connection = ControlConnection(listener.GREETING_SECONDS)
        connection.on_line = partial(self._greet, connection)
        return connection

    def _greet(self, connection: ControlConnection, line: bytes) -> None:
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
        incarnation = hello.get("incarnation") if isinstance(hello, dict) else None
        if not isinstance(incarnation, str) or not incarnation:
            raise ValueError("the hello names no incarnation; give the uuid of the process")
        if incarnation in self._agents or incarnation in self._known:
            raise ValueError(f"incarnation {incarnation} was connected before; start a new one")
        return incarnation

    def _end(self, incarnation: str, reason: str) -> None:
        del self._agents[incarnation]
        if incarnation in self._known and not self._closing:
            self._on_closed(incarnation, reason)
