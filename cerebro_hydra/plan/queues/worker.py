"""The state machine decides which device of a worker does what next: events in, actions out.

::

    VisitAdded ────┐                      ┌─► t3s1F0@0 t3s1B0@0 t3s1U0@0    compute on a device
    ShardArrived ──┤   ┌─────────────┐    ├─► t3s1LOAD@0 t3s1SPILL@0        DRAM <-> device
    ActionDone ────┼──►│ WorkerState ├────┼─► t3s1LOAD@host t3s1SPILL@host  disk <-> DRAM
    DeviceLost ────┤   └─────────────┘    ├─► t3s1RECV t3s1SEND             other workers
    VisitCancelled ┘                      └─► VisitEnded, VisitRestarted

An agent's shell drives it: it hands each action to the process of its device, and every answer back
in. ``plan/simulate/worker.py`` drives the same machine on a virtual clock. A device does its
computing actions in the order in which it got them, and moves beside them.

When a device dies, the tasks whose changes were on it are done again from the shard's home in
DRAM. That works while the microbatch's boundary values are there. A visit that has lost older
changes begins anew, from the state before it, which its sender keeps until the visit is committed.

Each visit's schedule says which unit comes next on which device, and `TaskGraph.needs` whether it
is ready. A free device takes that of the visit which the backend's rule picks; while it computes,
the next unit is reserved for it and brought to it, as far as the budget allows (double buffering).
An action is given when everything that it needs is there, so bytes never pass a budget. Room is
made by next use, and what a reserved unit needs comes before what another one may need later.

A device is given its next unit before it has ended one, so that it never waits for words: the
reserved unit, once its shards are there, with room beside what runs. All that comes before that
unit is done, or was given to the device. Then the next one is reserved, while what was given behind
the first unit takes less than ``AHEAD_SECONDS``. A death takes it all back, and units of a
cancelled visit are answered without being done.

That is why there is always progress:

- What a device was given waits for nothing but the units before it.
- No reserved unit waits for ever: ``Chooser._may_stay`` says why nobody waits in a circle.
- If nothing is reserved or runs, some visit has the device and the room for a task that is ready:
  one that keeps shards on devices has all devices of its window, and room for all shards in DRAM;
  if there is none, one that stays has its device, and DRAM for any one shard; if none stays, the
  first open visit has. Of a window's tasks that are left, the first in an order of all lists which
  `TaskGraph.needs` allows is the first of its list, and ready.
- So all that such a task can lack is its shard in DRAM. Its next use is 0, and that of a shard
  whose list waits is at least 1 (``Visit.next_use``), so the second goes to disk for the
  first. Where all that is there is ready too, that goes on instead. What is received can't go to
  disk until it is here, so it leaves room for a shard of each visit that is all here.
- What only one device may do waits for it, also if it has died.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind, Part
from cerebro_hydra.plan.queues.chooser import Chooser
from cerebro_hydra.plan.queues.device_queue import DeviceQueue
from cerebro_hydra.plan.queues.events import (
    ActionDone,
    Answer,
    DeviceJoined,
    DeviceLost,
    ShardArrived,
    VisitAdded,
    VisitCancelled,
    VisitEnded,
    VisitRestarted,
    VisitsExpected,
    WorkerEvent,
)
from cerebro_hydra.plan.queues.evictor import Evictor
from cerebro_hydra.plan.queues.ledger import Block, BlockKey, Ledger, state_key
from cerebro_hydra.plan.queues.pick import Rule
from cerebro_hydra.plan.queues.visit import Unit, Visit, on_least_busy, unplaced

AHEAD_SECONDS = 0.02
"""What the units take at most that a device was given behind the first one, but for one unit."""


class WorkerState:
    """Holds the queues, visits and ledger of one worker, and handles its events.

    It is not thread-safe: one writer at a time hands in events, or asks what goes.

    Args:
        budgets: the bytes of each device; None means no limit.
        host_budget: the bytes of DRAM for shards and boundary values; None means no limit.
        rule: picks a visit for a free device.
        double_buffering: whether a unit is reserved, brought and given while another one computes.
    """

    def __init__(
        self,
        budgets: Sequence[int | None],
        host_budget: int | None,
        rule: Rule,
        *,
        double_buffering: bool = True,
    ) -> None:
        self.queues = {n: DeviceQueue.of(n, budget) for n, budget in enumerate(budgets)}
        self.ledger = Ledger(self.queues, host_budget)
        self.visits: dict[int, Visit] = {}
        self._double_buffering = double_buffering
        self._evictor = Evictor(self.ledger, self.visits, self.queues)
        self._chooser = Chooser(self.ledger, self.visits, self.queues, rule)
        self._coming: list[Visit] = []  # in the order of arrival
        self._changed: set[int] = set()  # visits that may be through with a shard now
        self._lacked_dram = False  # in the last look, so that some devices could not go on
        self._events = 0
        self._now = 0.0  # by what tasks took; it is behind while devices wait for moves
        self._answers: list[Answer] = []

    def used(self, place: int) -> int:
        """Return the bytes that are in use on a device, or in DRAM if the place is ``HOST``."""
        return self.ledger.host_used if place == HOST else self._evictor.used(self.queues[place])

    def budget(self, place: int) -> float:
        """Return the bytes that may be in use there."""
        return self.ledger.host_budget if place == HOST else self.queues[place].budget

    def evict_kept(self, nbytes: int, idle: Collection[str]) -> list[str]:
        """Return which kept segments go to disk, because somebody needs so many bytes of DRAM.

        Args:
            idle: digests of those in DRAM that nobody reads.
        """
        return self._evictor.kept(nbytes, idle)

    def handle(self, events: Iterable[WorkerEvent]) -> list[Answer]:
        """Handle what happened at one moment and return what to do, in this order."""
        self._answers = []
        for event in events:
            self._events += 1
            self._apply(event)
        while self._decide():
            pass
        return self._answers

    # ------------------------------------------------------------------ what has changed

    def _give(self, *answers: Answer) -> None:
        """Answer, and note what actions change."""
        self._answers += answers
        for each in answers:
            action = each[0] if isinstance(each, tuple) else each
            if isinstance(action, Action):
                self._note(action.trial, action.device)

    def _note(self, number: int, device: int | None = None) -> None:
        """Note that a visit or its blocks have changed: devices that have any of it decide anew.

        Args:
            device: one that had some.
        """
        self._changed.add(number)
        devices = self.ledger.devices_of(number)
        if device not in (None, HOST):
            devices.add(device)
        if visit := self.visits.get(number):
            devices |= visit.staying
            devices.update(each.device for each in visit.lists if each.units)
        for place in devices:
            self.queues[place].changes += 1

    def _note_all(self) -> None:
        """Note that every device decides anew, and that any visit may have changed."""
        self._changed.update(self.visits)
        for queue in self.queues.values():
            queue.changes += 1

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            AssertionError: an invariant is broken; the message names it and the object.
        """
        self.ledger.validate()
        pinned = dict.fromkeys(self.visits, 0)
        for block in self.ledger:
            assert block.key.visit in self.visits, f"{block.key} is of no visit"
            pinned[block.key.visit] += block.nbytes if block.pinned else 0
        for queue in self.queues.values():
            used = self.used(queue.number)
            assert used <= queue.budget, f"device {queue.number} has {used} of {queue.budget} bytes"
            queue.validate()
            for unit, visit in ((unit, self.visits[unit.visit]) for unit in queue.units):
                here = visit in queue.staying or not visit.spec.stays
                assert here, f"visit {visit.spec.visit} does not stay on device {queue.number}"
                there = [each for each in visit.lists if each.device == queue.number]
                assert sum(each.units.count(unit) for each in there) == 1, "a unit is elsewhere"
        under_way = [unit for visit in self.visits.values() for unit in visit.units]
        queued = [unit for queue in self.queues.values() for unit in queue.units]
        assert sorted(map(id, under_way)) == sorted(map(id, queued)), "a unit is in no queue"
        for visit in self.visits.values():
            boundary = (
                visit.spec.host_boundary_bytes if visit.status == "open" or visit.units else 0
            )
            assert pinned[visit.spec.visit] == boundary, (
                f"boundary values of visit {visit.spec.visit}"
            )
            number = visit.spec.visit
            places = [q.number for q in self.queues.values() if q.has_unit_of(number)]
            assert len(places) <= len(visit.lists), f"visit {number} is on devices {places}"
            staying = {q.number for q in self.queues.values() if visit in q.staying}
            assert visit.staying == staying, f"{visit.spec.visit} stays"

    # ------------------------------------------------------------------ decisions

    def _decide(self) -> bool:
        """Make the decisions that are due; return whether there may be more."""
        before = len(self._answers)
        if self._lacked_dram:
            self._lacked_dram = False
            self._note_all()
        self._open_visits()
        self._receive()
        queues = [queue for queue in self.queues.values() if queue.alive]
        # Every idle device is served before anything is reserved.
        self._assign([queue for queue in queues if queue.idle])
        for queue in queues:
            self._advance(queue)
        if self._double_buffering:
            self._assign([each for each in queues if self._may_reserve(each)])
        for queue in queues:
            self._advance(queue)
            self._demote(queue)
        self._finish_visits()
        return len(self._answers) > before

    def _open_visits(self) -> None:
        """Give visits their room for boundary values, as long as every one can still go on."""
        waiting = [visit for visit in self._coming if visit.status == "waiting"]
        if not waiting:
            return
        self._note_all()  # with more open visits, devices write back earlier
        opened = (visit for visit in self.visits.values() if visit.status == "open")
        most = max((visit.spec.host_state_bytes for visit in opened), default=0)
        for visit in waiting:
            nbytes = visit.spec.host_boundary_bytes
            most = max(most, visit.spec.host_state_bytes)
            need = self.ledger.host_pinned + nbytes + self._chooser.kept_in_dram(but=visit) + most
            if need > self.ledger.host_budget or not self._dram(nbytes, -1):
                return
            if nbytes:
                places = visit.most_open
                self.ledger.pin_boundaries(visit.spec.visit, places, nbytes // places)
            visit.status = "open"

    def _receive(self) -> None:
        """Receive shards in the order of their use, as DRAM has room for them.

        What comes may wait for another worker, which waits for a visit that is all here: that has
        room for any of its shards beside what comes.
        """
        here = [v for v in self.visits.values() if v.status == "open" and not v.is_coming]
        most = max((visit.spec.host_state_bytes for visit in here), default=0)
        for visit in self._coming:
            if visit.status != "open":
                continue
            for shard in sorted(visit.absent, key=visit.next_use):
                sizes = visit.spec.shards[shard].sizes
                nbytes = sum(sizes.values())
                urgent = bool(visit.staying) and visit.next_use(shard) == 0
                beside = self.ledger.host_pinned + self._chooser.kept_in_dram(but=visit) + most
                if not urgent and self.ledger.receiving + nbytes + beside > self.ledger.host_budget:
                    self._lacked_dram = True
                    break
                if not self._dram(nbytes, -1 if urgent else visit.next_use(shard)):
                    break
                self._give(self.ledger.receive(visit.spec.visit, shard, sizes))
                visit.received(shard)
        self._coming = [visit for visit in self._coming if visit.is_coming]

    def _dram(self, nbytes: int, beyond: float) -> bool:
        """Return whether DRAM has room; begin to make it by what is used later than ``beyond``."""
        if self.ledger.host_free < nbytes:
            self._give(*self._evictor.in_dram(nbytes, beyond))
        self._lacked_dram |= self.ledger.host_free < nbytes
        return self.ledger.host_free >= nbytes

    def _may_reserve(self, queue: DeviceQueue) -> bool:
        """Return whether a device that has work may get more."""
        if queue.reserved is not None or not queue.given:
            return False
        return len(queue.given) == 1 or queue.seconds_ahead < AHEAD_SECONDS

    def _assign(self, queues: Collection[DeviceQueue]) -> None:
        """Reserve the unit that the rule picks for each device, of idle visits and its own ones."""
        if not queues:
            return
        opened = [visit for visit in self.visits.values() if visit.status == "open"]
        idle = [
            visit
            for visit in opened
            if visit.has_places
            or not (visit.units or self._chooser.is_lacking(visit.next_unit(visit.lists[0])))
        ]
        for queue in queues:
            given = [self.visits[number] for number in {unit.visit for unit in queue.given}]
            own = [each for each in given if not each.has_places and each.status == "open"]
            visits = sorted([*idle, *own], key=_arrival) if own else idle
            picked = self._chooser.reserve(queue, visits, self._now)
            if picked is not None:
                self._note(picked)

    def _advance(self, queue: DeviceQueue) -> None:
        """Bring the reserved unit's shards closer, and start the unit when it can run."""
        unit = queue.reserved
        if unit is None or queue.advanced == queue.changes:
            return
        queue.advanced = queue.changes
        states = [self._block(key) for key in unit.keys]
        needs = tuple(zip(states, unit.parts, strict=True))
        if all(
            state.at_rest and state.device == queue.number and not state.lacking(parts)
            for state, parts in needs
        ):
            self._begin(queue, unit)
        for state, parts in needs:
            self._bring(queue, state, parts)

    def _bring(self, queue: DeviceQueue, block: Block, parts: Collection[Part]) -> None:
        """Bring parts of a block a step closer to a device.

        A unit that works on the block there ends before it gets more.
        """
        if not block.at_rest:
            return
        if block.device not in (None, queue.number):
            self._give(self.ledger.leave_device(block))
            if not block.at_rest:
                return
        lacking = block.lacking(parts)
        if block.device == queue.number and not lacking:
            return
        if block.home == "disk":
            if self._dram(block.nbytes, -1):
                self._give(self.ledger.load_from_disk(block))
        elif any(block.key in unit.keys for unit in queue.given):
            return
        elif self._device(queue, sum(block.sizes[part] for part in lacking)):
            self._give(self.ledger.load(block, queue.number, parts))

    def _begin(self, queue: DeviceQueue, unit: Unit) -> None:
        """Give the device its reserved unit, whose shards are there, if it has room."""
        nbytes = self._evictor.work(queue, unit)
        if queue.given:  # what is on a device stays for the sake of what comes later
            has_room = self._may_go_ahead(queue, unit) and self._evictor.free(queue) >= nbytes
        else:
            has_room = self._device(queue, nbytes)
        if has_room:
            activations = self._evictor.activations(queue, unit)
            queue.reserved = None
            self.visits[unit.visit].began(unit)
            self._give(queue.give(unit, activations, self._now))

    def _may_go_ahead(self, queue: DeviceQueue, unit: Unit) -> bool:
        """Return whether a device may have the unit before it has ended others.

        The first task of a microbatch overwrites boundary values by which lost tasks are done
        again. Where tasks are long, so that much would be lost, it is given in its turn.
        """
        first, spec = unit.tasks[0], self.visits[unit.visit].spec
        begins = first.kind is ActionKind.F and first.shard == 0 and not spec.stays
        return self._double_buffering and (queue.seconds < AHEAD_SECONDS or not begins)

    def _device(self, queue: DeviceQueue, nbytes: int) -> bool:
        """Return whether the device has room; begin to make it otherwise."""
        if self._evictor.free(queue) < nbytes:
            self._give(*self._evictor.on_device(queue, nbytes))
        return self._evictor.free(queue) >= nbytes

    def _demote(self, queue: DeviceQueue) -> None:
        """Write back what a device has changed and does not use next."""
        if queue.demoted != queue.changes:
            queue.demoted = queue.changes
            self._give(*self._evictor.demote(queue))

    def _finish_visits(self) -> None:
        """Publish every shard after its last task, and end visits that are through."""
        changed, self._changed = self._changed, set()
        visits = (self.visits[number] for number in changed if number in self.visits)
        for visit in sorted(visits, key=_arrival):
            if visit.status != "open" or not visit.is_in_last_window:
                continue
            states = self.ledger.states_of(visit.spec.visit)
            if visit.spec.graph.training:
                for state in states:
                    self._publish(visit, state)
                finished = len(visit.sent) == visit.spec.graph.shards
            else:
                finished = visit.done and all(state.at_rest for state in states)
            if finished:
                self._close(visit)
                self._give(VisitEnded(visit.spec.visit, "finished"))
                for state in states:
                    self._give(*self.ledger.discard(state))
                del self.visits[visit.spec.visit]

    def _publish(self, visit: Visit, state: Block) -> None:
        shard = state.key.number
        if visit.uses(state.key) or shard in visit.sent or visit.next_use(shard) < math.inf:
            return
        if state.at_rest and state.device is not None:
            self._give(self.ledger.leave_device(state))
        if state.at_rest:
            self._give(self.ledger.send(state))

    def _close(self, visit: Visit) -> None:
        """Take the visit's units off the queues, but for those that devices were given."""
        visit.put_back(self._take_back(visit))  # what was not given has no bytes
        if not visit.units:  # none writes boundary values any more
            self.ledger.drop_boundaries(visit.spec.visit)

    def _take_back(self, visit: Visit) -> list[Action]:
        """Take back what is reserved of the visit and return the tasks."""
        tasks: list[Action] = []
        for queue in self.queues.values():
            unit = queue.reserved
            if unit is not None and unit.visit == visit.spec.visit:
                self._note(visit.spec.visit)
                queue.reserved = None
                visit.end(unit)
                tasks += unit.tasks
        return tasks

    def _block(self, key: BlockKey) -> Block:
        block = self.ledger.get(key)
        assert block is not None, f"the {key.kind} {key.number} of visit {key.visit} is nowhere"
        return block

    # ------------------------------------------------------------------ events

    def _apply(self, event: WorkerEvent) -> None:
        match event:
            case VisitAdded():
                self._add(event)
            case ShardArrived():
                self._note(event.visit)
                visit = self.visits[event.visit]
                self.ledger.end(Action(event.visit, event.shard, ActionKind.RECV))
                if visit.spec.source is not None and visit.spec.graph.training:
                    self.ledger.take(visit.spec.source, event.shard)
                self._let_go(visit)
            case ActionDone():
                self._note(event.action.trial, event.action.device)
                self._done(event)
            case VisitCancelled():
                self._note_all()
                self._cancel(event.visit)
            case DeviceLost():
                self._note_all()
                self._lose(self.queues[event.device])
            case DeviceJoined():
                self._note_all()
                self.queues[event.device].alive = True
            case VisitsExpected():
                self._chooser.visits_expected = event.expected

    def _add(self, event: VisitAdded) -> None:
        queues = self.queues.values()
        alive, budgets = [queue.alive for queue in queues], [queue.budget for queue in queues]
        spec = on_least_busy(event.spec, alive, budgets, self.visits.values())
        if spec.visit in self.visits:
            raise ValueError(
                f"visit {spec.visit} was added before; number the visits of a worker apart"
            )
        reason = spec.lacking(budgets, self.ledger.host_budget)
        if reason:
            self._give(VisitEnded(spec.visit, "refused", reason))
        else:
            visit = Visit(spec, self._events, lambda place: self.queues[place].alive)
            self.visits[spec.visit] = visit
            self._coming.append(visit)

    def _done(self, event: ActionDone) -> None:
        action = event.action
        visit = self.visits[action.trial]
        if not action.kind.computes:
            self.ledger.end(action)
            if action.kind is ActionKind.SEND:
                visit.sent.add(action.shard)
            elif action.kind is ActionKind.LOAD and action.device != HOST:
                self._chooser.loaded(event.seconds)
            self._let_go(visit)
            return
        assert action.device is not None
        queue = self.queues[action.device]
        if not queue.unanswered or queue.unanswered[0] != action:
            raise ValueError(f"{action} was not given, or not yet; device {queue.number} is to do "
                             f"{' '.join(map(str, queue.unanswered)) or 'nothing'}")  # fmt: skip
        queue.unanswered.popleft()
        queue.clock += event.seconds
        self._now = max(self._now, queue.clock)
        task = unplaced(action)
        visit.finish(task, event.seconds)
        writes = visit.spec.shards[action.shard].forward_writes
        if visit.spec.graph.training and (action.kind is not ActionKind.F or writes):
            # A hook of a layer may change its buffers in backward; a graph has no hooks.
            hooks_write = writes and visit.spec.by_modules
            block = self._block(state_key(action.trial, action.shard))
            block.wrote(task, visit.most_open, hooks_write)
        if task == queue.given[0].tasks[-1]:
            self._end_unit(queue, visit)

    def _end_unit(self, queue: DeviceQueue, visit: Visit) -> None:
        unit = queue.given[0]
        ends = queue.last_of(visit) is unit and queue.is_ending(visit)
        if ends and visit in queue.staying:
            queue.staying.remove(visit)
            visit.staying.remove(queue.number)
            self._chooser.forget_homes()
        queue.end_first()
        visit.end(unit)
        visit.waiting_since = self._events
        self._let_go(visit)

    def _cancel(self, number: int) -> None:
        visit = self.visits.get(number)
        if visit is None:
            return
        if visit.status == "open":
            self._close(visit)
        visit.status = "cancelled"
        self._let_go(visit)

    def _let_go(self, visit: Visit) -> None:
        """Go on to forget a visit that is cancelled or begins anew, as its actions end."""
        if visit.status not in ("cancelled", "restarting"):
            return
        given = {key for q in self.queues.values() for unit in q.given for key in unit.keys}
        for state in self.ledger.states_of(visit.spec.visit):
            if state.at_rest and state.key not in given:
                self._give(*self.ledger.discard(state))
        if visit.units:
            return
        self.ledger.drop_boundaries(visit.spec.visit)
        for queue in self.queues.values():
            if visit in queue.staying:  # it has nothing there but shards that are on their way
                queue.staying.remove(visit)
                visit.staying.remove(queue.number)
                self._chooser.forget_homes()
        if self.ledger.states_of(visit.spec.visit):
            return
        if visit.status == "restarting":
            visit.begin()
            visit.status = "waiting"
            self._coming = sorted({*self._coming, visit}, key=_arrival)
            return
        del self.visits[visit.spec.visit]
        self._give(VisitEnded(visit.spec.visit, "cancelled"))

    # ------------------------------------------------------------------ lost devices

    def _lose(self, queue: DeviceQueue) -> None:
        """Put back what the device was to do, and what it had changed and not yet written."""
        redo: dict[int, list[Action]] = {}
        torn = {n for n, v in self.visits.items() if v in queue.staying or v.is_summed}
        for unit in queue.units:
            self.visits[unit.visit].end(unit)
        undone = [unplaced(task) for task in queue.unanswered]
        torn |= {task.trial for task in undone if self.visits[task.trial].changes_home(task)}
        undone += queue.reserved.tasks if queue.reserved is not None else ()
        for task in undone:
            redo.setdefault(task.trial, []).append(task)
            if not self.visits[task.trial].can_redo(task):
                torn.add(task.trial)
        for block in self.ledger.on(queue.number):
            visit = self.visits[block.key.visit]
            if block.dirty:
                redo.setdefault(visit.spec.visit, []).extend(block.unsaved)
                old = block.older_unsaved or not all(map(visit.can_redo, block.unsaved))
                old |= any(map(visit.changes_home, block.unsaved))
                if block.move == "spilling" or old or visit.spec.stays:
                    torn.add(visit.spec.visit)
            self.ledger.lose(block)
        self._answers = [  # it can't take off any more what another loss made useless just now
            each
            for each in self._answers
            if not isinstance(each, Action) or each.device != queue.number
        ]
        queue.alive = False
        queue.clear()
        self._chooser.forget_homes()
        for number, tasks in redo.items():
            visit = self.visits[number]
            if visit.status == "open" and number not in torn:
                visit.put_back([*tasks, *self._take_back(visit)])
        for visit in list(self.visits.values()):
            if visit.spec.visit in torn and visit.status == "open":
                self._close(visit)
                visit.status = "restarting"
                self._give(VisitRestarted(visit.spec.visit))
            self._let_go(visit)


def _arrival(visit: Visit) -> int:
    return visit.arrival
