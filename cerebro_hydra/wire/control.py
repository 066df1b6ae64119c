"""Control: an agent dials the driver once, and stays connected for its whole life.

Each end sends messages and heartbeats, and has exactly one end.
"""

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
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.wire import connection as listener
from cerebro_hydra.wire.connection import (
    GOODBYE_SECONDS,
    LONGEST_MESSAGE,
    Connection,
    Listener,
    Message,
    encode,
)
from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.messages import RUN_OVER, ControlFailed, RunOver

_log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
"""Seconds between two heartbeats, which each end sends."""

SILENCE_SECONDS = 10.0
"""Seconds without a byte from the other end after which it is given up: it hangs, or is cut off."""

_LONGEST_HELLO = 1 << 20  # bytes of the first line of either end

_GOODBYE = encode("bye", "").partition(b":")[0]

CLOSE_SECONDS = 1.0
"""Seconds that agents have to hang up when the driver closes; they were told to stop before."""


@dataclass(slots=True)
class Heartbeat:
    """Counts the beats of this end since the other one showed life.

    Beats are counted, not seconds: a pause of this process is no silence of the other end.

    Args:
        seconds: between two beats.
        silence: seconds after which the other end is given up.
    """

    seconds: float = HEARTBEAT_SECONDS
    silence: float = SILENCE_SECONDS
    _missed: int = field(default=0, init=False)

    def hear(self) -> None:
        """Note a sign of life; any byte is one."""
        self._missed = 0

    def beat(self) -> bool:
        """Count a beat; return False, and count none, if the other end was silent for too long."""
        if self._missed * self.seconds >= self.silence:
            return False
        self._missed += 1
        return True


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
        self._heartbeat_seconds, self._silence_seconds = heartbeat_seconds, silence_seconds
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

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket."""
        return int(self._connection.transport.get_extra_info("socket").fileno())

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


def tell_end(uri: str, credentials: Credentials, incarnation: str, reason: str) -> None:
    """Tell the driver how an agent's process ended, before its connection breaks.

    Who tells holds that connection's socket as well. Nothing is told to a driver that is gone.
    """
    hello = {"incarnation": incarnation, "ended": reason}
    with contextlib.suppress(ControlFailed):
        ControlClient(uri, credentials, hello, _ignore, _ignore).close()


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
        self._heartbeat = Heartbeat()
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
        self._heartbeat = Heartbeat(heartbeat_seconds, silence_seconds)
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
        self._heartbeat.hear()
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
        if self._heartbeat.beat():
            self._say(b"\n")
            self._timer = self.loop.call_later(self._heartbeat.seconds, self._beat)
        else:
            self.hang_up(f"no heartbeat for {self._heartbeat.silence:.1f} s")
            self.transport.abort()  # the goodbye waits in the peer's socket; nobody waits here

    def _end(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._timer.cancel()
        grace = min(GOODBYE_SECONDS, self._heartbeat.silence)
        self._timer = self.loop.call_later(grace, self.transport.abort)
        try:
            self.on_end(reason)
        except Exception:
            _log.exception("on_end failed (%s)", reason)


def _ignore(_: Any) -> None:
    """Do nothing."""


class ControlServer:
    """Speaks with every agent of a run, on one thread.

    An agent's first line is the secret, its second the hello. `on_hello(hello)` may refuse an agent
    by raising. Then `on_message(incarnation, message)` is called for each message, in order, and at
    the end exactly one `on_closed(incarnation, reason)`: the agent said goodbye, its connection
    broke (at once after kill -9), or nothing came for `silence_seconds`. The reason is what
    `tell_end` told, if that came first. `close()` itself calls no `on_closed`. Of an agent that
    gave up before it was heard, as while this process was stopped, nothing is said.

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
        if connection.received.startswith(_GOODBYE):
            connection.hang_up("the agent gave up before it was heard")
            return
        try:
            hello = json.loads(line)
            if isinstance(hello, dict) and "ended" in hello:
                self._bury(hello["incarnation"], str(hello["ended"]))
                connection.write(encode("welcome", None))
                connection.open(self._heartbeat_seconds, self._silence_seconds)
                return
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

    def _bury(self, incarnation: str, reason: str) -> None:
        if (connection := self._agents.get(incarnation)) is not None:
            connection.hang_up(reason)

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
