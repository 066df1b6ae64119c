"""Holds segments by digest, and which of them make up each state of each trial."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cerebro_hydra.errors import TransferError

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


@dataclass(eq=False)
class State:
    """One announced state, which only those who announced it can fill or retract.

    After a redo a visit is made again, and the new state has the old one's name: identity tells
    them apart.
    """

    trial: int
    visit: int
    shards: list[Shard | None]


class ShardStore:
    """States of trials, shard by shard, as they arrive or are published.

    Thread-safe. A state is announced by `expect` before its shards come, so that peers can wait
    for it; `withdraw` and `retract` end their waits. Equal segments are kept once, whatever trial
    they belong to; frozen ones stay for the run, so that they are never sent twice. `on_change` is
    called after each change, and must return at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._states: dict[tuple[int, int], State] = {}
        self._segments: dict[str, Bytes] = {}
        self._frozen: set[str] = set()
        self.on_change: Callable[[], None] = lambda: None

    def expect(self, trial: int, visit: int, shards: int) -> State:
        """Announce a state that will be published here, forgetting an older one of its name."""
        with self._changed:
            self.withdraw(trial, visit)
            state = self._states[trial, visit] = State(trial, visit, [None] * shards)
            self.wake()
            return state

    def put(self, state: State, number: int, shard: Shard) -> None:
        """Publish one shard of an announced state; ignored if that was withdrawn meanwhile."""
        with self._changed:
            if self._states.get((state.trial, state.visit)) is not state:
                return
            segments = {}
            for name, (digest, buffer) in shard.segments.items():
                segments[name] = (digest, self._segments.setdefault(digest, buffer))
                if name == "frozen":
                    self._frozen.add(digest)
            state.shards[number] = Shard(segments, shard.cursor)
            self.wake()

    def follow(self, trial: int, visit: int) -> Callable[[int], Shard | None]:
        """Return what looks for a shard of a state, announced or not: None while it isn't there.

        What is returned raises TransferError if the state that it saw first was withdrawn.
        """
        seen: State | None = None

        def look(number: int) -> Shard | None:
            nonlocal seen
            with self._changed:
                state = self._states.get((trial, visit))
                if seen is not None and state is not seen:
                    raise TransferError(f"state {visit} of trial {trial} was withdrawn here")
                seen = state
                if state is None:
                    return None
                if number >= len(state.shards):
                    raise TransferError(
                        f"state {visit} of trial {trial} has no shard {number}, only "
                        f"{len(state.shards)} of them"
                    )
                return state.shards[number]

        return look

    def wait(
        self, trial: int, visit: int, number: int, given_up: Callable[[], bool] = lambda: False
    ) -> Shard:
        """Return one shard, as soon as it is there.

        Raises:
            TransferError: the state was withdrawn, or `given_up()` after a `wake`.
        """
        look = self.follow(trial, visit)
        with self._changed:
            while (shard := look(number)) is None:
                if given_up():
                    raise TransferError(f"waiting for state {visit} of trial {trial} was given up")
                self._changed.wait()
            return shard

    def wake(self) -> None:
        """Let all who wait look again."""
        with self._changed:
            self._changed.notify_all()
            self.on_change()

    def whole(self, trial: int, visit: int) -> bool:
        """Return whether every shard of a state is here."""
        with self._changed:
            state = self._states.get((trial, visit))
            return state is not None and None not in state.shards

    def knows(self, trial: int, visit: int) -> bool:
        """Return whether a state is here or on its way."""
        with self._changed:
            return (trial, visit) in self._states

    def segments(self) -> dict[str, Bytes]:
        """Return all segments that need not be sent here, by digest."""
        with self._changed:
            return dict(self._segments)

    def withdraw(self, trial: int, visit: int) -> None:
        """Forget a state, with the trainable segments that no other state names."""
        with self._changed:
            state = self._states.pop((trial, visit), None)
            if state is None:
                return
            named = {
                digest
                for other in self._states.values()
                for shard in other.shards
                if shard is not None
                for digest in shard.digests
            }
            for shard in state.shards:
                for digest in shard.digests if shard is not None else ():
                    if digest not in named and digest not in self._frozen:
                        self._segments.pop(digest, None)
            self.wake()

    def retract(self, state: State) -> None:
        """Withdraw this state, but not another that took its name meanwhile."""
        with self._changed:
            if self._states.get((state.trial, state.visit)) is state:
                self.withdraw(state.trial, state.visit)
