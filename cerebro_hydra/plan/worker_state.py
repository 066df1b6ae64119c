"""The state machine decides which device of a worker does what next: events in, actions out.

::

    RunAdded ──────┐                      ┌─► t3s1F0@0 t3s1B0@0 t3s1U0@0    compute on a device
    ShardArrived ──┤   ┌─────────────┐    ├─► t3s1LOAD@0 t3s1SPILL@0        DRAM <-> device
    ActionDone ────┼──►│ WorkerState ├────┼─► t3s1LOAD@host t3s1SPILL@host  disk <-> DRAM
    DeviceLost ────┤   └─────────────┘    ├─► t3s1RECV t3s1SEND             other workers
    RunCancelled ──┘                      └─► RunEnded, RunRestarted

An agent's shell drives it: it hands each action to the process of its device, and every answer back
in. ``plan/simulate_worker.py`` drives the same machine on a virtual clock. A device does its
computing actions in the order in which it got them, and moves beside them.

When a device dies, the tasks whose changes were on it are done again from the shard's home in
DRAM. That works while the microbatch's boundary values are there. A run that has lost older changes
begins anew, from the state before it, which its sender keeps until the run is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.plan.device_queue import DeviceQueue
from cerebro_hydra.plan.run_progress import RunProgress
from cerebro_hydra.plan.worker_events import (
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
from cerebro_hydra.plan.worker_queues import WorkerQueues


class WorkerState(WorkerQueues):
    """Handles the events of one worker.

    It is not thread-safe: one writer hands in the events.
    """

    # ------------------------------------------------------------------ the public interface

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
        self.tiers.validate()
        boundaries = sum(run.boundary for run in self.runs.values())
        assert self.tiers.boundaries == boundaries, "bytes of boundary values in DRAM"
        for queue in self.queues.values():
            used = self.used(queue.number)
            assert used <= queue.budget, f"device {queue.number} has {used} of {queue.budget} bytes"
            assert queue.alive or queue.running is queue.reserved is None, f"{queue} is dead"
        under_way = [unit for run in self.runs.values() for unit in run.units]
        queued = [u for q in self.queues.values() for u in (q.running, q.reserved) if u]
        assert sorted(map(id, under_way)) == sorted(map(id, queued)), "a unit is in no queue"
        for run in self.runs.values():
            places = [q.number for q in self.queues.values() if q.has_unit_of(run)]
            assert len(places) <= 1, f"run {run.spec.run} has units on devices {places}"

    # ------------------------------------------------------------------ events

    def _apply(self, event: WorkerEvent) -> None:
        match event:
            case RunAdded():
                self._add(event)
            case ShardArrived():
                self.tiers.end(Action(event.run, event.shard, ActionKind.RECV))
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
        most = max(queue.budget for queue in self.queues.values())
        host_need, host = spec.host_need, self.tiers.host_budget
        if spec.device_need > most:
            reason = f"it needs {spec.device_need} bytes of a device, and the largest has {most}"
        elif host_need > host:
            reason = f"it needs {host_need} bytes of DRAM, and there are {host}"
        else:
            self.runs[spec.run] = RunProgress(spec, self._events)
            return
        self._answers.append(RunEnded(spec.run, "refused", reason))

    def _done(self, event: ActionDone) -> None:
        action = event.action
        run = self.runs[action.trial]
        if not action.kind.computes:
            self.tiers.end(action)
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
        run.learn(task, event.seconds)
        if run.spec.graph.training and (
            action.kind is not ActionKind.F or run.spec.shards[action.shard].forward_writes
        ):
            self._held(action.trial, action.shard).wrote(task)
        if not queue.unanswered:
            self._end_unit(queue, run)

    def _end_unit(self, queue: DeviceQueue, run: RunProgress) -> None:
        unit = queue.running
        assert unit is not None
        if queue.is_ending(run) and run in queue.staying:
            queue.staying.remove(run)
            run.device = None
        queue.running = None
        run.units.remove(unit)
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
        for held in self.tiers.of_run(run.spec.run):
            if held.at_rest and held.key not in running:
                self._answers += self.tiers.discard(held)
        if run.units:
            return
        self._give_back_boundary(run)
        if self.tiers.of_run(run.spec.run):
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
                run.units.remove(unit)
                undone = queue.unanswered if unit is queue.running else unit.tasks
                redo.setdefault(run.spec.run, []).extend(
                    Action(a.trial, a.shard, a.kind, a.microbatch) for a in undone
                )
        for held in self.tiers.on(queue.number):
            run = self.runs[held.key[0]]
            if held.dirty:
                redo.setdefault(run.spec.run, []).extend(held.unsaved)
                old = held.older_unsaved or held.unsaved[0].microbatch != run.microbatch
                if held.move == "spilling" or old or run.spec.stays:
                    torn.add(run.spec.run)
            self.tiers.lose(held)
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
