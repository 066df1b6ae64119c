"""The driver's end of control: agents dial in and stay connected for their whole life."""

from __future__ import annotations

import atexit
import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from cerebro_hydra.wire.address import brief, listen, shut_down
from cerebro_hydra.wire.outbox import Outbox, Silence, encode

_GRACE = 5.0  # seconds that close() waits for agents to take what was sent and say goodbye

_log = logging.getLogger(__name__)

Message = dict[str, Any]


class ControlServer:
    """Speaks with every agent of a run.

    `on_hello(hello)` may refuse an agent by raising; its reply reaches the agent as `welcome`.
    Then `on_message(incarnation, message)` for each message, in order, and at the end exactly one
    `on_closed(incarnation, reason)`: the agent said goodbye, its connection broke (at once after
    kill -9), or nothing came for `silence` seconds. `close()` itself calls no `on_closed`.

    Callbacks for one agent never overlap; those for several agents may, on threads of the server.
    A callback may call `send`, but not `close`, and should return soon: while it runs, its agent
    isn't read. `send` works from any thread, and for an agent from its `on_hello` on.

    Raises:
        ConfigurationError: if `host` means all addresses.
        SetupError: if `host` can't be listened on.
    """

    def __init__(
        self,
        host: str,
        secret: str,
        on_hello: Callable[[Message], Mapping[str, Any] | None],
        on_message: Callable[[str, Message], None],
        on_closed: Callable[[str, str], None],
        *,
        interval: float = 0.5,
        silence: float = 10.0,
    ) -> None:
        self._on_hello = on_hello
        self._on_message = on_message
        self._on_closed = on_closed
        self._interval = interval
        self._silence = silence
        self._sessions: dict[str, _Session] = {}
        self._known: set[str] = set()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._flight, self.uri = listen(_ControlFlight, host, secret, self._converse)
        threading.Thread(target=self._watch, name="wire-watch", daemon=True).start()
        atexit.register(self.close)  # the interpreter can't end while a call is being served

    def send(self, incarnation: str, message: Mapping[str, Any]) -> bool:
        """Queue a message for an agent and return at once; False if it isn't connected."""
        with self._changed:
            session = self._sessions.get(incarnation)
        return session is not None and session.outbox.put(message)

    def close(self) -> None:
        """Deliver what was sent, say goodbye to every agent, and stop; a few seconds at most."""
        atexit.unregister(self.close)
        with self._changed:
            if self._closing.is_set():
                return
            self._closing.set()
            for session in self._sessions.values():
                session.outbox.end({"bye": "the driver closed the connection"})
            self._changed.wait_for(lambda: not self._sessions, _GRACE)
        shut_down(self._flight)

    def _converse(
        self, hello: Message, reader: fl.MetadataRecordBatchReader, write: Callable[[bytes], None]
    ) -> None:
        """Hold one agent's connection from hello to end, on a thread of the server."""
        session = _Session(
            str(hello.get("incarnation", "")),
            Outbox(write, lambda: None, self._interval),
            Silence(self._silence, self._interval),
            self._on_message,
            self._report_closed,
        )
        refusal = self._admit(session)
        if refusal is None:
            try:
                welcome = self._on_hello(hello)
            except Exception as error:
                refusal = str(error) or type(error).__name__
                self._forget(session)
                with self._changed:
                    self._known.discard(session.incarnation)
        if refusal is not None:
            write(encode({"refused": refusal}))
            return
        try:
            write(encode({"welcome": dict(welcome or {})}))
            session.outbox.start()
            session.read(reader)
        except (pa.ArrowException, OSError) as error:
            session.close(f"the connection broke: {brief(error)}")
        finally:
            session.outbox.join()
            self._forget(session)

    def _admit(self, session: _Session) -> str | None:
        """Register a session before its hello is answered, so that sends can queue; or refuse."""
        with self._changed:
            if self._closing.is_set():
                return "the driver is closing"
            if not session.incarnation:
                return "the hello names no incarnation"
            if session.incarnation in self._known:
                return f"incarnation {session.incarnation} was connected before; start a new one"
            self._known.add(session.incarnation)
            self._sessions[session.incarnation] = session
            return None

    def _forget(self, session: _Session) -> None:
        with self._changed:
            self._sessions.pop(session.incarnation, None)
            self._changed.notify_all()

    def _report_closed(self, incarnation: str, reason: str) -> None:
        if not self._closing.is_set():
            self._on_closed(incarnation, reason)

    def _watch(self) -> None:
        while not self._closing.wait(self._interval):
            with self._changed:
                sessions = list(self._sessions.values())
            for session in sessions:
                session.check_silence()


class _Session:
    """One agent's connection; its lock orders the callbacks and makes the last one the last."""

    def __init__(
        self,
        incarnation: str,
        outbox: Outbox,
        silence: Silence,
        on_message: Callable[[str, Message], None],
        on_closed: Callable[[str, str], None],
    ) -> None:
        self.incarnation = incarnation
        self.outbox = outbox
        self._silence = silence
        self._on_message = on_message
        self._on_closed = on_closed
        self._delivering = threading.Lock()
        self._closed = False
        self._listening = False

    def read(self, reader: fl.MetadataRecordBatchReader) -> None:
        """Deliver frames until the agent's stream ends or the session is closed."""
        self._listening = True
        reason = "the connection broke"
        for chunk in reader:
            with self._delivering:
                if self._closed:
                    return
                self._silence.heard()
                try:
                    frame = json.loads(chunk.app_metadata.to_pybytes())
                    if isinstance(frame, dict):
                        reason = str(frame["bye"])
                        self.outbox.end()
                    else:
                        for message in frame:
                            self._on_message(self.incarnation, message)
                except Exception as error:
                    _log.exception("a message of agent %s can't be handled", self.incarnation)
                    reason = f"its message can't be handled: {type(error).__name__}: {error}"
                    self.outbox.end({"bye": reason})
                    break
                finally:
                    self._silence.heard()
        self.close(reason)

    def close(self, reason: str) -> None:
        """End the session: nothing more is queued, and the one `on_closed` is called."""
        with self._delivering:
            self._close(reason)

    def check_silence(self) -> None:
        """Count an interval; close the session if its agent was silent for too long."""
        if not self._listening or not self._delivering.acquire(blocking=False):
            return  # a callback is running: the agent can't be heard now
        try:
            if not self._closed and self._silence.tick():
                reason = f"no heartbeat for {self._silence.limit:.1f} s"
                self.outbox.end({"bye": reason})
                self._close(reason)
        finally:
            self._delivering.release()

    def _close(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        self.outbox.end()
        try:
            self._on_closed(self.incarnation, reason)
        except Exception:
            _log.exception("on_closed failed for agent %s (%s)", self.incarnation, reason)


class _ControlFlight(fl.FlightServerBase):
    """The Flight service of a ControlServer: one DoExchange per agent, and nothing else."""

    def __init__(self, converse: Callable[..., None], **options: Any) -> None:
        self._converse = converse
        super().__init__(**options)

    def do_exchange(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.MetadataRecordBatchWriter,
    ) -> None:
        """Serve one agent; its hello is the descriptor's command."""
        hello = json.loads(descriptor.command)
        reader.read_chunk()  # an answer sent before the first frame was read can get lost
        self._converse(hello, reader, lambda frame: writer.write_metadata(pa.py_buffer(frame)))
