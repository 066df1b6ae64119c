"""Carries out sub-epochs and evaluations through the shard queues of a worker.

::

    tasks, cancels ──┐               ┌──► devices: load, compute, write back
    shards arrived ──┤  WorkerState  ├──► host: disk, digests, publishing
    devices' answers ┴──  one loop ──┴──► reports

The loop never waits: moves within the host have threads of their own, and whatever happens comes
back as work for the loop.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cerebro_hydra.agent.audits import QueueAudits
from cerebro_hydra.agent.device.messages import (
    Answer,
    Close,
    Closed,
    Compute,
    Computed,
    Done,
    Failed,
    Move,
    Open,
    Opened,
    Profile,
    Profiled,
    Ready,
)
from cerebro_hydra.agent.device.process import DeviceStart, WorkerDevice, WorkerDevices
from cerebro_hydra.agent.device.task_watch import MakeWatch, Progress, RunTime, Task
from cerebro_hydra.agent.memory.fetch import FetchManager, FetchRequest
from cerebro_hydra.agent.memory.shard_store import ShardStore
from cerebro_hydra.agent.queued_run import HostMoves, QueuedRun
from cerebro_hydra.agent.visits import AttemptReports, RunEnds, RunPlanner, TaskEntrance
from cerebro_hydra.agent.worker_loop import TICK_SECONDS, WorkerLoop
from cerebro_hydra.errors import TransferError
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.messages.instructions import FetchShards
from cerebro_hydra.plan.queues.events import (
    ActionDone,
    DeviceJoined,
    DeviceLost,
    RunAdded,
    RunEnded,
    RunReleased,
    RunRestarted,
    ShardArrived,
)
from cerebro_hydra.plan.queues.events import Answer as Decision
from cerebro_hydra.plan.queues.log import DeviceLog
from cerebro_hydra.plan.queues.run_progress import RunSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.shards.admission.profile import TrialProfile
from cerebro_hydra.storage.run_document import TrialSpec


class QueueTrainer:
    """Trains and evaluates in the queues of a worker. Thread-safe.

    Args:
        incarnation: names this agent.
        starts: each starts one device of the worker, again after it died.
        state: the queues, which know the same devices.
        planner: describes runs to the queues.
        report: takes an event for the coordinator.
        send: takes a message of progress for it.
        begin: tells it of an attempt that comes in; a device in this process tells by itself.
        audits: decides which sub-epochs are audited.
        broken: takes an error of the queues or devices themselves, which ends the agent.
        scratch: a folder on a disk of this machine.
        make_watch: makes what watches a run.
    """

    def __init__(
        self,
        incarnation: str,
        starts: Sequence[DeviceStart],
        state: WorkerState,
        planner: RunPlanner,
        shard_store: ShardStore,
        fetch_manager: FetchManager,
        report: Callable[[events.Event], None],
        send: Callable[[dict[str, Any]], object],
        begin: Callable[[int], object],
        audits: QueueAudits,
        broken: Callable[[Exception], object],
        scratch: str,
        make_watch: MakeWatch,
    ) -> None:
        self._incarnation = incarnation
        self._state = state
        self._log = DeviceLog(state, lambda run: self._runs[run].task.trial)
        self._loop = WorkerLoop(state, self._log, self._carry_out, broken, self._check_times)
        self._planner = planner
        self._shard_store = shard_store
        self._fetch_manager = fetch_manager
        self._report = report
        self._reports = AttemptReports(incarnation, fetch_manager, report)
        self._progress = Progress(send)
        self._begin = begin
        self._audits = audits
        self._make_watch = make_watch
        self._numbers = itertools.count()
        self._runs: dict[int, QueuedRun] = {}
        self._arriving: list[Action] = []
        through = self._loop.through
        self._host = HostMoves(shard_store, scratch, through(self._moved), through(self._no_room))
        self._devices = WorkerDevices(starts, through(self._hear), through(self._replace))
        self._entrance = TaskEntrance(planner, self._devices, self._reports, self._enter)
        self._ends = RunEnds(
            incarnation, self._loop, planner, audits, self._entrance, self._reports, shard_store,
            fetch_manager, self._report_devices, self._look,
        )  # fmt: skip

    def start(self) -> None:
        """Start the devices and the loop."""
        self._devices.start()
        self._loop.start()

    def learn(self, spec: TrialSpec) -> None:
        """Take in what a trial is, before anything else is asked of it."""
        if self._planner.learn(spec):
            self._loop.put(partial(self._entrance.forget, spec.trial))

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        self._loop.put(partial(self._forget, trial))

    def accept(self, attempt: int) -> None:
        """Note that an attempt will be performed, so that it can be taken back until it is done."""
        self._loop.put(partial(self._reports.accept, attempt))

    def perform(self, task: Task, uri: str | None) -> None:
        """Take a task, and report later how it ended."""
        self._loop.put(partial(self._add, task, uri))

    def prefetch(self, task: Task | FetchShards, uri: str | None) -> None:
        """Start fetching the state that a task begins with."""
        source = task.source
        shards = len(self._planner.trial(task.trial).shards)
        self._fetch_manager.fetch(
            FetchRequest(task.trial, source.visit, shards, source.incarnation, uri)
        )

    def cancel(self, attempt: int) -> None:
        """Take an attempt back, running or not, with what it published."""
        self._loop.put(partial(self._cancel, attempt))

    def drop(self, trial: int, visit: int) -> None:
        """Forget a state, which nobody needs from here any more."""
        self._fetch_manager.drop(trial, visit)
        self._loop.put(partial(self._release, trial, visit))

    def look_again(self) -> None:
        """Look whether shards have arrived; returns at once."""
        self._loop.put(self._look)

    def stop(self) -> None:
        """End the devices, because the run is over, whatever the loop does; returns at once."""
        self._loop.stop()
        self._devices.close()

    def close(self) -> None:
        """End the loop, and the devices that it has started meanwhile."""
        self.stop()
        self._loop.join()
        self._devices.close()
        self._host.close()

    # ------------------------------------------------------------------ tasks

    def _add(self, task: Task, uri: str | None) -> None:
        if task.attempt not in self._reports:
            return
        self._begin(task.attempt)
        self.prefetch(task, uri)
        self._entrance.enter(task)

    def _enter(self, task: Task, profile: TrialProfile) -> None:
        """Hand a task to the queues."""
        spec = self._planner.run_spec(next(self._numbers), task, profile)
        run = self._add_run(task, profile, spec)
        run.watched = self._audits.watches(task, profile)
        run.announce(self._shard_store)

    def _add_run(self, task: Task, profile: TrialProfile, spec: RunSpec) -> QueuedRun:
        trial = self._planner.trial(task.trial)
        look = self._shard_store.follow(task.trial, task.source.visit)
        timed = RunTime(task, self._make_watch, self._end_overdue)
        run = QueuedRun(trial, task, profile, spec, look, timed, self._planner.has_budget)
        self._runs = {n: r for n, r in self._runs.items() if n in self._state.runs or not r.over}
        self._runs[spec.run] = run
        self._loop.tell(RunAdded(spec))
        return run

    def _audit(self, run: QueuedRun) -> None:
        """Let the uncut model take the first step of a run, too."""
        spec = self._planner.audit_spec(next(self._numbers), run.spec, run.profile)
        run.audit = self._add_run(replace(run.task), run.profile, spec)
        run.audit.audits, run.audit.start_step = run, run.start_step

    def _cancel(self, attempt: int) -> None:
        self._reports.take_back(attempt)
        for run in self._runs.values():
            if run.task.attempt == attempt:
                self._ends.early(run)

    def _release(self, trial: int, visit: int) -> None:
        for run in self._runs.values():
            if run.state is not None and (run.task.trial, run.state.visit) == (trial, visit):
                self._loop.tell(RunReleased(run.number))

    def _forget(self, trial: int) -> None:
        self._planner.forget(trial)
        self._entrance.forget(trial)
        self._audits.forget(trial)
        self._fetch_manager.forget(trial)

    # ------------------------------------------------------------------ what the queues decide

    def _carry_out(self, decision: Decision | list[Action]) -> None:
        match decision:
            case list():
                self._compute(self._runs[decision[0].trial], decision)
            case RunEnded():
                self._end(self._runs[decision.run], decision)
            case RunRestarted():
                self._restart(self._runs[decision.run])
            case Action(kind=ActionKind.RECV):
                self._arriving.append(decision)
                self._look()
            case Action(device=None | -1):
                self._host.move(self._runs[decision.trial], decision)
            case Action():
                self._move(self._runs[decision.trial], decision)

    def _end(self, run: QueuedRun, ended: RunEnded) -> None:
        run.boundary = None
        if ended.outcome == "refused":
            self._ends.refused(run, ended.reason)
        elif ended.outcome == "finished" and not run.over:
            run.closing = set(run.opened)
            for device in run.closing:
                self._devices.ask(device, Close(run.number))
        elif ended.outcome == "cancelled":
            run.homes.clear()  # with their files

    def _report_devices(self) -> None:
        self._report(self._log.report(self._incarnation, time.monotonic()))

    def _restart(self, run: QueuedRun) -> None:
        self._ends.end_audit(run)
        run.cancel()
        run.retract(self._shard_store)
        run.begin_anew()
        run.announce(self._shard_store)

    def _compute(self, run: QueuedRun, tasks: list[Action]) -> None:
        if any(map(run.begins_last_step, tasks)):
            self._report(events.SubEpochEnding(run.task.attempt, self._incarnation))
        run.time.start()
        self._devices.ask(self._devices[tasks[0].device or 0], run.unit(tasks))

    def _move(self, run: QueuedRun, action: Action) -> None:
        assert action.device is not None
        device = self._devices[action.device]
        match action.kind:
            case ActionKind.LOAD:
                home = run.homes[action.shard]
                if device not in run.opened:
                    run.opened.add(device)
                    run.time.build()
                    self._audits.opens(run, device)
                    self._devices.ask(device, Open(run.order(home.cursor)))
                gradients = run.gradients(action.shard)
                device.give(Move(action, home.slabs, home.cursor, gradients))
            case ActionKind.SPILL:
                self._host.write_back(run, action, device)
            case _:
                device.give(Move(action))

    # ------------------------------------------------------------------ what has happened

    def _look(self) -> None:
        """Take shards that have arrived; of a run that is over, none will."""
        waiting, self._arriving = self._arriving, []
        for action in waiting:
            run = self._runs[action.trial]
            try:
                held = None if run.over else run.look(action.shard)
            except TransferError as error:
                self._ends.fail(run, TransferError.__name__, str(error))
                held = None
            if run.over:
                self._loop.tell(ShardArrived(action.trial, action.shard))
            elif held is None:
                self._arriving.append(action)
            else:
                self._host.receive(run, action, held)

    def _moved(self, run: QueuedRun, moved: ActionDone, error: Exception | None) -> None:
        action = moved.action
        if error is not None:
            self._ends.raised(run, error)
        if action.kind is ActionKind.RECV:
            run.begun = run.begun or time.perf_counter()
            self._loop.tell(ShardArrived(action.trial, action.shard))
        else:
            self._loop.tell(moved)

    def _no_room(self, run: QueuedRun, move: Move, device: WorkerDevice, error: Exception) -> None:
        """Fail a run whose changes can't leave their device; it lets go of them, and answers."""
        self._ends.raised(run, error)
        device.give(move)

    def _hear(self, device: WorkerDevice, answer: Answer) -> None:
        if device not in self._devices:
            return  # it has died
        asked = self._devices.hear(device, answer)
        match answer:
            case Ready():
                if (number := self._devices.ready(device)) is not None:
                    self._loop.tell(DeviceJoined(number))
            case Failed(run=int(number)) if number in self._runs:
                self._ends.fail(self._runs[number], answer.kind, answer.error, answer.lacking)
            case Profiled() | Failed() if isinstance(asked, Profile):
                self._entrance.hear(answer, asked.trial)
            case Opened(number) if number in self._runs:
                self._runs[number].time.built()
            case Closed(number, evaluation) if number in self._runs:
                self._runs[number].evaluation = evaluation
                self._ends.closed(self._runs[number], device)
            case Computed(tasks):
                self._computed(self._runs[tasks[0].action.trial], tasks)
            case Done(action, seconds, nbytes):
                self._loop.tell(ActionDone(action, seconds, nbytes))
                run = self._runs[action.trial]
                if action.kind is ActionKind.SPILL and not run.over and action.shard in run.homes:
                    run.homes[action.shard].changed(answer.cursor, answer.has_gradients)

    def _check_times(self) -> None:
        self._devices.age(TICK_SECONDS)
        for run in self._runs.values():
            if not run.over:
                run.time.check()

    def _end_overdue(self, task: Task, why: str) -> None:
        """Fail a run whose code takes too long, and end the device that runs it."""
        (run,) = (run for run in self._runs.values() if run.task is task)
        self._ends.fail(run, "", why)
        for number, queue in self._state.queues.items():
            if queue.running is not None and queue.running.run == run.number:
                self._devices[number].kill()

    def _computed(self, run: QueuedRun, tasks: Sequence[Done]) -> None:
        """Keep what the tasks of a unit gave."""
        run.time.stop(any(run.ends_batch(done.action) for done in tasks))
        for done in tasks:
            self._loop.tell(ActionDone(done.action, done.seconds))
            if not run.over:
                run.note(done)
                self._audits.note(run, done)
        if run.over:
            return
        if self._audits.is_due(run):
            self._audit(run)
        losses = [number for done in tasks for number in done.losses]
        if losses and run.audits is None and self._progress.is_due():
            self._progress.send(run.progress(max(losses)))

    def _replace(self, device: WorkerDevice) -> None:
        """Start a device that has died anew; its queue waits until it is ready."""
        number, was_up, order = self._devices.replace(device)
        if was_up:
            self._loop.tell(DeviceLost(number))
        if isinstance(order, Open | Compute | Close) and order.run in self._runs:
            self._ends.died(self._runs[order.run])
        for each in self._runs.values():
            each.opened.discard(device)
            if device in each.closing:
                self._ends.unclosed(each, device)
        if number == 0:
            self._entrance.ask_again(order.trial if isinstance(order, Profile) else None)
