"""Holds the states of trials: which segments make up each of them.

While its worker trains it, the home of a shard is slabs in DRAM, or a file on scratch disk.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cerebro_hydra.agent.memory.pool import ScratchFile
from cerebro_hydra.agent.memory.segment_store import SegmentStore
from cerebro_hydra.errors import TransferError
from cerebro_hydra.plan.queues.ledger import StateName
from cerebro_hydra.shards.engine.layout import Bytes
from cerebro_hydra.storage.digest import digest as content_digest

Cursor = Mapping[str, Any]

KEPT_TRIALS = 4
"""Trials whose frozen segments stay here although they are over: the next trial may share them."""


@dataclass(frozen=True)
class Shard:
    """One shard of one state, immutable: name of a segment → (digest, bytes)."""

    segments: Mapping[str, tuple[str, Bytes]]
    cursor: Cursor

    @property
    def digests(self) -> tuple[str, str]:
        """Return the digests of the frozen and the trainable segment."""
        return self.segments["frozen"][0], self.segments["trainable"][0]


@dataclass(frozen=True)
class HeldShard:
    """One shard that is here: name of a segment → digest.

    It refers to no bytes, so that they can be spilled.
    """

    names: Mapping[str, str]
    cursor: Cursor
    _store: SegmentStore = field(repr=False)

    @property
    def digests(self) -> tuple[str, str]:
        """Return the digests of the frozen and the trainable segment."""
        return self.names["frozen"], self.names["trainable"]

    @property
    def segments(self) -> Mapping[str, tuple[str, Bytes]]:
        """Return (digest, bytes) by name; bytes that lie on disk are read now.

        Raises:
            TransferError: a segment was dropped meanwhile, or the disk lost it.
        """
        return {name: (digest, self._store.read(digest)) for name, digest in self.names.items()}


@dataclass(eq=False)
class State:
    """One announced state, which only those who announced it can fill or retract.

    After a redo a visit is made again, and the new state has the old one's name: identity tells
    them apart.
    """

    trial: int
    state: int
    shards: list[HeldShard | None]


class ShardStore:
    """States of trials, shard by shard, as they arrive or are published.

    Thread-safe. A state is announced by `expect` before its shards come, so that peers can wait
    for it; `withdraw` and `retract` end their waits. Equal segments are kept once, whatever trial
    they belong to. Frozen ones stay until their trials are over, and those of the latest that
    ended stay longer, so that trials which share them are not sent them twice. `on_change` is
    called after each change, and must return at once.

    Args:
        segments: holds the bytes.
    """

    def __init__(self, segments: SegmentStore) -> None:
        self.segments = segments
        self._changed = threading.Condition()
        self._states: dict[tuple[int, int], State] = {}
        self._frozen: dict[int, set[str]] = {}
        """Digests of frozen segments, by the trials that were here."""
        self._over: deque[int] = deque()
        self.on_change: Callable[[], None] = lambda: None

    def expect(self, trial: int, state: int, shards: int) -> State:
        """Announce a state that will be published here, forgetting an older one of its name."""
        with self._changed:
            self.withdraw(trial, state)
            found = self._states[trial, state] = State(trial, state, [None] * shards)
            self.wake()
            return found

    def put(self, state: State, number: int, shard: Shard) -> None:
        """Publish one shard of an announced state; ignored if that was withdrawn meanwhile."""
        with self._changed:
            if self._states.get((state.trial, state.state)) is not state:
                return
            self.segments.keep(StateName(state.trial, state.state), number, shard.segments)
            self._frozen.setdefault(state.trial, set()).add(shard.digests[0])
            names = {name: digest for name, (digest, _) in shard.segments.items()}
            state.shards[number] = HeldShard(names, shard.cursor, self.segments)
            self.wake()

    def follow(
        self, trial: int, state: int, *, takes: bool = False
    ) -> Callable[[int], HeldShard | None]:
        """Return what looks for a shard of a state, announced or not: None while it isn't there.

        What is returned raises TransferError if the state that it saw first was withdrawn.

        Args:
            takes: whether another worker takes what is found.
        """
        seen: State | None = None

        def look(number: int) -> HeldShard | None:
            nonlocal seen
            with self._changed:
                found = self._states.get((trial, state))
                if seen is not None and found is not seen:
                    raise TransferError(f"state {state} of trial {trial} was withdrawn here")
                seen = found
                if found is None:
                    return None
                if number >= len(found.shards):
                    raise TransferError(
                        f"state {state} of trial {trial} has no shard {number}, only "
                        f"{len(found.shards)} of them"
                    )
                if takes and found.shards[number] is not None:
                    self.segments.take(StateName(trial, state), number)
                return found.shards[number]

        return look

    def wait(
        self, trial: int, state: int, number: int, given_up: Callable[[], bool] = lambda: False
    ) -> HeldShard:
        """Return one shard, as soon as it is there.

        Raises:
            TransferError: the state was withdrawn, or `given_up()` after a `wake`.
        """
        look = self.follow(trial, state)
        with self._changed:
            while (shard := look(number)) is None:
                if given_up():
                    raise TransferError(f"waiting for state {state} of trial {trial} was given up")
                self._changed.wait()
            return shard

    def wake(self) -> None:
        """Let all who wait look again."""
        with self._changed:
            self._changed.notify_all()
            self.on_change()

    def whole(self, trial: int, state: int) -> bool:
        """Return whether every shard of a state is here."""
        with self._changed:
            found = self._states.get((trial, state))
            return found is not None and None not in found.shards

    def num_shards(self, trial: int, state: int) -> int:
        """Return how many shards a state has.

        Raises:
            TransferError: it is neither here nor on its way.
        """
        with self._changed:
            if (found := self._states.get((trial, state))) is None:
                raise TransferError(f"state {state} of trial {trial} is not here")
            return len(found.shards)

    def altered(self, state: State) -> list[int]:
        """Return the shards of a state whose trainable segment was written to after `put`."""
        with self._changed:
            held = [(n, shard.digests[1]) for n, shard in enumerate(state.shards) if shard]
        return [number for number, digest in held if self.segments.is_altered(digest)]

    def knows(self, trial: int, state: int) -> bool:
        """Return whether a state is here or on its way."""
        with self._changed:
            return (trial, state) in self._states

    def withdraw(self, trial: int, state: int) -> None:
        """Forget a state, with the trainable segments that no other state names."""
        with self._changed:
            found = self._states.pop((trial, state), None)
            if found is None:
                return
            self.segments.forget_state(StateName(trial, state))
            self._discard(_digests(found))
            self.wake()

    def forget(self, trial: int) -> None:
        """Note that a trial is over, and forget the frozen segments of one that ended long ago."""
        with self._changed:
            if trial in self._frozen:
                self._over.append(trial)
            if len(self._over) > KEPT_TRIALS:
                self._discard(self._frozen.pop(self._over.popleft()))

    def _discard(self, digests: set[str]) -> None:
        """Discard those segments that neither a state nor a trial that is kept names."""
        for digest in digests.difference(
            *self._frozen.values(), *map(_digests, self._states.values())
        ):
            self.segments.discard(digest)

    def retract(self, state: State) -> None:
        """Withdraw this state, but not another that took its name meanwhile."""
        with self._changed:
            if self._states.get((state.trial, state.state)) is state:
                self.withdraw(state.trial, state.state)


def _digests(state: State) -> set[str]:
    """Return the digests of all segments of a state that are here."""
    return {each for shard in state.shards if shard is not None for each in shard.digests}


class ShardHome:
    """Holds one shard of a visit; one thread at a time uses it.

    At first its bytes are those of the state before, which is never changed: what a device writes
    back gets slabs of its own.

    Args:
        held: the shard of the state before.
        segments: has the bytes of that state, and gives memory.
    """

    def __init__(self, held: HeldShard, segments: SegmentStore) -> None:
        self._names = held.names
        self._segments = segments
        self.cursor: Mapping[str, Any] | None = held.cursor or None
        self._stored = {name: buffer for name, (_, buffer) in held.segments.items()}
        self._own: dict[str, Bytes] = {}
        self._files: dict[str, ScratchFile] = {}

    @classmethod
    def of_copy(cls, home: ShardHome, trainable: Bytes, cursor: Mapping[str, Any]) -> ShardHome:
        """Return the home of a shard that was copied from another one's device."""
        copied = copy.copy(home)
        copied.cursor = cursor
        copied._stored, copied._own, copied._files = {}, {"trainable": trainable}, {}
        return copied

    def own_trainable(self) -> None:
        """Have the trainable segment in a slab of its own, in which it may be changed."""
        if "trainable" not in self._own:
            before = self._stored.pop("trainable")
            slab = self._segments.allocate(before.nbytes)
            slab[:] = before
            self._own["trainable"] = slab

    def damaged_frozen(self) -> tuple[str, Bytes] | None:
        """Return the digest and bytes of the frozen segment if somebody has written to them."""
        name = self._names["frozen"]
        frozen = self._segments.get(name)
        if frozen is None or content_digest(frozen) == name:
            return None
        return name, frozen

    def forget_frozen(self) -> None:
        """Let nobody find the frozen segment here any more."""
        self._segments.discard(self._names["frozen"])

    @property
    def slabs(self) -> Mapping[str, Bytes]:
        """Return the shard's bytes, which are in DRAM, by name."""
        return self._stored | self._own

    @property
    def bytes_on_disk(self) -> int:
        """Return the bytes of the shard's files, which are what moves between disk and DRAM."""
        return sum(file.nbytes for file in self._files.values())

    def room_for(self, sizes: Mapping[str, int], in_part: bool = False) -> Mapping[str, Bytes]:
        """Return slabs that a device may write the shard's changes to.

        Args:
            sizes: the bytes of each slab, by name.
            in_part: whether it leaves some of the trainable segment as that is.
        """
        for name, nbytes in sizes.items():
            if name not in self._own:
                slab = self._segments.allocate(nbytes)
                if in_part and name == "trainable":
                    slab[:] = self._stored[name]
                self._own[name] = slab
        return {name: self._own[name] for name in sizes}

    def changed(
        self, cursor: Mapping[str, Any] | None, has_gradients: bool, trained: bool = True
    ) -> None:
        """Note that a device has written to the slabs.

        Args:
            cursor: the one with the shard's last update.
            has_gradients: whether those in their slab are still wanted.
            trained: whether it has written to the trainable segment, or to gradients alone.
        """
        self.cursor = cursor
        self._files.clear()
        if trained:
            self._stored.pop("trainable", None)
        if not has_gradients:
            self._own.pop("gradients", None)

    def to_disk(self) -> None:
        """Move what is in slabs of its own to files; the state before has its own place.

        Raises:
            ScratchFull: the disk has no room for it.
        """
        for name, slab in self._own.items():
            self._files[name] = ScratchFile(self._segments.scratch, slab)
        self.leave_dram()

    def to_dram(self) -> None:
        """Bring back what `leave_dram` let go."""
        for name, file in self._files.items():
            slab = self._own[name] = self._segments.allocate(file.nbytes)
            file.read_into(slab)
        for name in self._names:
            if name not in self._own:
                buffer = self._segments.get(self._names[name])
                assert buffer is not None, "a task keeps the state that it began with"
                self._stored[name] = buffer

    def leave_dram(self) -> None:
        """Let go of all memory; what is not on disk is lost."""
        self._own.clear()
        self._stored.clear()

    def leave(self) -> None:
        """Let go of all memory and files."""
        self.leave_dram()
        self._files.clear()

    def published(self) -> Shard:
        """Return the shard as the newest state has it."""
        if not self._own and not self._stored:
            self.to_dram()
        trainable = self.slabs["trainable"]
        named = {
            "frozen": (self._names["frozen"], self.slabs["frozen"]),
            "trainable": (content_digest(trainable), trainable),
        }
        return Shard(named, self.cursor or {})
