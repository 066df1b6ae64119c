"""The owner's end of a hop gives published shards to whoever shows the secret.

A receiver writes lines, and the owner answers each at once or when it can:

    receiver    <the secret>
    receiver    {"fetch": {"trial": 4, "visit": 2, "incarnation": "…", "shards": [0, 1]}}
    owner       {"shard": {"number": 1, "segments": {"trainable": ["<digest>", <bytes>]}, …}}
    receiver    {"send": ["trainable"]}
    owner       the bytes of these segments, one after another
    owner       {"shard": {"number": 0, …}}

The owner offers each shard when it is published, whichever comes first. The receiver names the
segments that it does not hold, so no list of what it holds has to travel. After the last shard the
receiver may ask for other ones. Whatever goes wrong is said in a goodbye: {"bye": "…"}.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from cerebro_hydra.errors import TransferError
from cerebro_hydra.wire.connection import Connection, encode
from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.heartbeat import GOODBYE_SECONDS
from cerebro_hydra.wire.listener import Listener
from cerebro_hydra.wire.messages import Publication, ShardRequest

_LONGEST_REQUEST = 1 << 20  # bytes; a request names one state and its shards
_CHUNK_BYTES = 512 << 10
_TLS_CHUNK_BYTES = 64 << 10  # encrypting copies a chunk several times, within the caches if small
_STALL_SECONDS = 60.0  # seconds in which a receiver must answer an offer, or take a chunk
_IDLE_SECONDS = 600.0  # seconds after which a connection without a request is closed

Look: TypeAlias = Callable[[int], Publication | None]


class ShardServer:
    """Serves the shards that its owner has published, on one thread.

    `follow(request)` returns a function that looks for a shard of the state by its number, and
    returns None while that is not published. The owner calls `look_again` when that may have
    changed. What `follow` or the function raises reaches the receiver as the message of its
    TransferError. Both are called on the server's thread and must return at once; a publication's
    `segments` are read on another. The bytes are sent from the publication's own memory. With a
    certificate in `credentials` the server speaks TLS; `Listener` says what holds before the
    secret.

    A receiver that does not go on for a minute is hung up on, and an idle one after ten.

    Raises:
        ConfigurationError: if `host` means all addresses.
        SetupError: if `host` can't be listened on.
    """

    def __init__(
        self, host: str, credentials: Credentials, follow: Callable[[ShardRequest], Look]
    ) -> None:
        self._follow = follow
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
            while missing:
                if self._closing:
                    raise TransferError("the owner has closed")
                changed = self._changed
                for number in missing:
                    if (publication := look(number)) is not None:
                        missing.remove(number)
                        await connection.offer(number, publication)
                        break
                else:
                    await changed.wait()


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

    async def offer(self, number: int, publication: Publication) -> None:
        """Offer a shard, and send the segments that the receiver asks for."""
        self.offering = True
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
        self.offering = False

    async def _send(self, buffer: memoryview) -> None:
        encrypted = self.transport.get_extra_info("sslcontext") is not None
        size = _TLS_CHUNK_BYTES if encrypted else _CHUNK_BYTES
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
            self.hang_up(_words(error))

    # ------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to answer; whatever a socket does not take at once is waited for."""
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=1)
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


def _words(error: Exception) -> str:
    """Return an exception's message; a KeyError's text would be quoted."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text or type(error).__name__
