"""The ledger of a worker: which block is on a device, in DRAM or on disk.

A block is whatever has bytes and a place: a shard's state, or what the microbatches of a visit
leave in DRAM between two units. DRAM is its home: while a device works on a state, its slab in DRAM
stays as it was when the state was loaded, until SPILL writes the changes back. Bytes count in a
place from the moment that a move into it begins to the moment that a move out of it has ended.

A device has the parts of a state that its units read, and more of them as later units need more:
parameters for a forward, gradients for a backward, all for an update. It writes back only what was
written. But all that was written goes in one move, so that DRAM never has parameters after a step
beside optimizer state before it, and all parts leave together.

A kept block is a segment of a state that visits begin with, here or elsewhere. What a visit
publishes is no block of the visit any more, but kept. Equal segments are one block, whatever
states have them.

The ledger keeps account and decides nothing; `Evictor` says what goes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind, Part


class BlockKey(NamedTuple):
    """Names a block of a visit.

    ``number`` is the shard that a state belongs to. Boundary values have those of the places that
    the visit's open microbatches take by turns.
    """

    visit: int
    number: int
    kind: Literal["state", "boundary"]


def state_key(visit: int, shard: int) -> BlockKey:
    """Return the key of a shard's state."""
    return BlockKey(visit, shard, "state")


WRITTEN: Mapping[ActionKind, Iterable[Part]] = {
    ActionKind.F: (Part.PARAMETERS,),
    ActionKind.B: (Part.GRADIENTS,),
    ActionKind.U: (Part.PARAMETERS, Part.OPTIMIZER),
}
"""The parts of a state that a task may change, with buffers among the parameters."""


class StateName(NamedTuple):
    """Names a state of a trial by its number in the trial's history."""

    trial: int
    number: int


Segments = Mapping[str, tuple[str, int]]
"""The segments of a shard, "frozen" and "trainable": their digests and bytes, by name."""


@dataclass(slots=True)
class KeptBlock:
    """Tells where the bytes of a segment are, which never change: in DRAM, on disk, or in both."""

    digest: str
    nbytes: int
    in_dram: bool = True
    on_disk: bool = False


PartBytes = Mapping[Part, int]
"""The bytes of a state by part. Parameters are always among them, and others if they have any."""


