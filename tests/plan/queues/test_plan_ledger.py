"""The ledger counts every block where it is, and the evictor takes what is used last."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind, Part
from cerebro_hydra.plan.queues.device_queue import DeviceQueue
from cerebro_hydra.plan.queues.events import VisitAdded, VisitCancelled
from cerebro_hydra.plan.queues.evictor import Evictor
from cerebro_hydra.plan.queues.ledger import Block, BlockKey, Ledger, state_key
from cerebro_hydra.plan.queues.pick import sharp
from cerebro_hydra.plan.queues.visit import Visit
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.graph import TaskGraph
from tests.examples import examples
from tests.plan.queues.test_plan_worker_chaos import specs

DEVICES = (0, 1)
LOAD, SPILL, DROP = ActionKind.LOAD, ActionKind.SPILL, ActionKind.DROP
RECV, SEND = ActionKind.RECV, ActionKind.SEND


class Moves:
    """Makes moves that a ledger allows, and counts by itself which block has bytes where."""

    def __init__(self) -> None:
        self.ledger = Ledger(DEVICES, None)
        self.sizes: dict[BlockKey, int] = {}
        self.places: dict[BlockKey, set[int]] = {}
        self.under_way: list[Action] = []
        self.visits = 0

    def possible(self, draw: Callable[[st.SearchStrategy[int]], int]) -> list[Callable[[], None]]:
        moves = [lambda: self.arrive(draw(st.integers(1, 9)), draw(st.integers(0, 3)))]
        moves += [lambda each=each: self.end(each) for each in self.under_way]
        for block in self.ledger:
            if block.pinned:
                moves.append(lambda visit=block.key.visit: self.drop(visit))
            elif block.at_rest:
                moves.append(lambda block=block: self.discard(block))
                moves += self.moves_of(block, draw)
            if block.device is not None:
                moves.append(lambda block=block: self.lose(block))
        return moves

    def moves_of(
        self, block: Block, draw: Callable[[st.SearchStrategy[int]], int]
    ) -> list[Callable[[], None]]:
        if block.device is not None:
            return [lambda: self.leave_device(block), lambda: self.write(block)]
        if block.home == "disk":
            return [lambda: self.begin(self.ledger.load_from_disk(block), LOAD, HOST)]
        device = draw(st.sampled_from(DEVICES))
        return [
            lambda: self.begin(self.ledger.load(block, device), LOAD, device),
            lambda: self.leave_dram(block),
            lambda: self.under_way.append(self.ledger.send(block)),
        ]

    def arrive(self, nbytes: int, boundaries: int) -> None:
        """Receive a shard of a new visit, and pin its boundary values."""
        visit, self.visits = self.visits, self.visits + 1
        keys = [BlockKey(visit, number, "boundary") for number in range(boundaries)]
        self.ledger.pin_boundaries(visit, boundaries, nbytes)
        for key in keys:
            self.sizes[key], self.places[key] = nbytes, {HOST}
        self.sizes[state_key(visit, 0)], self.places[state_key(visit, 0)] = nbytes, set()
        self.begin(self.ledger.receive(visit, 0, {Part.PARAMETERS: nbytes}), RECV, HOST)

    def drop(self, visit: int) -> None:
        self.ledger.drop_boundaries(visit)
        for key in [key for key in self.places if key.visit == visit and key.kind == "boundary"]:
            del self.places[key]

    def begin(self, action: Action, kind: ActionKind, place: int) -> None:
        assert action.kind is kind
        assert action.device == (None if kind is RECV else place)
        self.places[state_key(action.trial, action.shard)].add(place)
        self.under_way.append(action)

    def end(self, action: Action) -> None:
        self.under_way.remove(action)
        self.ledger.end(action)
        if action.kind is SEND:
            del self.places[state_key(action.trial, action.shard)]
        elif action.kind is SPILL and action.device is not None:
            self.places[state_key(action.trial, action.shard)].remove(action.device)

    def write(self, block: Block) -> None:
        block.wrote(Action(block.key.visit, block.key.number, ActionKind.B, 0), 1)

    def leave_device(self, block: Block) -> None:
        device, dirty = block.device, block.dirty
        assert device is not None
        action = self.ledger.leave_device(block)
        assert (action.kind, action.device) == (SPILL if dirty else DROP, device)
        if dirty:
            self.under_way.append(action)
        else:
            self.places[block.key].remove(device)

    def leave_dram(self, block: Block) -> None:
        action = self.ledger.leave_dram(block)
        assert action.device == HOST
        if action.kind is SPILL:
            self.under_way.append(action)
        else:
            self.places[block.key].remove(HOST)

    def discard(self, block: Block) -> None:
        actions = self.ledger.discard(block)
        assert all(action.kind is DROP for action in actions)
        assert {action.device for action in actions} == self.places.pop(block.key)

    def lose(self, block: Block) -> None:
        """Let the device die; of what it was given nothing is answered."""
        device, key = block.device, block.key
        assert device is not None
        self.ledger.lose(block)
        self.places[key].remove(device)
        self.under_way = [
            each
            for each in self.under_way
            if (each.trial, each.shard, each.device) != (key.visit, key.number, device)
        ]

    def check(self) -> None:
        ledger = self.ledger
        ledger.validate()
        used = dict.fromkeys((*DEVICES, HOST), 0)
        for key, places in self.places.items():
            for place in places:
                used[place] += self.sizes[key]
        assert [ledger.used(device) for device in DEVICES] == [used[device] for device in DEVICES]
        assert ledger.host_used == used[HOST]
        pinned = [self.sizes[key] for key in self.places if key.kind == "boundary"]
        assert ledger.host_pinned == sum(pinned)
        assert {block.key for block in ledger} == self.places.keys()


@settings(max_examples=examples(150))
@given(st.data())
def test_bytes_count_in_a_place_from_the_begin_of_a_move_to_the_end_of_one(data) -> None:
    moves = Moves()
    for _ in range(data.draw(st.integers(1, 40))):
        data.draw(st.sampled_from(moves.possible(data.draw)))()
        moves.check()
    for action in tuple(moves.under_way):
        moves.end(action)
    for block in list(moves.ledger):
        if block.pinned:
            moves.drop(block.key.visit)
        else:
            moves.discard(block)
        moves.check()
    assert moves.ledger.host_used == moves.ledger.used(0) == moves.ledger.used(1) == 0


def test_what_disk_has_is_not_written_again_until_it_changes() -> None:
    ledger = Ledger(DEVICES, None)
    ledger.end(ledger.receive(0, 0, {Part.PARAMETERS: 5}))
    (block,) = ledger
    ledger.end(ledger.leave_dram(block))
    ledger.end(ledger.load_from_disk(block))
    assert ledger.leave_dram(block).kind is DROP
    ledger.end(ledger.load_from_disk(block))
    ledger.end(ledger.load(block, 1))
    block.wrote(Action(0, 0, ActionKind.B, 0), 1)
    ledger.end(ledger.leave_device(block))
    assert ledger.leave_dram(block).kind is SPILL


def test_boundary_values_go_nowhere() -> None:
    ledger = Ledger(DEVICES, None)
    ledger.pin_boundaries(0, 1, 5)
    (block,) = ledger
    with pytest.raises(AssertionError):
        ledger.leave_dram(block)
    with pytest.raises(AssertionError):
        ledger.load(block, 0)


@st.composite
def crowded_workers(draw: st.DrawFn) -> tuple[Evictor, Ledger, DeviceQueue, dict[int, Visit]]:
    """Draw open visits whose shards lie on a device, in DRAM and on disk, and what is reserved."""
    visits = {}
    ledger = Ledger([0], draw(st.integers(0, 300)))
    queue = DeviceQueue.of(0, draw(st.integers(0, 100)))
    for number in range(draw(st.integers(1, 4))):
        spec = draw(specs(number).filter(lambda spec: not spec.is_pipelined))
        visit = visits[number] = Visit(spec, number)
        visit.status = draw(st.sampled_from(["open", "open", "open", "cancelled"]))
        if spec.host_boundary_bytes:
            ledger.pin_boundaries(number, 1, spec.host_boundary_bytes)
        for shard, each in enumerate(spec.shards):
            ledger.end(ledger.receive(number, shard, each.sizes))
            place(draw, ledger, ledger.get(state_key(number, shard)))
        for _ in range(draw(st.integers(0, 5))):
            unit = visit.next_unit(visit.lists[0])
            if unit is not None:
                visit.take(unit)
                visit.end(unit)
        if visit.status == "open" and queue.reserved is None and draw(st.booleans()):
            reserve(queue, visit)
    return Evictor(ledger, visits, {0: queue}), ledger, queue, visits


def place(draw: st.DrawFn, ledger: Ledger, block: Block | None) -> None:
    assert block is not None
    places = ["dram", "dram", "leaving", "disk", "coming", "device", "changed", "spilling"]
    where = draw(st.sampled_from(places))
    if where in ("leaving", "disk"):
        spill = ledger.leave_dram(block)
        if where == "disk":
            ledger.end(spill)
    elif where != "dram":
        load = ledger.load(block, 0)
        if where != "coming":
            ledger.end(load)
        if where in ("changed", "spilling"):
            block.wrote(Action(block.key.visit, block.key.number, ActionKind.B, 0), 1)
        if where == "spilling":
            ledger.leave_device(block)


def reserve(queue: DeviceQueue, visit: Visit) -> None:
    unit = visit.next_unit(visit.lists[0])
    if unit is not None:
        visit.take(unit)
        queue.reserved = unit
        if visit.spec.stays:
            queue.staying.append(visit)


def may_go(block: Block, queue: DeviceQueue, visits: dict[int, Visit]) -> bool:
    """Return whether a block may leave its place, said once more."""
    visit = visits[block.key.visit]
    reserved = queue.reserved is not None and any(
        (task.trial, task.shard) == block.key[:2] for task in queue.reserved.tasks
    )
    kept = block.device is not None and visit in queue.staying and not visit.spec.recompute
    moves = block.key.kind == "state" and block.at_rest and block.home == "dram"
    return moves and not (reserved or kept)


def check_victims(
    begun: list[Action],
    ledger: Ledger,
    movable: list[Block],
    evictor: Evictor,
    free: float,
    nbytes: int,
) -> None:
    """Check that no more were taken than were needed, and none before one that is used later."""
    keys = dict.fromkeys(state_key(action.trial, action.shard) for action in begun)
    victims = [block for block in map(ledger.get, keys) if block is not None]
    assert all(block in movable for block in victims), "something went that may not"
    others = [block for block in movable if block not in victims]
    nearest = min((evictor.next_use(block) for block in victims), default=math.inf)
    assert all(evictor.next_use(block) <= nearest for block in others)
    freed = [block.nbytes for block in victims]
    assert free + sum(freed) >= nbytes or not others
    assert not freed or free + sum(freed[:-1]) < nbytes
    event(f"victims: {len(victims)}, others: {bool(others)}")


@settings(max_examples=examples(150))
@given(crowded_workers(), st.integers(0, 100), st.sampled_from([-1, 0, 2, 5]))
def test_what_goes_to_disk_is_what_is_used_last(world, nbytes: int, beyond: int) -> None:
    evictor, ledger, queue, visits = world
    coming = sum(b.nbytes for b in ledger if "spilling" in (b.home, b.move))
    free = ledger.host_free + coming
    movable = [b for b in ledger if may_go(b, queue, visits) and evictor.next_use(b) > beyond]
    check_victims(evictor.in_dram(nbytes, beyond), ledger, movable, evictor, free, nbytes)


@settings(max_examples=examples(150))
@given(crowded_workers(), st.integers(0, 100))
def test_what_leaves_a_device_is_what_is_used_last(world, nbytes: int) -> None:
    evictor, ledger, queue, visits = world
    coming = sum(block.nbytes for block in ledger.on(0) if block.move == "spilling")
    free = evictor.free(queue) + coming
    movable = [block for block in ledger.on(0) if may_go(block, queue, visits)]
    check_victims(evictor.on_device(queue, nbytes), ledger, movable, evictor, free, nbytes)


def test_every_microbatch_that_may_be_open_has_a_block_until_the_run_is_over() -> None:
    shards = (ShardSpec(1, boundary=2), ShardSpec(1, boundary=3))
    pipelined = VisitSpec(0, TaskGraph(2, 6, 3), shards, schedule="gpipe", devices=2)
    moving, staying = (
        VisitSpec(visit, TaskGraph(2, 4), shards, recompute=visit < 2) for visit in (1, 2)
    )
    state = WorkerState([None, None], None, sharp)
    state.handle([VisitAdded(spec) for spec in (pipelined, moving, staying)])
    boundaries = [(block.key[:2], block.nbytes) for block in state.ledger if block.pinned]
    assert boundaries == [((0, 0), 5), ((0, 1), 5), ((0, 2), 5), ((1, 0), 5)]
    assert state.ledger.host_pinned == 20
    state.handle([VisitCancelled(0), VisitCancelled(1)])
    state.validate()
    assert state.ledger.host_pinned == 0
