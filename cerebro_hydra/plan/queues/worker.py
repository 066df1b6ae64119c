"""The state machine decides which device of a worker does what next: events in, actions out.

::

    RunAdded ──────┐                      ┌─► t3s1F0@0 t3s1B0@0 t3s1U0@0    compute on a device
    ShardArrived ──┤   ┌─────────────┐    ├─► t3s1LOAD@0 t3s1SPILL@0        DRAM <-> device
    ActionDone ────┼──►│ WorkerState ├────┼─► t3s1LOAD@host t3s1SPILL@host  disk <-> DRAM
    DeviceLost ────┤   └─────────────┘    ├─► t3s1RECV t3s1SEND             other workers
    RunCancelled ──┘                      └─► RunEnded, RunRestarted

An agent's shell drives it: it hands each action to the process of its device, and every answer back
in. ``plan/simulate/worker.py`` drives the same machine on a virtual clock. A device does its
computing actions in the order in which it got them, and moves beside them.

When a device dies, the tasks whose changes were on it are done again from the shard's home in
DRAM. That works while the microbatch's boundary values are there. A run that has lost older changes
begins anew, from the state before it, which its sender keeps until the run is committed.

The queues of a worker decide what each device runs and holds next.

Each run's schedule says which unit comes next on which device, and `TaskGraph.needs` whether it is
ready. A free device takes that of the run which the backend's rule picks; while it computes, the
next unit is reserved for it and brought to it, as far as the budget allows (double buffering). An
action is given when everything that it needs is there, so bytes never pass a budget. Room is made
by next use, and what a reserved unit needs comes before what another one may need later.

That is why there is always progress:

- No reserved unit waits for ever: ``WorkerState._may_stay`` says why nobody waits in a circle.
- If nothing is reserved or runs, some run has the device and the room for a task that is ready:
  one that keeps shards on devices has all devices of its window, and room for all shards in DRAM;
  if there is none, one that stays has its device, and DRAM for any one shard; if none stays, the
  first open run has. Of a window's tasks that are left, the first in an order of all lists which
  `TaskGraph.needs` allows is the first of its list, and ready.
- So all that such a task can lack is its shard in DRAM. Its next use is 0, and that of a shard
  whose list waits is at least 1 (``RunProgress.next_use``), so the second goes to disk for the
  first. Where all that is there is ready too, that goes on instead.

A device that has died is waited for by what only it may do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind
from cerebro_hydra.plan.queues.device_queue import DeviceQueue
from cerebro_hydra.plan.queues.events import (
    ActionDone,
    Answer,
    DeviceJoined,
    DeviceLost,
    RunAdded,
    RunCancelled,
    RunEnded,
    RunReleased,
    RunRestarted,
    ShardArrived,
    WorkerEvent,
)
from cerebro_hydra.plan.queues.evictor import Evictor
from cerebro_hydra.plan.queues.ledger import Block, BlockKey, Ledger, state_key
from cerebro_hydra.plan.queues.run_progress import RunProgress, RunSpec, Unit, placed
from cerebro_hydra.plan.schedules.pick import Candidate, Rule


class WorkerState:
    """Holds the queues, runs and ledger of one worker, and handles its events.

    It is not thread-safe: one writer hands in the events.

    Args:
        budgets: the bytes of each device; None means no limit.
        host_budget: the bytes of DRAM for shards and boundary values; None means no limit.
        rule: picks a run for a free device.
        double_buffering: whether a unit is reserved and brought while another one computes.
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
        self.runs: dict[int, RunProgress] = {}
        self._rule = rule
        self._double_buffering = double_buffering
        self._evictor = Evictor(self.ledger, self.runs, self.queues)
        self._events = 0
        self._answers: list[Answer] = []

    def used(self, place: int) -> int:
        """Return the bytes that are in use on a device, or in DRAM if the place is ``HOST``."""
        return self.ledger.host_used if place == HOST else self._evictor.used(self.queues[place])

    def budget(self, place: int) -> float:
        """Return the bytes that may be in use there."""
        return self.ledger.host_budget if place == HOST else self.queues[place].budget

    def handle(self, events: Iterable[WorkerEvent]) -> list[Answer]:
        """Handle what happened at one moment and return what to do, in this order."""
        self._answers = []
        for event in events:
            self._events += 1
            self._apply(event)
        while self._decide():
            pass
        return self._answers

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            AssertionError: an invariant is broken; the message names it and the object.
        """
        self.ledger.validate()
        pinned = dict.fromkeys(self.runs, 0)
        for block in self.ledger:
            assert block.key.run in self.runs, f"{block.key} is of no run"
            pinned[block.key.run] += block.nbytes if block.pinned else 0
        for queue in self.queues.values():
            used = self.used(queue.number)
            assert used <= queue.budget, f"device {queue.number} has {used} of {queue.budget} bytes"
            assert queue.alive or queue.running is queue.reserved is None, f"{queue} is dead"
        under_way = [unit for run in self.runs.values() for unit in run.units]
        queued = [u for q in self.queues.values() for u in (q.running, q.reserved) if u]
        assert sorted(map(id, under_way)) == sorted(map(id, queued)), "a unit is in no queue"
        for run in self.runs.values():
            boundary = run.spec.host_boundary_bytes if run.status == "open" or run.units else 0
            assert pinned[run.spec.run] == boundary, f"boundary values of run {run.spec.run}"
            places = [q.number for q in self.queues.values() if q.has_unit_of(run)]
            assert len(places) <= len(run.lists), f"run {run.spec.run} is on devices {places}"
            staying = {q.number for q in self.queues.values() if run in q.staying}
            assert run.status == "restarting" or run.staying == staying, f"{run.spec.run} stays"

    # ------------------------------------------------------------------ decisions

    def _decide(self) -> bool:
        """Make the decisions that are due; return whether there may be more."""
        before = len(self._answers)
        self._open_runs()
        self._receive()
        queues = [queue for queue in self.queues.values() if queue.alive]
        for queue in queues:  # every idle device is served before anything is reserved
            if queue.idle:
                self._assign(queue, None)
        for queue in queues:
            self._advance(queue)
        for queue in queues:
            if self._double_buffering and queue.running is not None and queue.reserved is None:
                self._assign(queue, self.runs[queue.running.run])
        for queue in queues:
            self._advance(queue)
            self._answers += self._evictor.demote(queue)
        self._finish_runs()
        return len(self._answers) > before

    def _open_runs(self) -> None:
        """Give runs their room for boundary values, as long as every one can still go on."""
        for run in self.runs.values():
            if run.status != "waiting":
                continue
            opened = [r.spec for r in self.runs.values() if r.status == "open"] + [run.spec]
            nbytes = run.spec.host_boundary_bytes
            need = self.ledger.host_pinned + nbytes + self._kept_in_dram(but=run)
            need += max(spec.host_state_bytes for spec in opened)
            if need > self.ledger.host_budget or not self._dram(nbytes, -1):
                return
            if nbytes:
                places = run.most_open
                self.ledger.pin_boundaries(run.spec.run, places, nbytes // places)
            run.status = "open"

    def _receive(self) -> None:
        """Receive shards in the order of their use, as DRAM has room for them."""
        for run in self.runs.values():
            if run.status != "open":
                continue
            for shard in sorted(run.absent, key=run.next_use):
                nbytes = run.spec.shards[shard].state
                urgent = bool(run.staying) and run.next_use(shard) == 0
                if not self._dram(nbytes, -1 if urgent else run.next_use(shard)):
                    break
                self._answers.append(self.ledger.receive(run.spec.run, shard, nbytes))
                run.absent.remove(shard)

    def _dram(self, nbytes: int, beyond: float) -> bool:
        """Return whether DRAM has room; begin to make it by what is used later than ``beyond``."""
        if self.ledger.host_free < nbytes:
            self._answers += self._evictor.in_dram(nbytes, beyond)
        return self.ledger.host_free >= nbytes

    def _assign(self, queue: DeviceQueue, running: RunProgress | None) -> None:
        """Reserve the unit that the rule picks, among idle runs and the running one."""
        units: dict[int, Unit] = {}
        candidates = []
        for run in self.runs.values():
            tasks = run.list_on(queue.number) if run.status == "open" else None
            if tasks is None or (tasks.units and run is not running):
                continue
            unit = run.next_unit(tasks)
            if unit is None or not self._can_take(queue, run, unit):
                continue
            number = run.spec.run
            units[number] = unit
            candidates.append(
                Candidate(number, run.arrival, run.remaining, run.waiting_since, run is running)
            )
        picked = self._rule(candidates) if candidates else None
        if picked is None:
            return
        run, unit = self.runs[picked.run], units[picked.run]
        run.take(unit)
        queue.reserved = unit
        if run.spec.stays and unit.starts_microbatch:
            for place in self._places(queue, run):
                if run not in place.staying:
                    place.staying.append(run)
                    run.staying.add(place.number)

    def _can_take(self, queue: DeviceQueue, run: RunProgress, unit: Unit) -> bool:
        """Return whether the unit can come to the device and end there, whatever else goes on."""
        spec = run.spec
        if run.staying and queue.number not in run.staying and not run.has_places:
            return False
        for key in unit.keys:
            block = self.ledger.get(key)
            if block is None or block.home == "receiving":
                return False
        shard = spec.shards[unit.shards[0]]
        nbytes, host_nbytes = shard.state + shard.activations, shard.state
        if spec.stays and (unit.starts_microbatch or run in queue.staying):
            nbytes, host_nbytes = run.share_on(queue.number).need, spec.host_state_bytes
            if unit.starts_microbatch and not self._may_stay(queue, run):
                return False
        host = host_nbytes + self._kept_in_dram(but=run) + self.ledger.host_pinned
        return host <= self.ledger.host_budget and nbytes <= queue.budget - queue.pinned(but=run)

    def _may_stay(self, queue: DeviceQueue, run: RunProgress) -> bool:
        """Return whether a microbatch, or a pipelined window, may begin to stay on its devices.

        It takes all of them at once, and each must have nothing reserved for another run then, and
        no other run that goes on staying. That is why runs never wait for one another in a circle:
        a unit is reserved only if it fits beside all that stays by then, so it waits for a run that
        began to stay later, and that one for a unit which was reserved still later. The last of
        such a chain waits for nobody.
        """
        return all(
            place.alive
            and place.reserved is None
            and all(each is run or place.is_ending(each) for each in place.staying)
            for place in self._places(queue, run)
            if run not in place.staying or place.is_ending(run)
        )

    def _places(self, queue: DeviceQueue, run: RunProgress) -> list[DeviceQueue]:
        """Return the devices on which a run stays that begins to on this one."""
        return [self.queues[k] for k in range(len(run.lists))] if run.has_places else [queue]

    def _kept_in_dram(self, but: RunProgress) -> int:
        """Return the bytes of DRAM that microbatches keep as the homes of what is on a device."""
        staying = {run.spec.run: run for queue in self.queues.values() for run in queue.staying}
        others = [run.spec for run in staying.values() if run is not but]
        return sum(spec.state_bytes for spec in others if spec.keeps_all)

    def _advance(self, queue: DeviceQueue) -> None:
        """Bring the reserved unit's shards closer, and start the unit when it can run."""
        unit = queue.reserved
        if unit is None:
            return
        states = [self._block(key) for key in unit.keys]
        if all(state.at_rest and state.device == queue.number for state in states):
            self._begin(queue, unit)
        for state in states:
            self._bring(queue, state)

    def _bring(self, queue: DeviceQueue, block: Block) -> None:
        """Bring a block a step closer to a device."""
        if not block.at_rest:
            return
        if block.device not in (None, queue.number):
            self._answers.append(self.ledger.leave_device(block))
            if not block.at_rest:
                return
        if block.device == queue.number:
            return
        if block.home == "disk":
            if self._dram(block.nbytes, -1):
                self._answers.append(self.ledger.load_from_disk(block))
        elif self._device(queue, block.nbytes):
            self._answers.append(self.ledger.load(block, queue.number))

    def _begin(self, queue: DeviceQueue, unit: Unit) -> None:
        """Start the reserved unit, whose shards are there, if the device is free and has room."""
        if queue.running is None and self._device(queue, self._evictor.work(queue, unit)):
            queue.running, queue.reserved = unit, None
            run, newest = self.runs[unit.run], unit.tasks[-1].microbatch or 0
            run.microbatch = max(newest, run.microbatch or 0)
            queue.unanswered.extend(placed(unit, queue.number))
            self._answers += queue.unanswered

    def _device(self, queue: DeviceQueue, nbytes: int) -> bool:
        """Return whether the device has room; begin to make it otherwise."""
        if self._evictor.free(queue) < nbytes:
            self._answers += self._evictor.on_device(queue, nbytes)
        return self._evictor.free(queue) >= nbytes

    def _finish_runs(self) -> None:
        """Publish every shard after its last task, and end runs that are through."""
        for run in list(self.runs.values()):
            if run.status != "open" or not run.is_in_last_window:
                continue
            states = self.ledger.states_of(run.spec.run)
            if run.spec.graph.training:
                for state in states:
                    self._publish(run, state)
                finished = len(run.sent) == run.spec.graph.shards
            else:
                finished = run.done and all(state.at_rest for state in states)
            if finished:
                self._close(run)
                run.status = "finished"
                self._answers.append(RunEnded(run.spec.run, "finished"))
                if not run.spec.graph.training:
                    for state in states:
                        self._answers += self.ledger.discard(state)
                    del self.runs[run.spec.run]

    def _publish(self, run: RunProgress, state: Block) -> None:
        shard = state.key.number
        busy = any(unit.uses(state.key) for unit in run.units)
        if busy or shard in run.sent or run.next_use(shard) < math.inf:
            return
        if state.at_rest and state.device is not None:
            self._answers.append(self.ledger.leave_device(state))
        if state.at_rest:
            self._answers.append(self.ledger.send(state))

    def _close(self, run: RunProgress) -> None:
        """Take the run's units off the queues, but for the one that runs."""
        run.put_back(self._take_back(run))  # what has not begun has no bytes
        if not run.units:  # none writes boundary values any more
            self.ledger.drop_boundaries(run.spec.run)

    def _take_back(self, run: RunProgress) -> list[Action]:
        """Take back what is reserved of the run and return the tasks."""
        tasks: list[Action] = []
        for queue in self.queues.values():
            unit = queue.reserved
            if unit is not None and unit.run == run.spec.run:
                queue.reserved = None
                run.end(unit)
                tasks += unit.tasks
        return tasks

    def _block(self, key: BlockKey) -> Block:
        block = self.ledger.get(key)
        assert block is not None, f"the {key.kind} {key.number} of run {key.run} is nowhere"
        return block

    # ------------------------------------------------------------------ events

    def _apply(self, event: WorkerEvent) -> None:
        match event:
            case RunAdded():
                self._add(event)
            case ShardArrived():
                self.ledger.end(Action(event.run, event.shard, ActionKind.RECV))
                self._let_go(self.runs[event.run])
            case ActionDone():
                self._done(event)
            case RunCancelled():
                self._cancel(event.run)
            case RunReleased():
                run = self.runs.get(event.run)
                if run is not None and run.status == "finished":
                    run.status = "released"
                    self._let_go(run)
            case DeviceLost():
                self._lose(self.queues[event.device])
            case DeviceJoined():
                self.queues[event.device].alive = True

    def _add(self, event: RunAdded) -> None:
        spec = event.spec
        if spec.run in self.runs:
            raise ValueError(f"run {spec.run} was added before; number the runs of a worker apart")
        reason = self._lacking(spec)
        if reason:
            self._answers.append(RunEnded(spec.run, "refused", reason))
        else:
            self.runs[spec.run] = RunProgress(spec, self._events)

    def _lacking(self, spec: RunSpec) -> str:
        """Return what a run needs that the worker does not have; "" if nothing is lacking."""
        budgets = [queue.budget for queue in self.queues.values()]
        shares, host = spec.shares(), self.ledger.host_budget
        if len(shares) > len(budgets):
            return f"its schedule needs {len(shares)} devices, and there are {len(budgets)}"
        if len(shares) == 1 and spec.device_need > max(budgets):
            return (
                f"it needs {spec.device_need} bytes of a device, and the largest has {max(budgets)}"
            )
        for device, share in enumerate(shares if len(shares) > 1 else ()):
            if share.need > budgets[device]:
                has = budgets[device]
                return f"it needs {share.need} bytes of device {device}, which has {has}"
        if spec.host_need > host:
            return f"it needs {spec.host_need} bytes of DRAM, and there are {host}"
        return ""

    def _done(self, event: ActionDone) -> None:
        action = event.action
        run = self.runs[action.trial]
        if not action.kind.computes:
            self.ledger.end(action)
            if action.kind is ActionKind.SEND:
                run.sent.add(action.shard)
            self._let_go(run)
            return
        assert action.device is not None
        queue = self.queues[action.device]
        if not queue.unanswered or queue.unanswered[0] != action:
            raise ValueError(f"{action} was not given, or not yet; device {queue.number} is to do "
                             f"{' '.join(map(str, queue.unanswered)) or 'nothing'}")  # fmt: skip
        queue.unanswered.popleft()
        task = Action(action.trial, action.shard, action.kind, action.microbatch)
        run.finish(task, event.seconds)
        if run.spec.graph.training and (
            action.kind is not ActionKind.F or run.spec.shards[action.shard].forward_writes
        ):
            self._block(state_key(action.trial, action.shard)).wrote(task, run.most_open)
        if not queue.unanswered:
            self._end_unit(queue, run)

    def _end_unit(self, queue: DeviceQueue, run: RunProgress) -> None:
        unit = queue.running
        assert unit is not None
        if queue.is_ending(run) and run in queue.staying:
            queue.staying.remove(run)
            run.staying.remove(queue.number)
        queue.running = None
        run.end(unit)
        run.waiting_since = self._events
        self._let_go(run)

    def _cancel(self, number: int) -> None:
        run = self.runs.get(number)
        if run is None or run.status in ("finished", "released"):
            return
        if run.status == "open":
            self._close(run)
        run.status = "cancelled"
        self._let_go(run)

    def _let_go(self, run: RunProgress) -> None:
        """Go on to forget a run that is cancelled or begins anew, as its actions end."""
        if run.status not in ("cancelled", "restarting", "released"):
            return
        running = {key for q in self.queues.values() if q.running for key in q.running.keys}
        for state in self.ledger.states_of(run.spec.run):
            if state.at_rest and state.key not in running:
                self._answers += self.ledger.discard(state)
        if run.units:
            return
        self.ledger.drop_boundaries(run.spec.run)
        if self.ledger.states_of(run.spec.run):
            return
        for queue in self.queues.values():
            if run in queue.staying:
                queue.staying.remove(run)
        if run.status == "restarting":
            run.begin()
            run.status = "waiting"
            return
        del self.runs[run.spec.run]
        if run.status == "cancelled":
            self._answers.append(RunEnded(run.spec.run, "cancelled"))

    # ------------------------------------------------------------------ lost devices

    def _lose(self, queue: DeviceQueue) -> None:
        """Put back what the device was to do, and what it had changed and not yet written."""
        redo: dict[int, list[Action]] = {}
        torn: set[int] = {run.spec.run for run in queue.staying}
        for unit in (queue.running, queue.reserved):
            if unit is not None:
                run = self.runs[unit.run]
                run.end(unit)
                undone = queue.unanswered if unit is queue.running else unit.tasks
                redo.setdefault(run.spec.run, []).extend(
                    Action(a.trial, a.shard, a.kind, a.microbatch) for a in undone
                )
        for block in self.ledger.on(queue.number):
            run = self.runs[block.key.run]
            if block.dirty:
                redo.setdefault(run.spec.run, []).extend(block.unsaved)
                old = block.older_unsaved or not all(map(run.can_redo, block.unsaved))
                if block.move == "spilling" or old or run.spec.stays:
                    torn.add(run.spec.run)
            self.ledger.lose(block)
        self._answers = [  # it can't take off any more what another loss made useless just now
            each
            for each in self._answers
            if not isinstance(each, Action) or each.device != queue.number
        ]
        queue.alive, queue.running, queue.reserved = False, None, None
        queue.unanswered = deque()
        queue.staying.clear()
        for number, tasks in redo.items():
            run = self.runs[number]
            if run.status == "open" and number not in torn:
                run.put_back([*tasks, *self._take_back(run)])
        for run in list(self.runs.values()):
            if run.spec.run in torn and run.status == "open":
                self._close(run)
                run.status = "restarting"
                self._answers.append(RunRestarted(run.spec.run))
            self._let_go(run)
