"""The receiver's end of a hop fetches shards from their owner."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from cerebro_hydra.errors import Cancelled, TransferError
from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.messages import (
    Bytes,
    FetchedSegment,
    FetchedShard,
    ShardKey,
    ticket_to_bytes,
)
from cerebro_hydra.wire.secret import with_secret

_CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # peers are reached directly, whatever the environment says
    ("grpc.use_local_subchannel_pool", 1),  # a retry must not inherit a dead peer's back-off
]


class ShardClient:
    """Fetches shards from one owner; several threads may fetch at once.

    `digest`, if given, returns the digest of received bytes, and each received segment is checked
    against the digest that its owner announced.

    Raises:
        ConfigurationError: the owner uses TLS and the credentials have no certificate, or the
            other way round.
    """

    def __init__(
        self, uri: str, credentials: Credentials, digest: Callable[[Bytes], str] | None = None
    ) -> None:
        self._uri = uri
        self._digest = digest
        certificate = credentials.certificate_for(uri)
        tls = {}
        if certificate is not None:
            tls = {"tls_root_certs": certificate.pem, "override_hostname": certificate.name}
        # Nothing is dialled yet.
        self._client = fl.FlightClient(uri, generic_options=_CHANNEL_OPTIONS, **tls)
        self._options = with_secret(credentials.secret)
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._cancelled = False

    def fetch(
        self, key: ShardKey, have: Collection[str], allocate: Callable[[int], Bytes]
    ) -> FetchedShard:
        """Wait until the owner has published the shard, and receive what isn't in `have`.

        `have` lists digests of segments that the receiver holds. `allocate(nbytes)` is called in
        the order of the segments for each one that comes; it returns the memory to fill, a
        writable uint8 array of shape [nbytes].

        Raises:
            TransferError: the owner refused (with its words), died, or sent other bytes than it
                announced. What `allocate` returned may be partly filled.
            Cancelled: `cancel()` was called, before or during the fetch.
        """
        call = _Call()
        with self._lock:
            self._calls.add(call)
            call.cancelled = self._cancelled
        try:
            ticket = fl.Ticket(ticket_to_bytes(key, have))
            reader = call.open(lambda: self._client.do_get(ticket, self._options))
            return self._receive(reader, allocate)
        except (pa.ArrowException, OSError, TransferError) as error:
            if call.cancelled:
                raise Cancelled(f"the fetch of {key} from {self._uri} was cancelled") from None
            words = str(error) if isinstance(error, TransferError) else _brief(error)
            raise TransferError(f"{key} from {self._uri}: {words}") from error
        finally:
            call.cancel()  # a stream that was left early must not keep the owner sending
            with self._lock:
                self._calls.remove(call)

    def cancel(self) -> None:
        """End all fetches of this client, now and later, with Cancelled."""
        with self._lock:
            self._cancelled = True
            for call in self._calls:
                call.cancel()

    def _receive(
        self, reader: fl.FlightStreamReader, allocate: Callable[[int], Bytes]
    ) -> FetchedShard:
        header = _header(reader)
        begun = time.perf_counter()
        segments: dict[str, FetchedSegment] = {}
        moved = saved = 0
        for entry in header["segments"]:
            nbytes = entry["nbytes"]
            buffer = None
            if entry["sent"]:
                buffer = allocate(nbytes)
                _fill(buffer, nbytes, reader)
                moved += nbytes
            else:
                saved += nbytes
            segments[entry["name"]] = FetchedSegment(entry["digest"], nbytes, buffer)
        if next(reader, None) is not None:
            raise TransferError("the owner sent more bytes than it announced")
        seconds = time.perf_counter() - begun
        for name, segment in segments.items():
            self._check(name, segment)
        return FetchedShard(segments, header["cursor"], moved, saved, seconds)

    def _check(self, name: str, segment: FetchedSegment) -> None:
        if self._digest is None or segment.buffer is None:
            return
        found = self._digest(segment.buffer)
        if found != segment.digest:
            raise TransferError(
                f"segment {name!r} arrived with digest {found}, announced was {segment.digest}"
            )


class _Call:
    """Holds one request, which another thread can cancel at any moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader: fl.FlightStreamReader | None = None
        self._opened: SimpleQueue[fl.FlightStreamReader | Exception] = SimpleQueue()
        self.cancelled = False

    def open(self, do_get: Callable[[], fl.FlightStreamReader]) -> fl.FlightStreamReader:
        """Start the request, on its own thread because `do_get` waits for an owner that hangs."""
        if self.cancelled:
            raise TransferError("cancelled")
        threading.Thread(target=self._open, args=(do_get,), name="wire-fetch", daemon=True).start()
        opened = self._opened.get()
        if isinstance(opened, Exception):
            raise opened
        return opened

    def cancel(self) -> None:
        """End the request at any stage."""
        with self._lock:
            self.cancelled = True
            reader = self._reader
        self._opened.put(TransferError("cancelled"))
        if reader is not None:
            reader.cancel()

    def _open(self, do_get: Callable[[], fl.FlightStreamReader]) -> None:
        try:
            reader = do_get()
        except Exception as error:
            self._opened.put(error)
            return
        with self._lock:
            self._reader = reader
            cancelled = self.cancelled
        if cancelled:
            reader.cancel()
        self._opened.put(reader)


def _brief(error: BaseException) -> str:
    """Return the first, readable part of a Flight error's text."""
    text = str(error).split(" gRPC client debug context")[0].split(". Detail:")[0]
    return text.split(", with message: ")[-1].strip() or type(error).__name__


def _header(reader: fl.FlightStreamReader) -> dict[str, Any]:
    try:
        chunk = reader.read_chunk()
    except StopIteration:
        raise TransferError("the owner sent no answer") from None
    header: dict[str, Any] = json.loads(chunk.app_metadata.to_pybytes())
    if "error" in header:
        raise TransferError(header["error"])
    return header


def _fill(buffer: Bytes, nbytes: int, reader: fl.FlightStreamReader) -> None:
    """Copy the next `nbytes` of the stream into `buffer`."""
    if buffer.dtype != np.uint8 or buffer.shape != (nbytes,):
        raise ValueError(
            f"allocate({nbytes}) returned {buffer.dtype} {buffer.shape}, not uint8 ({nbytes},)"
        )
    filled = 0
    while filled < nbytes:
        try:
            column = reader.read_chunk().data.column(0)
        except StopIteration:
            raise TransferError(f"the bytes ended at {filled} of {nbytes}") from None
        received = np.frombuffer(column.buffers()[1], np.uint8, count=len(column))
        buffer[filled : filled + len(received)] = received
        filled += len(received)
