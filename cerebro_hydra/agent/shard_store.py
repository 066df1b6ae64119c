"""Holds the states of trials: which segments make up each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cerebro_hydra.agent.segment_store import SegmentStore
from cerebro_hydra.errors import TransferError
from cerebro_hydra.shards.layout import Bytes

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


@dataclass(frozen=True)
class _Names:
    """One shard by name of a segment → digest; only the segment store refers to its bytes."""

    segments: Mapping[str, str]
    cursor: Cursor


@dataclass(eq=False)
class State:
    """One announced state, which only those who announced it can fill or retract.

    After a redo a visit is made again, and the new state has the old one's name: identity tells
    them apart.
    """

    trial: int
    visit: int
    shards: list[_Names | None]


class ShardStore:
    """States of trials, shard by shard, as they arrive or are published.

    Thread-safe. A state is announced by `expect` before its shards come, so that peers can wait
    for it; `withdraw` and `retract` end their waits. Equal segments are kept once, whatever trial
    they belong to; frozen ones stay for the run, so that they are never sent twice.

    Args:
        segments: holds the bytes.
    """

    def __init__(self, segments: SegmentStore) -> None:
        self.segments = segments
        self._changed = threading.Condition()
        self._states: dict[tuple[int, int], State] = {}
        self._frozen: set[str] = set()

    def expect(self, trial: int, visit: int, shards: int) -> State:
        """Announce a state that will be published here, forgetting an older one of its name."""
        with self._changed:
            self.withdraw(trial, visit)
            state = self._states[trial, visit] = State(trial, visit, [None] * shards)
            self._changed.notify_all()
            return state

    def put(self, state: State, number: int, shard: Shard) -> None:
        """Publish one shard of an announced state; ignored if that was withdrawn meanwhile."""
        with self._changed:
            if self._states.get((state.trial, state.visit)) is not state:
                return
            for name, (digest, buffer) in shard.segments.items():
                self.segments.add(digest, buffer)
                if name == "frozen":
                    self._frozen.add(digest)
            names = {name: digest for name, (digest, _) in shard.segments.items()}
            state.shards[number] = _Names(names, shard.cursor)
            self._changed.notify_all()

    def wait(
        self, trial: int, visit: int, number: int, given_up: Callable[[], bool] = lambda: False
    ) -> Shard:
        """Return one shard, as soon as it is there.

        Raises:
            TransferError: the state was withdrawn, or `given_up()` after a `wake`.
        """
        with self._changed:
            seen: State | None = None
            while True:
                state = self._states.get((trial, visit))
                if seen is not None and state is not seen:
                    raise TransferError(f"state {visit} of trial {trial} was withdrawn here")
                if state is not None and (names := state.shards[number]) is not None:
                    break
                seen = state
                if given_up():
                    raise TransferError(f"waiting for state {visit} of trial {trial} was given up")
                self._changed.wait()
        segments = {name: (digest, self.segment(digest)) for name, digest in names.segments.items()}
        return Shard(segments, names.cursor)

    def segment(self, digest: str) -> Bytes:
        """Return the bytes of a segment that is here.

        Raises:
            TransferError: it was dropped meanwhile, or scratch disk lost it.
        """
        buffer = self.segments.get(digest)
        if buffer is None:
            raise TransferError(f"segment {digest} was dropped here")
        return buffer

    def wake(self) -> None:
        """Let every `wait` check again whether it should give up."""
        with self._changed:
            self._changed.notify_all()

    def whole(self, trial: int, visit: int) -> bool:
        """Return whether every shard of a state is here."""
        with self._changed:
            state = self._states.get((trial, visit))
            return state is not None and None not in state.shards

    def knows(self, trial: int, visit: int) -> bool:
        """Return whether a state is here or on its way."""
        with self._changed:
            return (trial, visit) in self._states

    def withdraw(self, trial: int, visit: int) -> None:
        """Forget a state, with the trainable segments that no other state names."""
        with self._changed:
            state = self._states.pop((trial, visit), None)
            if state is None:
                return
            named = {
                digest
                for other in self._states.values()
                for names in other.shards
                if names is not None
                for digest in names.segments.values()
            }
            for names in state.shards:
                for digest in names.segments.values() if names is not None else ():
                    if digest not in named and digest not in self._frozen:
                        self.segments.discard(digest)
            self._changed.notify_all()

    def retract(self, state: State) -> None:
        """Withdraw this state, but not another that took its name meanwhile."""
        with self._changed:
            if self._states.get((state.trial, state.visit)) is state:
                self.withdraw(state.trial, state.visit)
