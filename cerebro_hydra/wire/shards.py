"""The two ends of a hop: the owner gives published shards, the receiver fetches them.

A receiver writes lines, and the owner answers each at once or when it can:

    receiver    <the secret>
    receiver    {"fetch": {"trial": 4, "state": 2, "incarnation": "…", "shards": [0, 1]}}
    owner       {"shard": {"number": 1, "segments": {"trainable": ["<digest>", <bytes>]}, …}}
    receiver    {"send": ["trainable"]}
    owner       the bytes of these segments, one after another
    owner       {"shard": {"number": 0, …}}

The owner offers each shard when it is published, whichever comes first. The receiver names the
segments that it does not hold, so no list of what it holds has to travel. After the last shard the
receiver may ask for other ones. Whatever goes wrong is said in a goodbye: {"bye": "…"}.

Messages of replicas are asked for likewise, by their attempt. They have no digests and nobody holds
them, so the owner sends each as soon as there is one, in the order in which they were asked for:
the number of its bytes in 16 digits, and the bytes.

A receiver whose bytes have another digest than was announced asks, on a connection of its own, what
digest the owner's have: on the way they may be damaged, or at the owner, by a late write.

    receiver    {"fetch": {…, "shards": [1], "verify": true}}
    owner       {"digests": {"1": {"frozen": "<digest>", "trainable": "<digest>"}}}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import numpy as np

from cerebro_hydra.errors import Cancelled, TransferError
from cerebro_hydra.wire.address import prepare
from cerebro_hydra.wire.connection import (
    GOODBYE_SECONDS,
    LONGEST_MESSAGE,
    Connection,
    Listener,
    encode,
)
from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.messages import Bytes, FetchedShard, Message, Publication, ShardRequest

_DIAL_SECONDS = 10.0
_LINE_BYTES = 64 << 10  # bytes of a line that are received at once
_HEAD_BYTES = 16  # digits before a message of a replica

Held = Callable[[str], Bytes | None]
Allocate = Callable[[int], Bytes]

_LONGEST_REQUEST = 1 << 20  # bytes; a request names one state and its shards
_CHUNK_BYTES = 512 << 10
_TLS_CHUNK_BYTES = 64 << 10  # encrypting copies a chunk several times, within the caches if small
_STALL_SECONDS = 60.0  # seconds in which a receiver must answer an offer, or take a chunk
_IDLE_SECONDS = 600.0  # seconds after which a connection without a request is closed

_KEPT_SECONDS = 60.0  # seconds that an idle connection is kept, by far less than its owner keeps it


class DigestDiffers(TransferError):
    """A segment has arrived with another digest than its owner had announced."""

    def __init__(self, message: str, shard: int, segment: str, announced: str) -> None:
        super().__init__(message)
        self.shard, self.segment, self.announced = shard, segment, announced


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
            said = f"{request} from {self.uri}: {_words(error)}"
            if isinstance(error, DigestDiffers):
                where = (error.shard, error.segment, error.announced)
                raise DigestDiffers(said, *where) from error
            raise TransferError(said) from error

    def receive(self, request: ShardRequest, memory: Sequence[Bytes]) -> Iterator[int]:
        """Fill memory with each message of a request, and yield its place as soon as it is there.

        Raises:
            TransferError: the owner refused (with its words), died, or has messages of other sizes.
            Cancelled: `cancel()` was called.
        """
        try:
            if self._socket is not None and self.hung_up:  # nothing was asked for so long
                self.close()
                self._socket = None
            owner = self._socket or self._dial()
            owner.sendall(encode("fetch", vars(request)))
            head = np.empty(_HEAD_BYTES, np.uint8)
            for place, buffer in enumerate(memory):
                _fill(head, _HEAD_BYTES, owner)
                if not (said := head.tobytes()).isdigit():
                    raise TransferError(_goodbye(said + _read_line(owner)))
                if int(said) != buffer.nbytes:
                    raise TransferError(f"{int(said)} bytes came instead of {buffer.nbytes}")
                _fill(buffer, buffer.nbytes, owner)
                yield place
        except (OSError, TransferError) as error:
            self.close()
            if self._cancelled:
                raise Cancelled(f"the wait for {request} from {self.uri} was cancelled") from None
            raise TransferError(f"{request} from {self.uri}: {_words(error)}") from error

    def verify(self, request: ShardRequest) -> dict[int, dict[str, str]]:
        """Return the digests of what the owner has: by shard, those of its segments by name.

        Raises:
            TransferError: the owner refused (with its words), or died.
            Cancelled: `cancel()` was called.
        """
        self.reusable = False
        try:
            owner = self._socket or self._dial()
            owner.sendall(encode("fetch", vars(replace(request, verify=True))))
            found = _digests(_read_line(owner))
            self.reusable = not self._cancelled
            return found
        except (OSError, TransferError) as error:
            self.close()
            if self._cancelled:
                raise Cancelled(f"the question for {request} was cancelled") from None
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
            self._check(number, name, *segments[name])
        return FetchedShard(number, segments, cursor, moved, saved, seconds)

    def _check(self, number: int, name: str, announced: str, buffer: Bytes) -> None:
        if self._digest is not None and (found := self._digest(buffer)) != announced:
            said = f"segment {name!r} arrived with digest {found}, announced was {announced}"
            raise DigestDiffers(said, number, name, announced)


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


def _goodbye(line: bytes) -> str:
    """Return what an owner says that goes, or what it says instead."""
    try:
        return str(json.loads(line)["bye"])
    except (TypeError, ValueError, KeyError):
        return f"the owner's answer can't be read: {line[:200]!r}"


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


def _digests(line: bytes) -> dict[int, dict[str, str]]:
    """Return the digests that an owner tells."""
    try:
        match json.loads(line):
            case {"bye": str(reason)}:
                raise TransferError(reason)
            case {"digests": dict(shards)}:
                return {int(number): dict(found) for number, found in shards.items()}
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


Look: TypeAlias = Callable[[int], Publication | Message | None]


class ShardServer:
    """Serves the shards that its owner has published, on one thread.

    `follow(request)` returns a function that looks for a shard of the state by its number, and
    returns None while that is not published. The owner calls `look_again` when that may have
    changed. What `follow` or the function raises reaches the receiver as the message of its
    TransferError. Both are called on the server's thread and must return at once; a publication's
    `segments` are read on another. The bytes are sent from the publication's own memory. With a
    certificate in `credentials` the server speaks TLS; `Listener` says what holds before the
    secret.

    A receiver that does not go on for a minute is hung up on, and an idle one after ten. `digest`,
    if given, answers those who ask what the owner's own bytes have become.

    Raises:
        ConfigurationError: if `host` means all addresses.
        SetupError: if `host` can't be listened on.
    """

    def __init__(
        self,
        host: str,
        credentials: Credentials,
        follow: Callable[[ShardRequest], Look],
        digest: Callable[[Any], str] | None = None,
    ) -> None:
        self._follow = follow
        self._digest = digest
        self._changed = asyncio.Event()
        self._closing = False
        self._listener = Listener(host, credentials, self._admit, self._leave, "wire-shards")
        self.uri = self._listener.uri

    def look_again(self) -> None:
        """Look again for what is waited for; any thread may call this."""
        self._listener.call(self._wake)

    def close(self) -> None:
        """End waiting requests with an error and stop; transfers under way have some seconds."""
        self._listener.close()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _leave(self) -> None:
        self._closing = True
        self._wake()
        connections = list(self._listener.connections)
        for connection in connections:
            if not connection.offering:
                connection.hang_up("the owner has closed")
        if connections:
            await asyncio.wait([each.gone for each in connections], timeout=GOODBYE_SECONDS)
        for connection in connections:
            connection.transport.abort()

    def _admit(self) -> _ShardConnection:
        return _ShardConnection(self._converse)

    async def _converse(self, connection: _ShardConnection) -> None:
        """Answer one request after another, until one can't be answered."""
        while True:
            request = ShardRequest.from_line(await connection.next_line(_IDLE_SECONDS))
            look, missing = self._follow(request), list(request.shards)
            if request.verify:
                there = {n: each for n in missing if (each := look(n)) is not None}
                published = {n: each for n, each in there.items() if not isinstance(each, Message)}
                found = await asyncio.to_thread(self._verified, published)
                connection.write(encode("digests", found))
                continue
            while missing:
                if self._closing:
                    raise TransferError("the owner has closed")
                changed = self._changed
                # Nothing tells which one a message is but its place.
                for number in missing if request.attempt is None else missing[:1]:
                    if (publication := look(number)) is not None:
                        missing.remove(number)
                        await connection.give(number, publication)
                        del publication  # its memory may go while the connection is idle
                        break
                else:
                    await changed.wait()

    def _verified(self, published: Mapping[int, Publication]) -> dict[int, dict[str, str]]:
        """Return the digests that the bytes of publications have now."""
        digest = self._digest
        if digest is None:
            raise TransferError("the owner computes no digests")
        return {
            number: {name: digest(buffer) for name, (_, buffer) in each.segments.items()}
            for number, each in published.items()
        }


