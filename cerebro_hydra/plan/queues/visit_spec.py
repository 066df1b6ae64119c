"""What a visit needs of a worker: its shards, its schedule, and its part of each device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from cerebro_hydra.plan.messages.actions import Action, ActionKind, Part
from cerebro_hydra.plan.queues.ledger import PartBytes, StateName
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.registry import is_pipelined, schedule_of

F, B, U = ActionKind.F, ActionKind.B, ActionKind.U

READ = {
    F: frozenset({Part.PARAMETERS}),
    B: frozenset({Part.PARAMETERS, Part.GRADIENTS}),
    U: frozenset(Part),
}
"""The parts of its shard's state that a task needs, to read or to write them."""

UNIT_SECONDS = 0.05
"""Tasks that take less together are one unit if they can be, because each unit costs messages."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Describes a shard by bytes and estimated seconds.

    Args:
        state: bytes of parameters, buffers, gradients and optimizer state; with slots of fixed
            size, those of a slot.
        activations: bytes that a task of one microbatch has beside the state, at its peak.
        boundary: bytes of one microbatch's input and of its gradient, or of all that its tasks
            leave in DRAM where a microbatch may go to other devices.
        forward, backward, update: seconds of a task, until they have been measured.
        forward_writes: whether a forward changes the state, as BatchNorm's statistics do.
        gradients, optimizer: bytes of the state that forwards need not have; see `Part`.
    """

    state: int
    activations: int = 0
    boundary: int = 0
    forward: float = 1.0
    backward: float = 2.0
    update: float = 0.0
    forward_writes: bool = False
    gradients: int = 0
    optimizer: int = 0

    @property
    def apart(self) -> PartBytes:
        """Return the bytes of what forwards need not have, by part."""
        apart = {Part.GRADIENTS: self.gradients, Part.OPTIMIZER: self.optimizer}
        return {part: nbytes for part, nbytes in apart.items() if nbytes}

    @property
    def sizes(self) -> PartBytes:
        """Return the bytes of the state by part."""
        return {Part.PARAMETERS: self.state - self.gradients - self.optimizer, **self.apart}

    @classmethod
    def joined(
        cls, units: Sequence[ShardSpec], by_modules: bool, backward: float | None = None
    ) -> ShardSpec:
        """Return the shard that neighbours make together.

        A boundary value between two of them is none any more, unless each keeps its input to run
        again, as in a cut by modules.

        Args:
            backward: the seconds of its backward; None adds up theirs.
        """
        inputs = units if by_modules else units[:1]
        return cls(
            sum(unit.state for unit in units),
            sum(unit.activations for unit in units),
            sum(unit.boundary for unit in inputs),
            sum(unit.forward for unit in units),
            sum(unit.backward for unit in units) if backward is None else backward,
            sum(unit.update for unit in units),
            any(unit.forward_writes for unit in units),
            sum(unit.gradients for unit in units),
            sum(unit.optimizer for unit in units),
        )

    def moved(self, action: Action) -> int:
        """Return the bytes that a LOAD or SPILL moves."""
        sizes = self.sizes
        return sum(sizes.get(part, 0) for part in action.parts or sizes)

    def seconds(self, kind: ActionKind) -> float:
        """Return the estimated seconds of a task."""
        return {F: self.forward, B: self.backward, U: self.update}[kind]


@dataclass(frozen=True, slots=True)
class Share:
    """Tells what a device needs for its part of a visit.

    A visit that stays on a device has ``held`` there from the first to the last task of a
    microbatch, or of a window if it is pipelined.

    Args:
        shards: whose tasks the device does.
        state: bytes of these shards.
        held: bytes beside the shards.
        need: bytes that the device must have.
        pinned: bytes that nobody else can have while the visit stays.
    """

    shards: tuple[int, ...]
    state: int
    held: int
    need: int
    pinned: int


