"""The agent's end of control dials the driver once and stays connected."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.wire.connection import Message
from cerebro_hydra.wire.control_connection import ControlConnection
from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.heartbeat import GOODBYE_SECONDS, HEARTBEAT_SECONDS, SILENCE_SECONDS
from cerebro_hydra.wire.messages import RUN_OVER, ControlFailed, RunOver

_log = logging.getLogger(__name__)


class ControlClient:
    """Connects one agent to the driver; it is open once the constructor returns.

    `hello` names the agent's `incarnation`. `on_message(message)` is called for each message, in
    order, and `on_closed(reason)` once after the last: the driver said goodbye, its process died
    (at once), or nothing came for `silence_seconds`. After the agent's own `close()` neither is
    called. Callbacks run one at a time on a thread of their own, possibly before the constructor
    has returned; they may take long, and may call `send` and `close`. `send` works from any thread
    and never waits. Another thread sends and receives.

    Raises:
        ConfigurationError: if `hello` names no incarnation, or only one side uses TLS.
        ControlFailed: if the driver can't be reached, shows another certificate, or refuses the
            secret or the hello; it is a RunOver if the driver needs no more agents.
    """

    def __init__(
        self,
        uri: str,
        credentials: Credentials,
        hello: Mapping[str, Any],
        on_message: Callable[[Message], None],
        on_closed: Callable[[str], None],
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        if not hello.get("incarnation"):
            raise ConfigurationError("hello has no 'incarnation'; give the uuid of this process")
        self._uri = uri
        self._on_message = on_message
        self._on_closed = on_closed
        self._heartbeat_seconds = heartbeat_seconds
        self._silence_seconds = silence_seconds
        self._closing = False
        self._inbox: SimpleQueue[Message | str] = SimpleQueue()
        self._accepted: Future[None] = Future()
        tls: dict[str, Any] = {}
        if (certificate := credentials.certificate_for(uri)) is not None:
            tls["ssl"] = certificate.client_context()
            tls["server_hostname"] = certificate.name
            tls["ssl_handshake_timeout"] = silence_seconds
            tls["ssl_shutdown_timeout"] = GOODBYE_SECONDS
        greeting = f"{credentials.secret}\n{json.dumps(dict(hello))}\n".encode()
        self._thread = threading.Thread(
            target=asyncio.run,
            args=(self._converse(greeting, tls),),
            name="wire-control",
            daemon=True,
        )
        self._thread.start()
        self._accepted.result()
        threading.Thread(target=self._deliver, name="wire-messages", daemon=True).start()
        atexit.register(self.close)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Queue a message and return at once; False if the connection has ended."""
        return self._connection.send(message)

    def flush(self, seconds: float) -> None:
        """Wait until what was sent has left this process, or for so many seconds."""
        written = threading.Event()
        with contextlib.suppress(RuntimeError):  # the connection and its loop have ended
            self._loop.call_soon_threadsafe(written.set)
            written.wait(seconds)

    def close(self) -> None:
        """Deliver what was sent and end the connection; waits some seconds at most."""
        atexit.unregister(self.close)
        self._closing = True
        self._hang_up("the agent closed the connection")
        self._thread.join()

    def _hang_up(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the connection and its loop have ended
            self._loop.call_soon_threadsafe(self._connection.hang_up, reason)

    async def _converse(self, greeting: bytes, tls: Mapping[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        driver = urlsplit(self._uri)
        try:
            address = driver.hostname, driver.port
            dialled = socket.create_connection(address, self._silence_seconds)
            _, self._connection = await self._loop.create_connection(
                self._made, sock=dialled, **tls
            )
        except Exception as error:
            why = getattr(error, "strerror", None) or str(error)
            if isinstance(error, ssl.SSLError):
                why += "; the driver has another certificate than this run's, or no TLS"
            self._accepted.set_exception(self._failed(why))
        else:
            self._connection.write(greeting)
            await self._connection.gone

    def _made(self) -> ControlConnection:
        connection = ControlConnection(self._silence_seconds)
        connection.on_line = self._take_answer
        connection.on_message = self._inbox.put
        connection.on_end = self._end
        return connection

    def _take_answer(self, line: bytes) -> None:
        answer = json.loads(line)
        if "welcome" in answer:
            self._connection.open(self._heartbeat_seconds, self._silence_seconds)
            self._accepted.set_result(None)
        else:
            refusal = f"the driver at {self._uri} refused: {answer['bye']}"
            over = answer["bye"] == RUN_OVER
            self._accepted.set_exception(RunOver() if over else ControlFailed(refusal))
            self._connection.hang_up(refusal)

    def _end(self, reason: str) -> None:
        if not self._accepted.done():
            self._accepted.set_exception(
                self._failed(f"{reason}; if the driver uses TLS, this agent must too")
            )
        self._inbox.put(reason)

    def _deliver(self) -> None:
        while isinstance(item := self._inbox.get(), dict) and not self._closing:
            try:
                self._on_message(item)
            except Exception as error:
                _log.exception("a message of the driver can't be handled")
                item = f"a message can't be handled: {type(error).__name__}: {error}"
                self._hang_up(item)
                break
        if not self._closing:
            atexit.unregister(self.close)
            self._on_closed(str(item))

    def _failed(self, why: str) -> ControlFailed:
        return ControlFailed(f"no control connection to {self._uri}: {why}")