class _ShardConnection(Connection):
    """Is one receiver's connection, which takes a line at a time, and bytes as its socket can."""

    def __init__(self, converse: Callable[[_ShardConnection], Awaitable[None]]) -> None:
        super().__init__(_LONGEST_REQUEST)
        self._lines: asyncio.Queue[bytes] = asyncio.Queue(1)
        self.on_line = self._take
        self.offering = False
        self._converse = converse
        self._writable = asyncio.Event()
        self._writable.set()

    def _take(self, line: bytes) -> None:
        if self._lines.full():
            self.hang_up("a line came before the last one was answered")
        else:
            self._lines.put_nowait(line)

    async def next_line(self, seconds: float) -> bytes:
        """Return what the receiver says next.

        Raises:
            TransferError: it says nothing for so many seconds.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._lines.get()
        except TimeoutError:
            raise TransferError(f"nothing was asked for {seconds:.0f} s") from None

    async def give(self, number: int, found: Publication | Message) -> None:
        """Send a message, or what the receiver wants of a shard."""
        self.offering = True
        if isinstance(found, Message):
            self.write(b"%0*d" % (_HEAD_BYTES, found.memory.nbytes))
            await self._send(_view(found.memory))
            found.sent()
        else:
            await self._offer(number, found)
        self.offering = False

    async def _offer(self, number: int, publication: Publication) -> None:
        """Offer a shard, and send the segments that the receiver asks for."""
        found = await asyncio.to_thread(lambda: publication.segments)  # may come from disk
        buffers = {name: _view(buffer) for name, (_, buffer) in found.items()}
        segments = {name: (digest, buffers[name].nbytes) for name, (digest, _) in found.items()}
        shard = {"number": number, "segments": segments, "cursor": dict(publication.cursor)}
        self.write(encode("shard", shard))
        match json.loads(answer := await self.next_line(_STALL_SECONDS)):
            case {"send": [*names]} if all(name in list(buffers) for name in names):
                for name in names:
                    await self._send(buffers[name])
            case _:
                raise TransferError(f"{answer[:200]!r} names no segments of {list(buffers)}")

    async def _send(self, buffer: memoryview) -> None:
        size = _TLS_CHUNK_BYTES if self._is_encrypted else _CHUNK_BYTES
        for start in range(0, len(buffer), size):
            self.transport.write(buffer[start : start + size])
            try:
                async with asyncio.timeout(_STALL_SECONDS):
                    await self._writable.wait()
            except TimeoutError:
                self.transport.abort()  # a goodbye would be taken for bytes
                raise

    async def _run(self) -> None:
        try:
            await self._converse(self)
        except asyncio.CancelledError:
            pass  # the task would keep it, and so the frames and the bytes that were being sent
        except Exception as error:
            self.hang_up(_message(error))

    @property
    def _is_encrypted(self) -> bool:
        return self.transport.get_extra_info("sslcontext") is not None

    # ------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to answer; whatever a socket does not take at once is waited for."""
        super().connection_made(transport)
        # TLS has copied what it was given, and pauses at the limit; a socket may still refer to it.
        self.transport.set_write_buffer_limits(high=int(self._is_encrypted))
        self._task = self.loop.create_task(self._run())

    def pause_writing(self) -> None:
        """Wait until the socket has taken all that was written."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Go on writing."""
        self._writable.set()

    def eof_received(self) -> None:
        """Drop a receiver that has left, with all that it has not read."""
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """End what is done for a receiver that has left."""
        super().connection_lost(error)
        self._task.cancel()