@dataclass(frozen=True, slots=True)
class VisitSpec:
    """Describes a visit.

    Args:
        visit: the number that its actions carry as their trial. It is not the trial's own number,
            because a worker may evaluate a trial on two partitions at once.
        by_modules: a microbatch stays on one device, which also holds its boundary values, as it
            must where the model is cut by modules. Else any device may take its next unit, and
            the boundary values are in DRAM from unit to unit.
        recompute: shards may leave the device between the tasks of a microbatch, so that a backward
            computes its forward again. Otherwise a microbatch stays on one device, with all shards
            and activations; an evaluation, too, on a device that no shard has to leave.
        fused: forward and backward of the last shard are one unit, with its activations kept.
        later_seconds: the work of the trial after this visit, by which it is preferred.
        schedule: a name of `SCHEDULES`, which says what is done in which order.
        devices: how many devices such a schedule may spread the visit over.
        places: the device of each list of the schedule. Without, they are the devices with the
            least work of their own when the visit comes, or all of them, and one list alone is
            whichever device's is free. With, it is that device's while that is alive.
        unit_seconds: what the tasks take at most that a device does without a message in between.
        source: the trial and the state that it begins with, if that is kept (``Ledger.keep``).
        whole: every task needs the whole state of its shard, as where it lies in place, or where
            the uncut model takes a step in one of them.
        audits: another visit waits for this one, which takes a step of it again and comes first.
        at_home: updates find optimizer state and moving averages in DRAM, and change them there, so
            that no device ever has them.

    Raises:
        ValueError: microbatches of a cut by modules can't be pipelined, or the places are not
            one device for each list.
    """

    visit: int
    graph: TaskGraph
    shards: tuple[ShardSpec, ...]
    by_modules: bool = False
    recompute: bool = True
    fused: bool = True
    later_seconds: float = 0.0
    schedule: str = "sequential"
    devices: int = 1
    places: tuple[int, ...] = ()
    unit_seconds: float = UNIT_SECONDS
    source: StateName | None = None
    whole: bool = False
    audits: bool = False
    at_home: bool = False

    def __post_init__(self) -> None:
        """Refuse a schedule that the cut can't follow."""
        if self.is_pipelined and self.by_modules:
            raise ValueError(
                f"visit {self.visit} is a cut by modules, which {self.schedule} can't pipeline"
            )
        if self.places and not len(self.places) == len({*self.places}) == len(self.lists(0)):
            raise ValueError(
                f"visit {self.visit} has places {self.places}; name one device for each of the "
                f"{len(self.lists(0))} lists of {self.schedule}, each once"
            )

    @property
    def is_pipelined(self) -> bool:
        """Return whether several microbatches may be under way at once."""
        return is_pipelined(self.schedule)

    def lists(self, window: int) -> Sequence[Sequence[Action]]:
        """Return the tasks of a window: a list for each device, or one for whichever is free."""
        order = schedule_of(self.schedule, self.graph.training)
        return order(self.graph, self.visit, window, self.devices)

    @property
    def most_open(self) -> int:
        """Return how many microbatches are between first forward and last backward at once."""
        if not self.is_pipelined:
            return 1
        if not self.graph.training:  # one for each device, and one that waits for the last device
            return min(len(self.lists(0)) + 1, self.graph.microbatches)
        return _most(self.lists(0)[0], 0)

    @property
    def moves(self) -> bool:
        """Return whether boundary values are in DRAM from unit to unit, for other devices too."""
        return self.is_pipelined or not self.stays

    @property
    def crossings(self) -> tuple[int, ...] | None:
        """Return the shards to which microbatches come from other devices; None if any may.

        A device that keeps activations has what it leaves for its own next task itself.
        """
        if not (self.is_pipelined and self.graph.training and self.keeps_all):
            return None
        device_of = {k: place for place, share in enumerate(self._places()) for k in share}
        return tuple(k for k in range(1, self.graph.shards) if device_of[k] != device_of[k - 1])

    def _places(self) -> list[list[int]]:
        """Return the shards of each list."""
        return [sorted({task.shard for task in tasks}) for tasks in self.lists(0)]

    @property
    def stays(self) -> bool:
        """Return whether what a task keeps for later ones stays on its device.

        An evaluation in a pipeline is summed where its last shard is.
        """
        summed = self.is_pipelined and not self.graph.training
        return self.by_modules or not self.recompute or summed

    @property
    def keeps_all(self) -> bool:
        """Return whether shards and activations stay on a device with a microbatch or window."""
        return not self.recompute

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all shards."""
        return sum(shard.state for shard in self.shards)

    def on_device(self, shard: int) -> int:
        """Return the most bytes of a shard's state that a device has at once."""
        each = self.shards[shard]
        if not (self.graph.training or self.whole):
            return each.sizes[Part.PARAMETERS]
        return each.state - (each.optimizer if self.updates_at_home else 0)

    @property
    def device_shards(self) -> tuple[ShardSpec, ...]:
        """Return the shards without what of them never comes to a device."""
        if not self.updates_at_home:
            return self.shards
        return tuple(
            replace(each, state=each.state - each.optimizer, optimizer=0) for each in self.shards
        )

    @property
    def updates_at_home(self) -> bool:
        """Return whether updates change optimizer state in DRAM, which a device never has."""
        return self.at_home and not self.whole

    def read(self, task: Action) -> frozenset[Part]:
        """Return the parts of its shard's state that a task needs on its device."""
        parts = READ[U if self.whole else task.kind]
        return parts - {Part.OPTIMIZER} if self.updates_at_home else parts

    @property
    def boundary_bytes(self) -> int:
        """Return the bytes of a microbatch's boundary values."""
        return sum(shard.boundary for shard in self.shards)

    def shares(self) -> tuple[Share, ...]:
        """Return what each device of the schedule needs, or whichever device does all of it."""
        if not self.is_pipelined:
            kept = sum(shard.activations for shard in self.shards)
            return (self._share(range(len(self.shards)), kept),)
        return tuple(
            self._share(sorted({task.shard for task in tasks}), self._most_kept(tasks), tasks)
            for tasks in self.lists(0)
        )

    def _share(self, shards: Sequence[int], kept: int, tasks: Sequence[Action] = ()) -> Share:
        """Return what a device needs that does the tasks of these shards, in this order.

        Of each microbatch that is open there, it may have what the others have left.
        """
        state = sum(map(self.on_device, shards))
        if self.keeps_all:
            if self.is_pipelined:
                opened = _most(tasks, shards[0])
                kept += opened * self.boundary_bytes + self._transient(shards)
            return Share(tuple(shards), state, kept, state + kept, state + kept)
        held = 0 if self.moves else self.boundary_bytes
        need = held + max(self.on_device(k) + self.shards[k].activations for k in shards)
        return Share(tuple(shards), state, held, need, held)

    def _transient(self, shards: Sequence[int]) -> int:
        """Return the most bytes that a task of these shards has beside what it keeps for later.

        Where activations are kept, those of the last shard have the peak of all tasks.
        """
        return 0 if len(self.shards) - 1 in shards else self.shards[-1].activations

    def _most_kept(self, tasks: Sequence[Action]) -> int:
        """Return the most bytes of activations that are kept at once from F to B."""
        signs = {F: 1, B: -1, U: 0}
        kept = (signs[task.kind] * self.shards[task.shard].activations for task in tasks)
        return max(accumulate(kept))

    @property
    def held_bytes(self) -> int:
        """Return the most bytes that a device keeps beside the state while the visit stays."""
        return max(share.held for share in self.shares())

    @property
    def device_need(self) -> int:
        """Return the bytes that the device with the largest share must have."""
        return max(share.need for share in self.shares())

    @property
    def task_bytes(self) -> tuple[int, ...]:
        """Return the bytes beside the shards that tasks of each shard may have for a microbatch."""
        held = {shard: share.held for share in self.shares() for shard in share.shards}
        if self.keeps_all and self.is_pipelined:
            for share in self.shares():
                kept = sum(self.shards[number].activations for number in share.shards)
                most = kept + self.boundary_bytes + self._transient(share.shards)
                held |= dict.fromkeys(share.shards, most)
        if self.keeps_all:
            return tuple(held[number] for number in range(len(self.shards)))
        return tuple(held[number] + each.activations for number, each in enumerate(self.shards))

    def buffered_need(self, buffers: int) -> int:
        """Return the bytes of a device with room for so many shards, of which one computes."""
        if self.keeps_all:
            return self.device_need
        return self.held_bytes + max(
            buffers * self.on_device(number) + shard.activations
            for number, shard in enumerate(self.shards)
        )

    @property
    def whole_need(self) -> int:
        """Return the bytes of a device that never gives a shard of its share away."""
        largest = 0 if self.keeps_all else max(shard.activations for shard in self.shards)
        return max(share.state + share.held for share in self.shares()) + largest

    @property
    def host_boundary_bytes(self) -> int:
        """Return the bytes of DRAM for the boundary values of microbatches that move about."""
        return self.most_open * self.boundary_bytes if self.moves else 0

    @property
    def host_need(self) -> int:
        """Return the bytes of DRAM without which a worker refuses the visit."""
        return self.host_state_bytes + self.host_boundary_bytes

    @property
    def host_state_bytes(self) -> int:
        """Return the bytes of DRAM without which the visit can't go on; it is a shard's home."""
        return self.state_bytes if self.keeps_all else max(shard.state for shard in self.shards)

    def lacking(self, budgets: Sequence[float], host: float) -> str:
        """Return what the visit needs that a worker does not have; "" if nothing is lacking.

        Args:
            budgets: the bytes of its devices.
            host: those of its DRAM.
        """
        shares, need = self.shares(), self.device_need
        if len(shares) > len(budgets):
            return f"its schedule needs {len(shares)} devices, and there are {len(budgets)}"
        if max(self.places, default=0) >= len(budgets):
            return f"it is to be on devices {self.places}, and there are {len(budgets)}"
        if len(shares) == 1 and not self.places and need > max(budgets):
            return f"it needs {need} bytes of a device, and the largest has {max(budgets)}"
        places = self.places or (range(len(shares)) if len(shares) > 1 else ())
        for device, share in zip(places, shares, strict=False):
            if share.need > budgets[device]:
                has = budgets[device]
                return f"it needs {share.need} bytes of device {device}, which has {has}"
        if self.host_need > host:
            return f"it needs {self.host_need} bytes of DRAM, and there are {host}"
        return ""


def _most(tasks: Sequence[Action], shard: int) -> int:
    """Return how many microbatches are between forward and backward of a shard at once."""
    own = (task.kind for task in tasks if task.shard == shard)
    return max(accumulate((kind is F) - (kind is B) for kind in own))
