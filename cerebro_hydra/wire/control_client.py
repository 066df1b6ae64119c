"""An agent's end of control: dials the driver once and stays connected."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.wire.address import brief, connect
from cerebro_hydra.wire.messages import ControlFailed
from cerebro_hydra.wire.outbox import Outbox, Silence, encode

_GRACE = 5.0  # seconds that close() waits for the driver to take what was sent

_log = logging.getLogger(__name__)

Message = dict[str, Any]


class ControlClient:
    """One agent's connection to the driver; `welcome` is the driver's reply to `hello`.

    `hello` names the agent's `incarnation`. `on_message(message)` is called for each message, in
    order, and `on_closed(reason)` once after the last: the driver said goodbye, its process died
    (at once), or nothing came for `silence` seconds. After the agent's own `close()` it isn't
    called. Callbacks run one at a time on a thread of this object, possibly before the
    constructor has returned; while one runs, nothing else is received. They may call `send` and
    `close`. `send` works from any thread and never waits.

    Raises:
        ConfigurationError: if `hello` names no incarnation.
        ControlFailed: if the driver can't be reached, or refuses the secret or the hello.
    """

    def __init__(
        self,
        uri: str,
        secret: str,
        hello: Mapping[str, Any],
        on_message: Callable[[Message], None],
        on_closed: Callable[[str], None],
        *,
        interval: float = 0.5,
        silence: float = 10.0,
    ) -> None:
        if not hello.get("incarnation"):
            raise ConfigurationError("hello has no 'incarnation'; give the uuid of this process")
        self._uri = uri
        self._on_message = on_message
        self._on_closed = on_closed
        self._interval = interval
        self._silence = Silence(silence, interval)
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._busy = threading.Lock()
        self._silent = False
        self._client = connect(uri, secret)
        self.welcome: Message = self._dial(hello)
        self._outbox = Outbox(self._write, self._writer.done_writing, interval)
        self._outbox.start()
        self._reading = threading.Thread(target=self._read, name="wire-control", daemon=True)
        self._reading.start()
        threading.Thread(target=self._watch, name="wire-watch", daemon=True).start()
        atexit.register(self.close)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Queue a message and return at once; False if the connection has ended."""
        return self._outbox.put(message)

    def close(self) -> None:
        """Deliver what was sent and end the connection; waits some seconds at most."""
        atexit.unregister(self.close)
        self._closing.set()
        self._outbox.end({"bye": "the agent closed the connection"})
        if threading.current_thread() is self._reading:
            return  # called by a callback: the reading thread ends by itself
        if not self._ended.wait(_GRACE):
            self._reader.cancel()
            self._reading.join(_GRACE)

    def _dial(self, hello: Mapping[str, Any]) -> Message:
        limit = threading.Timer(self._silence.limit, lambda: self._reader.cancel())
        limit.daemon = True
        try:
            self._writer, self._reader = self._client.do_exchange(
                fl.FlightDescriptor.for_command(encode(hello))
            )
            limit.start()
            self._write(b"[]")  # the hello travels with the first frame
            answer = json.loads(self._reader.read_chunk().app_metadata.to_pybytes())
        except (pa.ArrowException, OSError, StopIteration) as error:
            self._hang_up()
            raise ControlFailed(f"no control connection to {self._uri}: {brief(error)}") from error
        finally:
            limit.cancel()
        if "welcome" not in answer:
            self._hang_up()
            raise ControlFailed(f"the driver at {self._uri} refused: {answer.get('refused')}")
        welcome: Message = answer["welcome"]
        return welcome

    def _write(self, frame: bytes) -> None:
        self._writer.write_metadata(pa.py_buffer(frame))

    def _read(self) -> None:
        reason = f"the connection to the driver at {self._uri} broke"
        try:
            for chunk in self._reader:
                with self._busy:
                    frame = json.loads(chunk.app_metadata.to_pybytes())
                    if isinstance(frame, dict):
                        reason = str(frame["bye"])
                        self._outbox.end({"bye": "the driver said goodbye"})
                    else:
                        for message in frame:
                            self._on_message(message)
                    self._silence.heard()
        except (pa.ArrowException, OSError) as error:
            if self._silent:
                reason = f"no heartbeat from the driver for {self._silence.limit:.1f} s"
            else:
                reason = f"{reason}: {brief(error)}"
        except Exception as error:
            _log.exception("a message of the driver can't be handled")
            reason = f"a message can't be handled: {type(error).__name__}: {error}"
            self._reader.cancel()
        self._outbox.abandon()
        self._outbox.join()
        self._hang_up()
        self._ended.set()
        if not self._closing.is_set():
            atexit.unregister(self.close)
            self._on_closed(reason)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            if not self._busy.acquire(blocking=False):
                continue  # a callback is running: the driver can't be heard now
            try:
                self._silent = self._silence.tick()
            finally:
                self._busy.release()
            if self._silent:
                self._reader.cancel()
                return

    def _hang_up(self) -> None:
        with contextlib.suppress(pa.ArrowException, OSError, AttributeError):
            self._writer.close()
        self._client.close()
