"""Writes the segments of states to the run folder, by digest, while training goes on."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

from cerebro_hydra.agent.memory.fetch import StateAltered
from cerebro_hydra.agent.memory.shard_store import ShardStore
from cerebro_hydra.errors import StoreError
from cerebro_hydra.plan.hop.checkpoints import wait_after
from cerebro_hydra.plan.messages.events import CheckpointFailed
from cerebro_hydra.storage.digest import digest as content_digest
from cerebro_hydra.storage.run_folder import RunFolder


def write_segments(
    folder: RunFolder, shard_store: ShardStore, trial: int, state: int
) -> dict[str, Any]:
    """Write the segments of a state that the folder lacks; return the document that names them.

    Raises:
        TransferError: some of the state is not on this agent.
        StateAltered: a file would not be what was published.
        StoreError: the store refuses a file; those that are there are whole.
    """
    entries = []
    for number in range(shard_store.num_shards(trial, state)):
        shard = shard_store.wait(trial, state, number, given_up=lambda: True)
        for name, (digest, buffer) in shard.segments.items():
            if folder.has_object(digest):
                continue
            if (found := content_digest(buffer)) != digest:
                raise StateAltered(
                    f"segment {name!r} of shard {number} was written to after it was published: it "
                    f"has digest {found}, announced was {digest}"
                )
            folder.write_object(digest, buffer.data)
        frozen, trainable = shard.digests
        entries.append({"frozen": frozen, "trainable": trainable, "cursor": dict(shard.cursor)})
    return {"trial": trial, "state": state, "shards": entries}


class _Write(NamedTuple):
    due: float
    failures: int
    trial: int
    state: int


class CheckpointWriter:
    """Writes states one after the other on a thread of its own.

    One that the store refuses is tried again later, as `plan/hop/checkpoints.py` says, and does not
    hold up the others. One that code of its trial has written to is not, because it stays so.

    Args:
        incarnation: names this agent.
        send: takes a message for the coordinator, which names what is written.
        report: is told of each state that can't be written.
    """

    def __init__(
        self,
        incarnation: str,
        folder: RunFolder,
        shard_store: ShardStore,
        send: Callable[[dict[str, Any]], object],
        report: Callable[[CheckpointFailed], object],
    ) -> None:
        self._incarnation = incarnation
        self._folder = folder
        self._shard_store = shard_store
        self._send = send
        self._report = report
        self._changed = threading.Condition()
        self._writes: list[_Write] = []  # a heap
        self._closed = False
        self._thread = threading.Thread(target=self._write_all, name="checkpoint", daemon=True)
        self._thread.start()

    def write(self, trial: int, state: int) -> None:
        """Write a state soon."""
        self._put(_Write(monotonic(), 0, trial, state))

    def close(self) -> None:
        """Finish the write under way, and forget all others."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _put(self, write: _Write) -> None:
        with self._changed:
            heapq.heappush(self._writes, write)
            self._changed.notify()

    def _next(self) -> _Write | None:
        """Wait for the next write that is due; None when all is over."""
        with self._changed:
            while not self._closed:
                wait = self._writes[0].due - monotonic() if self._writes else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._writes)
                self._changed.wait(wait)
            return None

    def _write_all(self) -> None:
        while (write := self._next()) is not None:
            state = (write.trial, write.state)
            try:
                written = write_segments(self._folder, self._shard_store, *state)
            except Exception as error:
                failures = write.failures + 1
                wait = wait_after(failures) if isinstance(error, StoreError) else None
                if wait is None:
                    altered = isinstance(error, StateAltered)
                    self._report(CheckpointFailed(*state, self._incarnation, str(error), altered))
                else:
                    self._put(write._replace(due=monotonic() + wait, failures=failures))
            else:
                self._send({"written": written})
