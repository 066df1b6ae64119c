"""What an agent holds: segments by digest, and of which of them each trial's states consist."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cerebro_hydra.errors import TransferFailed

Bytes = npt.NDArray[np.uint8]
Cursor = Mapping[str, Any]


@dataclass(frozen=True)
class Shard:
    """One shard of one state, immutable: name of a segment → (digest, bytes)."""

    segments: Mapping[str, tuple[str, Bytes]]
    cursor: Cursor

    @property
    def buffers(self) -> dict[str, Bytes]:
        return {name: buffer for name, (_, buffer) in self.segments.items()}

    @property
    def digests(self) -> tuple[str, str]:
        return self.segments["frozen"][0], self.segments["trainable"][0]


class Shelf:
    """States of trials, shard by shard, as they arrive or are published.

    Thread-safe. A state is announced by `expect` before its shards come, so that peers can wait
    for it; `withdraw` ends their waits. Equal segments are kept once, whatever trial they belong
    to; frozen ones stay for the run, so that they are never sent twice.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._states: dict[tuple[int, int], list[Shard | None]] = {}
        self._segments: dict[str, Bytes] = {}
        self._frozen: set[str] = set()

    def expect(self, trial: int, visit: int, shards: int) -> None:
        """Announce a state that will be published here, forgetting an older one of its name."""
        with self._changed:
            self._states[trial, visit] = [None] * shards
            self._changed.notify_all()

    def put(self, trial: int, visit: int, number: int, shard: Shard) -> None:
        """Publish one shard of an announced state; ignored if it was withdrawn meanwhile."""
        with self._changed:
            state = self._states.get((trial, visit))
            if state is None:
                return
            segments = {}
            for name, (digest, buffer) in shard.segments.items():
                segments[name] = (digest, self._segments.setdefault(digest, buffer))
                if name == "frozen":
                    self._frozen.add(digest)
            state[number] = Shard(segments, shard.cursor)
            self._changed.notify_all()

    def wait(
        self, trial: int, visit: int, number: int, given_up: Callable[[], bool] = lambda: False
    ) -> Shard:
        """One shard, as soon as it is there.

        Raises:
            TransferFailed: the state was withdrawn, or `given_up()` after a `wake`.
        """
        with self._changed:
            seen = False
            while True:
                state = self._states.get((trial, visit))
                if state is not None:
                    seen = True
                    if (shard := state[number]) is not None:
                        return shard
                elif seen:
                    raise TransferFailed(f"state {visit} of trial {trial} was withdrawn here")
                if given_up():
                    raise TransferFailed(f"waiting for state {visit} of trial {trial} was given up")
                self._changed.wait()

    def wake(self) -> None:
        """Let every `wait` look again whether it should give up."""
        with self._changed:
            self._changed.notify_all()

    def whole(self, trial: int, visit: int) -> bool:
        """Whether every shard of a state is here."""
        with self._changed:
            state = self._states.get((trial, visit))
            return state is not None and all(shard is not None for shard in state)

    def knows(self, trial: int, visit: int) -> bool:
        """Whether a state is here or on its way."""
        with self._changed:
            return (trial, visit) in self._states

    def segment(self, digest: str) -> Bytes | None:
        with self._changed:
            return self._segments.get(digest)

    def digests(self) -> Collection[str]:
        """Digests of all segments that need not be sent here."""
        with self._changed:
            return list(self._segments)

    def withdraw(self, trial: int, visit: int) -> None:
        """Forget a state; trainable segments that no other state names go with it."""
        with self._changed:
            state = self._states.pop((trial, visit), None)
            if state is None:
                return
            named = {
                digest
                for shards in self._states.values()
                for shard in shards
                if shard is not None
                for digest in shard.digests
            }
            for shard in state:
                for digest in shard.digests if shard is not None else ():
                    if digest not in named and digest not in self._frozen:
                        self._segments.pop(digest, None)
            self._changed.notify_all()
