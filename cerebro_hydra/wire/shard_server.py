"""The owner's end of a hop gives published shards to whoever shows the secret."""

from __future__ import annotations

import atexit
import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.flight as fl

from cerebro_hydra.errors import TransferError
from cerebro_hydra.wire.address import bracketed, cant_listen
from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.messages import Publication, ShardKey, ticket_from_bytes
from cerebro_hydra.wire.secret import SecretRequired

BATCH_BYTES = 2 << 20
SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])

_CLOSE_SECONDS = 5.0  # seconds that close() gives to transfers under way
_SHUTDOWN_SECONDS = 0.5  # seconds that receivers have to let go of idle connections
_LOOK_SECONDS = 1.0  # seconds after which a waiting call looks whether its caller still exists

_Batch: TypeAlias = tuple[pa.RecordBatch, bytes] | pa.RecordBatch


class ShardServer:
    """Serves the shards that `lookup(key)` returns, which may wait until a shard is published.

    Each request calls `lookup` on a thread of its own. What it raises reaches the receiver as the
    message of its TransferError. If the receiver cancels or dies, or the server closes, its result
    is dropped; the owner should end its own waits when it drops a state. The bytes are sent from
    the publication's own memory, without a copy. With a certificate in `credentials` the server
    speaks TLS.

    Raises:
        ConfigurationError: if `host` means all addresses.
        SetupError: if `host` can't be listened on.
    """

    def __init__(
        self, host: str, credentials: Credentials, lookup: Callable[[ShardKey], Publication]
    ) -> None:
        self._lookup = lookup
        self._changed = threading.Condition()
        self._serving = 0
        self._waiting: set[SimpleQueue[Publication | Exception]] = set()
        self._closed = False
        name, certificate = bracketed(host), credentials.certificate
        scheme = "grpc" if certificate is None else "grpc+tls"
        try:
            self._flight = _ShardFlight(
                self._serve,
                location=f"{scheme}://{name}:0",
                middleware={"secret": SecretRequired(credentials.secret)},
                tls_certificates=[(certificate.pem, certificate.key)] if certificate else None,
            )
        except (pa.ArrowException, OSError) as error:
            raise cant_listen(host, str(error)) from error
        self.uri = f"{scheme}://{name}:{self._flight.port}"
        atexit.register(self.close)  # the interpreter can't end while a call is being served

    def close(self) -> None:
        """End waiting requests with an error and stop; transfers under way have some seconds."""
        atexit.unregister(self.close)
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for answer in self._waiting:
                answer.put(TransferError("the owner has closed"))
            self._changed.wait_for(lambda: not self._serving, _CLOSE_SECONDS)
        _shut_down(self._flight)

    def _serve(self, context: fl.ServerCallContext, ticket: bytes) -> Iterator[_Batch]:
        with self._changed:
            self._serving += 1
        try:
            yield from self._reply(context, ticket)
        finally:
            with self._changed:
                self._serving -= 1
                self._changed.notify_all()

    def _reply(self, context: fl.ServerCallContext, ticket: bytes) -> Iterator[_Batch]:
        """Yield the header when the shard is published, then the bytes that are asked for."""
        try:
            key, have = ticket_from_bytes(ticket)
            publication = self._wait(key, context)
            if publication is None:
                return
            buffers = {
                name: (digest, pa.py_buffer(buffer))
                for name, (digest, buffer) in publication.segments.items()
            }
            header = {
                "segments": [
                    {
                        "name": name,
                        "digest": digest,
                        "nbytes": buffer.size,
                        "sent": digest not in have,
                    }
                    for name, (digest, buffer) in buffers.items()
                ],
                "cursor": dict(publication.cursor),
            }
            encoded = json.dumps(header).encode()
        except Exception as error:
            # In band, so that the receiver gets the owner's words and not a debug trace.
            yield _batch(pa.py_buffer(b"")), json.dumps({"error": _words(error)}).encode()
            return
        yield _batch(pa.py_buffer(b"")), encoded
        for digest, buffer in buffers.values():
            if digest not in have:
                for start in range(0, buffer.size, BATCH_BYTES):
                    yield _batch(buffer.slice(start, min(BATCH_BYTES, buffer.size - start)))

    def _wait(self, key: ShardKey, context: fl.ServerCallContext) -> Publication | None:
        """Return what `lookup` finds; None if the caller has gone meanwhile."""
        answer: SimpleQueue[Publication | Exception] = SimpleQueue()

        def look_up() -> None:
            try:
                answer.put(self._lookup(key))
            except Exception as error:
                answer.put(error)

        with self._changed:
            if self._closed:
                raise TransferError("the owner has closed")
            self._waiting.add(answer)
        try:
            threading.Thread(target=look_up, name=f"lookup {key}", daemon=True).start()
            while not context.is_cancelled():
                try:
                    found = answer.get(timeout=_LOOK_SECONDS)
                except Empty:
                    continue  # only frees this thread when its caller has gone
                if isinstance(found, Exception):
                    raise found
                return found
            return None
        finally:
            with self._changed:
                self._waiting.discard(answer)


def _shut_down(server: fl.FlightServerBase) -> None:
    """Stop a server, and leave its thread behind if a hung receiver keeps it from stopping.

    Flight's shutdown waits until every receiver has let go of its connection, and at exit its own
    finalizer would wait in the same way.
    """
    for held in gc.get_referents(server):
        if isinstance(held, weakref.finalize):
            held.atexit = False
    stopping = threading.Thread(target=server.shutdown, name="wire-shutdown", daemon=True)
    stopping.start()
    stopping.join(_SHUTDOWN_SECONDS)


def _batch(buffer: pa.Buffer) -> pa.RecordBatch:
    array = pa.Array.from_buffers(pa.uint8(), buffer.size, [None, buffer])
    return pa.RecordBatch.from_arrays([array], schema=SCHEMA)


def _words(error: Exception) -> str:
    """Return an exception's message; a KeyError's text would be quoted."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text or type(error).__name__


class _ShardFlight(fl.FlightServerBase):
    """Answers DoGet for a ShardServer, and no other call of Flight."""

    def __init__(self, serve: Callable[..., Iterator[_Batch]], **options: Any) -> None:
        self._serve = serve
        super().__init__(**options)

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.FlightDataStream:
        """Answer a ticket; the schema goes out at once, so that the caller can cancel its wait."""
        return fl.GeneratorStream(SCHEMA, self._serve(context, ticket.ticket))