@dataclass(slots=True)
class Block:
    """Tells where the bytes of one block are; a pinned one stays in DRAM until it is dropped.

    Args:
        parts: those that the device has, or is given.
        written: those of them that tasks there have changed.
    """

    key: BlockKey
    sizes: PartBytes
    nbytes: int = field(init=False)
    home: Literal["receiving", "dram", "spilling", "disk", "loading"] = "receiving"
    pinned: bool = False
    device: int | None = None
    move: Literal["loading", "spilling"] | None = None  # to or from the device
    sending: bool = False
    on_disk: bool = False  # what DRAM has is on disk too
    changed: bool = False  # it has bytes of its own, which the state before the visit has not
    parts: set[Part] = field(default_factory=set)
    written: set[Part] = field(default_factory=set)
    unsaved: list[Action] = field(default_factory=list)  # changes that may be done again
    older_unsaved: bool = False  # there are changes of microbatches that have left nothing

    def __post_init__(self) -> None:
        """Sum the bytes of all parts."""
        self.nbytes = sum(self.sizes.values())

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the parts that a device has, or is given."""
        return sum(self.sizes[part] for part in self.parts)

    def lacking(self, parts: Iterable[Part]) -> set[Part]:
        """Return which of these parts its device has not; those without bytes lie with others."""
        return {part for part in parts if part in self.sizes} - self.parts

    @property
    def at_rest(self) -> bool:
        """Return whether no move is under way."""
        return self.move is None and self.home in ("dram", "disk") and not self.sending

    @property
    def dirty(self) -> bool:
        """Return whether the device has changes that DRAM has not."""
        return bool(self.unsaved)

    def wrote(self, task: Action, most_open: int, hooks_write: bool = False) -> None:
        """Note that a task changed the state on the device.

        Of so many microbatches there may be boundary values, with which a task can be done again.
        After an update there are no gradients.

        Args:
            hooks_write: whether a backward may change more than gradients.
        """
        self.written |= self.parts.intersection(WRITTEN[task.kind])
        if task.kind is ActionKind.U:
            self.written.discard(Part.GRADIENTS)
        elif task.kind is ActionKind.B and (hooks_write or Part.GRADIENTS not in self.sizes):
            self.written.add(Part.PARAMETERS)  # with what has no bytes apart
        oldest = (task.microbatch or 0) - most_open + 1
        if any((each.microbatch or 0) < oldest for each in self.unsaved):
            self.older_unsaved = True
            self.unsaved = [each for each in self.unsaved if (each.microbatch or 0) >= oldest]
        self.unsaved.append(task)

    def off_device(self) -> None:
        """Note that the device has the block no longer."""
        self.device = self.move = None
        self.parts.clear()
        self.written.clear()
        self.unsaved.clear()
        self.older_unsaved = False


class Ledger:
    """Keeps account of every block's place and of the bytes in each.

    Its methods begin a move and return the action, or end one; they check no budget.
    """

    def __init__(self, devices: Iterable[int], host_budget: int | None) -> None:
        self.host_budget = math.inf if host_budget is None else host_budget
        self._blocks: dict[BlockKey, Block] = {}
        self._by_visit: defaultdict[int, dict[BlockKey, Block]] = defaultdict(dict)
        self._kept: dict[str, KeptBlock] = {}  # the longest unused first
        self._states: dict[StateName, dict[int, Segments]] = {}  # kept ones, by shard
        self._taken: dict[StateName, set[int]] = {}  # shards of these that somebody has
        self._on: dict[int, dict[BlockKey, Block]] = {device: {} for device in devices}
        self._device_used = dict.fromkeys(self._on, 0)
        self._host_used = 0
        self.receiving = 0  # bytes of DRAM for what is on its way from elsewhere
        self._host_pinned = 0

    def __iter__(self) -> Iterator[Block]:
        """Return every block, in the order of arrival."""
        return iter(self._blocks.values())

    def get(self, key: BlockKey) -> Block | None:
        """Return a block; None of a state before its RECV."""
        return self._blocks.get(key)

    def states_of(self, visit: int) -> list[Block]:
        """Return the states of a visit's shards."""
        return [block for block in self._of(visit) if block.key.kind == "state"]

    def _of(self, visit: int) -> Iterable[Block]:
        return self._by_visit[visit].values() if visit in self._by_visit else ()

    def _add(self, block: Block) -> None:
        self._blocks[block.key] = self._by_visit[block.key.visit][block.key] = block

    def _remove(self, block: Block) -> None:
        del self._blocks[block.key]
        del self._by_visit[block.key.visit][block.key]
        if not self._by_visit[block.key.visit]:
            del self._by_visit[block.key.visit]

    def devices_of(self, visit: int) -> set[int]:
        """Return the devices where blocks of a visit are."""
        return {block.device for block in self._of(visit) if block.device is not None}

    def on(self, device: int) -> list[Block]:
        """Return the blocks on a device, moving ones included."""
        return list(self._on[device].values())

    def used(self, device: int) -> int:
        """Return the bytes of the blocks on a device."""
        return self._device_used[device]

    @property
    def host_used(self) -> int:
        """Return the bytes in DRAM."""
        return self._host_used

    @property
    def host_pinned(self) -> int:
        """Return the bytes in DRAM that can't go to disk."""
        return self._host_pinned

    @property
    def host_free(self) -> float:
        """Return the bytes of DRAM that nobody has."""
        return self.host_budget - self._host_used

    # ------------------------------------------------------------------ moves

    def receive(self, visit: int, shard: int, sizes: PartBytes) -> Action:
        """Make room in DRAM for a shard's state that comes from elsewhere."""
        self._add(block := Block(state_key(visit, shard), sizes))
        self._host_used += block.nbytes
        self.receiving += block.nbytes
        return Action(visit, shard, ActionKind.RECV)

    def load(self, block: Block, device: int, parts: Iterable[Part] = Part) -> Action:
        """Begin to bring parts of a block, which its device has not, from DRAM to a device."""
        assert block.at_rest and block.home == "dram" and not block.pinned
        assert block.device in (None, device)
        lacking = block.lacking(parts)
        block.device, block.move = device, "loading"
        block.parts |= lacking
        self._on[device][block.key] = block
        self._device_used[device] += sum(block.sizes[part] for part in lacking)
        return _action(block, ActionKind.LOAD, device, lacking)

    def leave_device(self, block: Block, discard: bool = False) -> Action:
        """Begin to take a block off its device; without changes to write it is off at once."""
        assert block.at_rest and block.device is not None
        if block.dirty and not discard:
            block.move, block.on_disk = "spilling", False
            return _action(block, ActionKind.SPILL, block.device, block.written)
        action = _action(block, ActionKind.DROP, block.device)
        self._off_device(block)
        return action

    def load_from_disk(self, block: Block) -> Action:
        """Begin to bring a block from disk to DRAM."""
        assert block.at_rest and block.home == "disk"
        block.home = "loading"
        self._host_used += block.nbytes
        return _action(block, ActionKind.LOAD, HOST)

    def leave_dram(self, block: Block) -> Action:
        """Begin to take a block to disk; it is off at once if disk has it already."""
        assert block.at_rest and block.home == "dram" and block.device is None and not block.pinned
        if not block.on_disk:
            block.home = "spilling"
            return _action(block, ActionKind.SPILL, HOST)
        block.home = "disk"
        self._host_used -= block.nbytes
        return _action(block, ActionKind.DROP, HOST)

    def send(self, block: Block) -> Action:
        """Begin to publish a shard's state, which is then no block of its visit any more."""
        assert block.at_rest and block.device is None
        block.sending = True
        return _action(block, ActionKind.SEND)

    def discard(self, block: Block) -> list[Action]:
        """Forget a shard's state that is at rest, wherever it is."""
        actions = [] if block.device is None else [self.leave_device(block, discard=True)]
        self._remove(block)
        if block.home == "dram":
            self._host_used -= block.nbytes
            actions.append(_action(block, ActionKind.DROP, HOST))
        return actions

    def end(self, action: Action) -> None:
        """Note that a move has ended."""
        block = self._blocks[state_key(action.trial, action.shard)]
        match action.kind:
            case ActionKind.RECV:
                block.home = "dram"
                self.receiving -= block.nbytes
            case ActionKind.LOAD if action.device == HOST:
                block.home, block.on_disk = "dram", True
            case ActionKind.LOAD:
                block.move = None
            case ActionKind.SPILL if action.device == HOST:
                block.home, block.on_disk = "disk", True
                self._host_used -= block.nbytes
            case ActionKind.SPILL:
                block.changed |= block.written != {Part.GRADIENTS}
                self._off_device(block)
            case _:
                self._remove(block)
                self._host_used -= block.nbytes if block.home == "dram" else 0

    def lose(self, block: Block) -> None:
        """Note that a block's device died."""
        self._off_device(block)

    def _off_device(self, block: Block) -> None:
        assert block.device is not None
        self._device_used[block.device] -= block.device_bytes
        del self._on[block.device][block.key]
        block.off_device()

    # ------------------------------------------------------------------ what stays in DRAM

    def pin_boundaries(self, visit: int, places: int, nbytes: int) -> None:
        """Give a visit so many blocks for boundary values, each for one microbatch at a time."""
        for number in range(places):
            key = BlockKey(visit, number, "boundary")
            self._add(Block(key, {Part.PARAMETERS: nbytes}, home="dram", pinned=True))
        self._host_used += places * nbytes
        self._host_pinned += places * nbytes

    def drop_boundaries(self, visit: int) -> None:
        """Take a visit's blocks for boundary values back, if it has any."""
        for block in [each for each in self._of(visit) if each.pinned]:
            self._remove(block)
            self._host_used -= block.nbytes
            self._host_pinned -= block.nbytes

    # ------------------------------------------------------------------ what is kept

    @property
    def kept(self) -> Iterable[KeptBlock]:
        """Return the kept blocks, the longest unused first."""
        return self._kept.values()

    def keep(self, name: StateName, shard: int, segments: Segments) -> None:
        """Keep a shard of a state, whose segments are in DRAM, unless equal ones are kept."""
        self._states.setdefault(name, {})[shard] = segments
        for digest, nbytes in segments.values():
            self._kept.setdefault(digest, KeptBlock(digest, nbytes))
            self.use(digest)

    @property
    def states(self) -> Mapping[StateName, Mapping[int, Segments]]:
        """Return what is kept of each state, by shard."""
        return self._states

    def taken(self, name: StateName) -> Collection[int]:
        """Return the shards of a state that a visit here or another worker has taken."""
        return self._taken.get(name, ())

    def take(self, name: StateName, shard: int) -> None:
        """Note that a visit here or another worker has a shard: this is a copy in case of loss."""
        if name in self._states:
            self._taken.setdefault(name, set()).add(shard)

    def forget_state(self, name: StateName) -> None:
        """Forget a state; its segments stay until they are dropped."""
        self._states.pop(name, None)
        self._taken.pop(name, None)

    def use(self, digest: str) -> None:
        """Note that a kept block is read now."""
        self._kept[digest] = self._kept.pop(digest)

    def move_kept(self, digest: str, in_dram: bool) -> None:
        """Note that a kept block has come to DRAM from disk, where it stays too, or left DRAM."""
        self._kept[digest].in_dram, self._kept[digest].on_disk = in_dram, True

    def drop_kept(self, digest: str) -> None:
        """Forget a kept block."""
        self._kept.pop(digest, None)

    def validate(self) -> None:
        """Check the counted bytes against the blocks, and DRAM against its budget."""
        for device, used in self._device_used.items():
            there = {block.key for block in self if block.device == device}
            assert there == self._on[device].keys(), f"blocks on device {device}"
            assert used == sum(b.device_bytes for b in self.on(device)), f"bytes of device {device}"
        in_dram = sum(block.nbytes for block in self if block.home != "disk")
        assert self._host_used == in_dram, "bytes of DRAM"
        coming = sum(block.nbytes for block in self if block.home == "receiving")
        assert self.receiving == coming, "bytes of DRAM for what is received"
        pinned = sum(block.nbytes for block in self if block.pinned)
        assert self._host_pinned == pinned, "pinned bytes of DRAM"
        assert self._host_used <= self.host_budget, f"{self._host_used} bytes are in DRAM"
        for block in self:
            assert block.device is None or block.home == "dram", f"{block.key} is not at home"
            assert block.device is None or Part.PARAMETERS in block.parts, f"{block.key} is parted"
            assert not block.pinned or (block.home == "dram" and block.at_rest), f"{block.key} left"


def _action(
    block: Block, kind: ActionKind, device: int | None = None, parts: Collection[Part] = ()
) -> Action:
    """Return an action on a block, with the parts that it moves unless those are all."""
    named = () if parts == block.sizes.keys() else tuple(part for part in Part if part in parts)
    return Action(block.key.visit, block.key.number, kind, device=device, parts=named)
