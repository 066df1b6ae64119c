"""The receiver's end of a hop fetches shards from their owner, over one connection."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from cerebro_hydra.errors import Cancelled, TransferError
from cerebro_hydra.wire.address import prepare
from cerebro_hydra.wire.connection import LONGEST_MESSAGE, encode
from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.messages import Bytes, FetchedShard, ShardRequest

_DIAL_SECONDS = 10.0
_LINE_BYTES = 64 << 10  # bytes of a line that are received at once

Held = Callable[[str], Bytes | None]
Allocate = Callable[[int], Bytes]


class ShardClient:
    """Fetches shards from one owner; it dials at the first request, and serves one at a time.

    `digest`, if given, returns the digest of received bytes, and each received segment is checked
    against the digest that its owner announced. While `reusable`, more can be fetched.

    Raises:
        ConfigurationError: the owner uses TLS and the credentials have no certificate, or the
            other way round.
    """

    def __init__(
        self, uri: str, credentials: Credentials, digest: Callable[[Bytes], str] | None = None
    ) -> None:
        self.uri = uri
        self._secret = credentials.secret
        self._certificate = credentials.certificate_for(uri)
        self._digest = digest
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cancelled = False
        self.reusable = False

    def fetch(
        self, request: ShardRequest, held: Held, allocate: Allocate
    ) -> Iterator[FetchedShard]:
        """Receive the shards of a request, each as soon as its owner has published it.

        `held(digest)` returns the segment of that digest if the receiver has it, which is then not
        sent. `allocate(nbytes)` is called for each other one, in the order of the segments; it
        returns the memory to fill, a writable uint8 array of shape [nbytes].

        Raises:
            TransferError: the owner refused (with its words), died, or sent other bytes than it
                announced. What `allocate` returned may be partly filled.
            Cancelled: `cancel()` was called, before or during the fetch.
        """
        self.reusable = False
        try:
            owner = self._socket or self._dial()
            owner.sendall(encode("fetch", vars(request)))
            for _ in request.shards:
                yield self._receive(owner, held, allocate)
            self.reusable = not self._cancelled
        except (OSError, TransferError) as error:
            self.close()
            if self._cancelled:
                raise Cancelled(f"the fetch of {request} from {self.uri} was cancelled") from None
            raise TransferError(f"{request} from {self.uri}: {_words(error)}") from error

    def cancel(self) -> None:
        """End the fetch with Cancelled, now or when it is asked for; called from any thread."""
        with self._lock:
            self._cancelled = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS must not wait

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()

    @property
    def hung_up(self) -> bool:
        """Whether the owner has closed the connection, which no fetch uses."""
        idle = select.poll()
        idle.register(self._socket or -1, select.POLLIN)
        return bool(idle.poll(0))

    def _dial(self) -> socket.socket:
        address = urlsplit(self.uri)
        found = socket.getaddrinfo(address.hostname, address.port, type=socket.SOCK_STREAM)[0]
        owner = self._hold(socket.socket(found[0], socket.SOCK_STREAM))
        owner.settimeout(_DIAL_SECONDS)
        owner.connect(found[4])
        prepare(owner)
        if self._certificate is not None:
            context = self._certificate.client_context()
            tls = context.wrap_socket(
                owner, server_hostname=self._certificate.name, do_handshake_on_connect=False
            )
            self._hold(tls)
            tls.do_handshake()
            owner = tls
        owner.settimeout(None)  # the owner answers when the shard is published
        owner.sendall(f"{self._secret}\n".encode())
        return owner

    def _hold(self, dialled: socket.socket) -> socket.socket:
        with self._lock:
            self._socket = dialled
            if self._cancelled:
                raise TransferError("cancelled")
        return dialled

    def _receive(self, owner: socket.socket, held: Held, allocate: Allocate) -> FetchedShard:
        number, announced, cursor = _offer(_read_line(owner))
        begun = time.perf_counter()
        have = {name: held(digest) for name, (digest, _) in announced.items()}
        missing = [name for name, buffer in have.items() if buffer is None]
        owner.sendall(encode("send", missing))
        segments = {}
        moved = saved = 0
        for name, (digest, nbytes) in announced.items():
            buffer = have[name]
            if buffer is None:
                buffer = allocate(nbytes)
                _fill(buffer, nbytes, owner)
                moved += nbytes
            else:
                saved += nbytes
            segments[name] = (digest, buffer)
        seconds = time.perf_counter() - begun
        for name in missing:
            self._check(name, *segments[name])
        return FetchedShard(number, segments, cursor, moved, saved, seconds)

    def _check(self, name: str, announced: str, buffer: Bytes) -> None:
        if self._digest is not None and (found := self._digest(buffer)) != announced:
            raise TransferError(
                f"segment {name!r} arrived with digest {found}, announced was {announced}"
            )


def _read_line(owner: socket.socket) -> bytes:
    """Return the owner's next line, after which it waits."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = owner.recv(_LINE_BYTES)
        if not piece:
            raise TransferError("the owner hung up; if it uses TLS, this agent must too")
        line += piece
        if len(line) > LONGEST_MESSAGE:
            raise TransferError(f"a line of more than {LONGEST_MESSAGE} bytes came")
    return bytes(line)


def _offer(line: bytes) -> tuple[int, dict[str, tuple[str, int]], dict[str, Any]]:
    """Return the number of an offered shard, the digest and size of its segments, its cursor."""
    try:
        match json.loads(line):
            case {"bye": str(reason)}:
                raise TransferError(reason)
            case {"shard": {"number": int(number), "segments": dict(segments), "cursor": cursor}}:
                sizes = {name: (str(digest), int(n)) for name, (digest, n) in segments.items()}
                return number, sizes, dict(cursor)
    except (TypeError, ValueError):
        pass
    raise TransferError(f"the owner's answer can't be read: {line[:200]!r}")


def _fill(buffer: Bytes, nbytes: int, owner: socket.socket) -> None:
    """Receive the next `nbytes` into `buffer`."""
    if buffer.dtype != np.uint8 or buffer.shape != (nbytes,):
        raise ValueError(
            f"allocate({nbytes}) returned {buffer.dtype} {buffer.shape}, not uint8 ({nbytes},)"
        )
    # One call fills all, without taking the interpreter's lock meanwhile; TLS gives records.
    flags = 0 if isinstance(owner, ssl.SSLSocket) else socket.MSG_WAITALL
    view, filled = buffer.data, 0
    while filled < nbytes:
        received = owner.recv_into(view[filled:], nbytes - filled, flags)
        if not received:
            raise TransferError(f"the bytes ended at {filled} of {nbytes}")
        filled += received


def _words(error: Exception) -> str:
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, ssl.SSLError):
        words += "; the owner has another certificate than this run's, or no TLS"
    return words