def _view(buffer: Any) -> memoryview:
    """Return the bytes of any contiguous buffer."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty one can't be cast


def _message(error: Exception) -> str:
    """Return an exception's message; a KeyError's text would be quoted."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text or type(error).__name__


class ClientPool:
    """Lends clients of owners, each to one fetch at a time. Thread-safe.

    Args:
        credentials: those of the run.
        digest: returns the digest of received bytes, by which they are checked.
    """

    def __init__(
        self, credentials: Credentials, digest: Callable[[Bytes], str] | None = None
    ) -> None:
        self._credentials = credentials
        self._digest = digest
        self._lock = threading.Lock()
        self._idle: list[tuple[ShardClient, float]] = []  # the latest last

    @contextlib.contextmanager
    def client(self, uri: str) -> Iterator[ShardClient]:
        """Lend a client of an owner, and keep its connection if it can be used again.

        Raises:
            ConfigurationError: the owner uses TLS and the credentials have no certificate, or the
                other way round.
        """
        client = self._take(uri) or ShardClient(uri, self._credentials, self._digest)
        try:
            yield client
        finally:
            with self._lock:
                if client.reusable:
                    self._idle.append((client, time.monotonic()))
                else:
                    client.close()

    def close(self) -> None:
        """Close the connections that no fetch uses."""
        with self._lock:
            for client, _ in self._idle:
                client.close()
            self._idle.clear()

    def _take(self, uri: str) -> ShardClient | None:
        """Return the idle client of an owner that was used last; close those that are too old."""
        oldest = time.monotonic() - _KEPT_SECONDS
        with self._lock:
            kept = []
            for client, since in self._idle:
                if since < oldest or client.hung_up:
                    client.close()
                else:
                    kept.append((client, since))
            self._idle = kept
            for index in reversed(range(len(kept))):
                if kept[index][0].uri == uri:
                    return kept.pop(index)[0]
        return None
