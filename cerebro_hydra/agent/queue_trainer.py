"""Carries out sub-epochs and evaluations through the shard queues of a worker.

::

    tasks, cancels ──┐               ┌──► devices: load, compute, write back
    shards arrived ──┤  WorkerState  ├──► host: disk, digests, publishing
    devices' answers ┴── one thread ─┴──► reports

This thread never waits: moves within the host have threads of their own, and whatever happens comes
to its inbox.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from cerebro_hydra.agent.attempts import AttemptReports, Outbox, TaskEntrance, VisitPlanner
from cerebro_hydra.agent.audits import (
    AUDIT_PATIENCE,
    OVERDUE_AUDIT,
    WRITTEN_LATE,
    AuditRoom,
    Audits,
)
from cerebro_hydra.agent.device.messages import (
    Answer,
    Close,
    Closed,
    Compute,
    Computed,
    Done,
    Failed,
    FailureKind,
    Forget,
    Move,
    Open,
    Opened,
    Profile,
    Profiled,
    Ready,
)
from cerebro_hydra.agent.device.task_watch import (
    BatchSeconds,
    Progress,
    Task,
    TimeLimits,
    VisitTime,
    described,
)
from cerebro_hydra.agent.device.worker_devices import DeviceStart, Unit, WorkerDevice, WorkerDevices
from cerebro_hydra.agent.inbox import TICK_SECONDS, Inbox
from cerebro_hydra.agent.memory.fetch import FetchManager, FetchRequest
from cerebro_hydra.agent.memory.out_of_memory import memory_that_ran_out
from cerebro_hydra.agent.memory.shard_store import ShardHome, ShardStore
from cerebro_hydra.agent.visit import Arrivals, HostMoves, Visit
from cerebro_hydra.errors import TransferError
from cerebro_hydra.foreign_text import traceback_text
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.messages.instructions import FetchShards
from cerebro_hydra.plan.queues.events import (
    ActionDone,
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
from cerebro_hydra.plan.queues.events import Answer as Decision
from cerebro_hydra.plan.queues.log import DeviceLog
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.storage.run_document import TrialSpec

_REMEDY = "raise device_memory or host_memory, or cut the trial into more shards"


class QueueTrainer:
    """Trains and evaluates in the queues of a worker. Thread-safe.

    Args:
        starts: each starts one device of the worker, again after it died.
        planner: describes visits to the queues.
        shard_store: has the queues, too, which know the same devices.
        outbox: takes what is to be told.
        audits: decides which steps are audited.
        limits: of the time that tasks take.
    """

    def __init__(
        self,
        starts: Sequence[DeviceStart],
        planner: VisitPlanner,
        shard_store: ShardStore,
        fetch_manager: FetchManager,
        outbox: Outbox,
        audits: Audits,
        limits: TimeLimits,
    ) -> None:
        self._queues = shard_store.segments.queues
        self._told: list[WorkerEvent] = []  # what the queues have yet to hear
        self._activity = DeviceLog(self._queues, lambda visit: self._visits[visit].task.trial)
        self._inbox = Inbox(self._check_times)
        self._thread = threading.Thread(target=self._run, name="shard-queues", daemon=True)
        self._planner = planner
        self._shard_store = shard_store
        self._fetch_manager = fetch_manager
        self._outbox = outbox
        self._reports = AttemptReports(outbox, fetch_manager)
        self._progress = Progress(outbox.send)
        self._audits = audits
        self._limits, self._known_seconds = limits, BatchSeconds()
        self._numbers = itertools.count()
        self._visits: dict[int, Visit] = {}
        self._arrivals = Arrivals(shard_store)
        through = self._inbox.through
        self._host = HostMoves(shard_store, through(self._moved), through(self._raised))
        hear = self._inbox.gathered(self._hear)
        self._devices = WorkerDevices(starts, hear, through(self._replace))
        self._entrance = TaskEntrance()

    def start(self) -> None:
        """Start the devices and the thread of the queues."""
        self._devices.start()
        self._thread.start()

    def _run(self) -> None:
        """Do what comes in, one piece after the other, and all that the queues decide of it."""
        try:
            for work in self._inbox:
                work()
                while self._told:
                    told, self._told = self._told, []
                    self._activity.hear(time.monotonic(), told)
                    with self._shard_store.segments.lock:
                        decisions = self._queues.handle(told)
                    self._activity.look()
                    for decision in decisions:
                        self._carry_out(decision)
        except Exception as error:
            self._outbox.fail(error)

    def learn(self, spec: TrialSpec) -> None:
        """Take in what a trial is, before anything else is asked of it."""
        if self._planner.learn(spec):
            self._inbox.put(partial(self._forget_cut, spec.trial))

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        self._inbox.put(partial(self._forget, trial))

    def perform(self, task: Task, uri: str | None) -> None:
        """Take a task, and report later how it ended, unless it is taken back before."""
        self._inbox.put(partial(self._add, task, uri))

    def prefetch(self, task: Task | FetchShards, uri: str | None) -> None:
        """Start fetching the state that a task begins with."""
        source = task.source
        shards = len(self._planner.trial(task.trial).shards)
        self._fetch_manager.fetch(
            FetchRequest(task.trial, source.state, shards, source.incarnation, uri)
        )

    def cancel(self, attempt: int) -> None:
        """Take an attempt back, running or not, with what it published."""
        self._inbox.put(partial(self._cancel, attempt))

    def expect(self, tasks: bool) -> None:
        """Note whether other tasks may follow those that came."""
        self._inbox.put(lambda: self._told.append(VisitsExpected(tasks)))

    def look_again(self) -> None:
        """Look whether shards have arrived; returns at once."""
        self._inbox.put(self._look)

    def stop(self) -> None:
        """End the devices, because the run is over, whatever they do; returns at once."""
        self._inbox.close()
        self._devices.close()

    def close(self) -> None:
        """End the thread of the queues, and the devices that it has started meanwhile."""
        self.stop()
        self._thread.join()
        self._devices.close()
        self._host.close()

    # ------------------------------------------------------------------ tasks

    def _add(self, task: Task, uri: str | None) -> None:
        self._reports.accept(task.attempt)
        self._outbox.begin(task.attempt)
        self.prefetch(task, uri)
        self._enter(task)

    def _enter(self, task: Task) -> None:
        """Let a task in as soon as it may enter; the first device profiles its trial before."""
        if self._entrance.wait(task):
            self._ask_profile(task.trial)
        self._let_in()

    def _ask_profile(self, trial: int) -> None:
        order = Profile(self._planner.trial(trial), self._entrance.asking(trial))
        self._devices.ask(self._devices[0], order)

    def _let_in(self) -> None:
        """Hand tasks to the queues that may enter now, unless they were taken back."""
        while (task := self._entrance.next()) is not None:
            if task.attempt not in self._reports:
                self._entrance.leave(task.trial)
                continue
            profile = self._entrance.profiles[task.trial]
            spec = self._planner.visit_spec(next(self._numbers), task, profile)
            visit = self._add_visit(task, profile, spec)
            self._audits.watch(visit)
            visit.announce(self._shard_store)

    def _add_visit(
        self, task: Task, profile: TrialProfile, spec: VisitSpec, audits: Visit | None = None
    ) -> Visit:
        trial, resident = self._planner.trial(task.trial), self._planner.resident
        visit = Visit(
            trial,
            task,
            profile,
            replace(spec, recompute=False, whole=True) if resident else spec,
            self._shard_store.follow(task.trial, task.source.state),
            VisitTime(
                task, self._limits, self._known_seconds, partial(self._end_overdue, spec.visit)
            ),
            limited=self._planner.has_budget,
            recompute=spec.recompute,
            resident=resident,
            audits=audits,
        )
        self._visits = {
            number: each for number, each in self._visits.items() if not (each.over and each.ended)
        }
        self._visits[spec.visit] = visit
        self._told.append(VisitAdded(visit.spec))
        return visit

    def _cancel(self, attempt: int) -> None:
        self._reports.take_back(attempt)
        for visit in tuple(self._visits.values()):
            if visit.task.attempt == attempt:
                was_over = visit.over
                self._end_early(visit)
                if not (was_over or visit.audits):
                    self._leave(visit)

    def _forget(self, trial: int) -> None:
        self._planner.forget(trial)
        self._forget_cut(trial)
        self._audits.forget(trial)
        self._known_seconds.forget(trial)
        self._fetch_manager.forget(trial)

    def _forget_cut(self, trial: int) -> None:
        """Forget a trial's cut, with what devices have built of it."""
        self._entrance.forget(trial)
        self._devices.tell(Forget(trial))

    # ------------------------------------------------------------------ audits

    def _choose_audit(self, visit: Visit) -> None:
        """Choose the step of a visit that is audited; the visit waits for that, and nobody else."""

        def chosen(room: Future[AuditRoom]) -> None:
            if visit.choosing:
                visit.choosing = False
                self._audits.choose(visit, room.result())
            self._order_units(self._devices.gate.open(visit.number))
            self._begin_audit(visit)
            self._finish_closed(visit)

        visit.choosing = True
        self._devices.gate.shut(visit.number)
        find = partial(AuditRoom.find, self._shard_store.segments, visit)
        self._host.do(find, self._inbox.through(chosen))

    def _begin_audit(self, visit: Visit) -> None:
        """Let the uncut model take a step of a visit, too, once all is there that it needs."""
        if (window := self._audits.begins(visit)) is not None:
            spec = self._planner.audit_spec(next(self._numbers), visit.spec, window, visit.profile)
            visit.give_to(self._add_visit(replace(visit.task), visit.profile, spec, audits=visit))

    def _copied(self, visit: Visit, shard: int, home: ShardHome) -> None:
        """Keep a copy of a shard for an audit; it lies on disk where memory has a budget."""
        if visit.resident:
            visit.given[shard] = home
            return
        window = visit.audited

        def away(done: Future[None]) -> None:
            if visit.audited != window:
                return  # the visit began anew
            if (error := done.exception()) is not None and not visit.over:
                self._audits.give_up(visit, str(error))
            visit.given[shard] = home
            self._begin_audit(visit)
            self._finish_closed(visit)

        self._host.do(home.to_disk, self._inbox.through(away))

    # ------------------------------------------------------------------ what the queues decide

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case tuple():
                self._compute(self._visits[decision[0].trial], decision)
            case VisitEnded():
                self._end(self._visits[decision.visit], decision)
            case VisitRestarted():
                self._restart(self._visits[decision.visit])
            case Action(kind=ActionKind.RECV):
                self._arrivals.wait(self._visits[decision.trial], decision)
                self._look()
            case Action(device=None | -1):
                self._host.move(self._visits[decision.trial], decision)
            case Action():
                self._move(self._visits[decision.trial], decision)

    def _end(self, visit: Visit, ended: VisitEnded) -> None:
        visit.boundary, visit.ended = None, True
        if ended.outcome == "cancelled" and visit.resident:
            self._mend(visit)  # its code is over
        if ended.outcome == "refused":
            self._fail(visit, FailureKind.OTHER, f"{ended.reason}; {_REMEDY}")
        elif ended.outcome == "finished" and not visit.over:
            visit.closing = set(visit.opened)
            for device in visit.closing:
                self._devices.ask(device, Close(visit.number))
            if not visit.closing:  # those that did its tasks have died since
                self._unclosed(visit)
        elif ended.outcome == "cancelled":
            visit.homes.clear()  # with their files

    def _restart(self, visit: Visit) -> None:
        if visit.over:
            return
        if visit.audits is not None and visit.audits.audited:
            self._end_early(visit)  # the copies that it began with are lost
            self._go_on(visit.audits, None)
            return
        self._end_audit(visit)
        self._stop(visit)
        visit.retract(self._shard_store)
        visit.begin_anew()
        visit.time.begin_anew()
        visit.announce(self._shard_store)

    def _stop(self, visit: Visit) -> None:
        """End a visit where it stands, on devices that leave its units undone from now on."""
        visit.cancel()
        visit.choosing = False
        self._order_units(self._devices.gate.remove(visit.number))

    def _compute(self, visit: Visit, unit: Unit) -> None:
        if self._audits.is_due(visit, unit):
            self._choose_audit(visit)
        if not self._devices.gate.holds(unit):
            self._order_units([unit])

    def _order_units(self, units: Iterable[Unit]) -> None:
        for unit in units:
            visit, device = self._visits[unit[0].trial], self._devices[unit[0].device or 0]
            if not visit.over and any(map(visit.begins_last_step, unit)):
                self._reports.ending(visit.task)
            if self._devices.ask(device, visit.unit(unit)):
                self._start_clock(device, time.monotonic())

    def _start_clock(self, device: WorkerDevice, now: float) -> None:
        """Note that a device begins with the unit that it was asked for first, if there is one."""
        if (unit := self._devices.unit(device)) is not None:
            visit = self._visits[unit.visit]
            visit.time.start(device, device.thread, visit.batches(unit.tasks), now)

    def _move(self, visit: Visit, action: Action) -> None:
        assert action.device is not None
        device = self._devices[action.device]
        match action.kind:
            case ActionKind.LOAD:
                home = visit.homes[action.shard]
                if device not in visit.opened:
                    visit.opened.add(device)
                    visit.time.build(device)
                    self._audits.opens(visit, device)
                    self._devices.ask(device, Open(visit.order(home.cursor)))
                device.give(visit.load(action))
            case ActionKind.SPILL:
                self._host.write_back(visit, action, device)
            case _:
                device.give(Move(action))

    # ------------------------------------------------------------------ what has happened

    def _look(self) -> None:
        """Take shards that have arrived; of a visit that is over, none will."""
        for visit, action, held in self._arrivals.look():
            if isinstance(held, TransferError):
                self._fail(visit, FailureKind.TRANSFER, str(held))
            if visit.over:
                self._told.append(ShardArrived(action.trial, action.shard))
            else:
                assert not isinstance(held, TransferError)
                self._host.receive(visit, action, held)

    def _moved(self, visit: Visit, moved: ActionDone, error: Exception | None) -> None:
        action = moved.action
        if error is not None:
            self._raised(visit, error)
        if action.kind is ActionKind.RECV:
            visit.begun = visit.begun or time.perf_counter()
            self._told.append(ShardArrived(action.trial, action.shard))
        else:
            self._told.append(moved)

    def _hear(self, heard: Sequence[tuple[WorkerDevice, Answer]]) -> None:
        for device, answer, moment in self._devices.present(heard):
            asked = self._devices.hear(device, answer)
            match answer:
                case Ready():
                    if (number := self._devices.ready(device)) is not None:
                        self._told.append(DeviceJoined(number))
                case Failed(visit=int(number)) if number in self._visits:
                    self._fail(self._visits[number], answer.kind, answer.error, answer.lacking)
                case Profiled() | Failed() if isinstance(asked, Profile):
                    self._profiled(answer, asked.trial)
                case Opened(number) if number in self._visits:
                    self._visits[number].time.built(device)
                case Closed(number, evaluation) if number in self._visits:
                    self._visits[number].note_closed(device, evaluation)
                    self._closed(self._visits[number])
                case Computed(tasks):
                    self._computed(self._visits[tasks[0].action.trial], device, tasks, moment)
                case Done(action, seconds, nbytes):
                    self._told.append(ActionDone(action, seconds, nbytes))
                    self._visits[action.trial].note_move(answer)

    def _profiled(self, answer: Profiled | Failed, asked: TrialSpec) -> None:
        """Take what the first device found out about a trial, unless it was cut finer meanwhile."""
        if not self._planner.knows(asked.trial) or self._planner.trial(asked.trial) != asked:
            return
        if isinstance(answer, Failed):
            for task in self._entrance.unprofiled(answer.trial):
                self._reports.failed(task, answer.kind, answer.error, answer.lacking)
        else:
            self._entrance.profiled(answer.trial, answer.profile)
            self._let_in()

    def _check_times(self) -> None:
        self._devices.age(TICK_SECONDS)
        for visit in tuple(self._visits.values()):  # also one that is over, whose code may hang
            patience = 1 if visit.audits is None else AUDIT_PATIENCE
            visit.time.check(patience, self._devices.silence(visit.time.computing))

    def _end_overdue(self, number: int, why: str, longest: WorkerDevice | None) -> None:
        """Fail a task whose code takes too long, or its audit's; end the device that hangs."""
        visit = self._visits[number]
        if not visit.over:
            failed = visit if visit.audits is None else visit.audits
            self._end_early(failed)
            self._leave(failed)
            self._reports.failed(
                failed.task, FailureKind.OTHER, why if failed is visit else OVERDUE_AUDIT + why
            )
        if longest is not None:  # others end their units soon, and are watched until then
            longest.kill(why)

    def _computed(
        self, visit: Visit, device: WorkerDevice, tasks: Sequence[Done], ended: float
    ) -> None:
        """Keep what the tasks of a unit gave."""
        visit.time.stop(device, any(visit.ends_batch(done.action) for done in tasks), ended)
        self._start_clock(device, ended)
        for done in tasks:
            self._told.append(ActionDone(done.action, done.seconds))
            if not visit.over:
                visit.note(done)
                self._audits.note(visit, done)
        if visit.over:
            return
        for done in tasks:
            if (home := visit.copied(done)) is not None:
                self._copied(visit, done.action.shard, home)
        self._begin_audit(visit)
        losses = [number for done in tasks for number in done.losses]
        if losses and visit.audits is None and self._progress.is_due():
            self._progress.send(visit.progress(max(losses)))

    def _replace(self, device: WorkerDevice) -> None:
        """Start a device that has died anew; its queue waits until it is ready."""
        number, was_up, order, beside = self._devices.replace(device)
        if was_up:
            self._told.append(DeviceLost(number))
        ran = self._visits.get(order.visit) if isinstance(order, Open | Compute | Close) else None
        if ran is not None and (error := self._reports.died(ran.task, device, beside)):
            self._fail(ran, FailureKind.OTHER, error)
        for each in tuple(self._visits.values()):
            each.lose(device, number)
            if device in each.closing:
                each.closing.discard(device)
                self._unclosed(each)
        if number == 0:
            self._ask_again(order.trial if isinstance(order, Profile) else None, device.ending)

    def _ask_again(self, died_of: TrialSpec | None, ending: str) -> None:
        """Ask the first device again, which was replaced.

        Args:
            died_of: the trial that it was building; one that too many devices died of fails.
            ending: how the device ended.
        """
        if died_of is not None and (error := self._entrance.died(died_of.trial, ending)):
            self._profiled(Failed(None, died_of.trial, FailureKind.OTHER, error), died_of)
        for trial in self._entrance.profiling:
            self._ask_profile(trial)

    # ------------------------------------------------------------------ how visits end

    def _end_early(self, visit: Visit) -> None:
        """End a visit where it stands, with its audit, and take back what it published."""
        visit.over = True
        visit.retract(self._shard_store)
        self._told.append(VisitCancelled(visit.number))
        self._stop(visit)
        self._look()
        self._end_audit(visit)

    def _leave(self, visit: Visit) -> None:
        """Let others in, because a visit is over."""
        self._entrance.leave(visit.task.trial)
        self._let_in()

    def _end_audit(self, visit: Visit) -> None:
        """End the audit of a visit, if there is one."""
        if visit.audit is not None and not visit.audit.over:
            self._end_early(visit.audit)

    def _fail(self, visit: Visit, kind: FailureKind, why: str, lacking: str | None = None) -> None:
        """End a visit with an error; see `AttemptReports.failed`.

        A visit that lacks memory is done once more if it may need less then, and one that lacks
        disk is done once more alone.
        """
        if visit.over:
            return
        self._end_early(visit)
        settle = partial(self._settle, visit, kind, why, lacking)
        self._mend(visit, settle) if visit.resident else settle()

    def _mend(self, visit: Visit, then: Callable[[], object] = lambda: None) -> None:
        """Mend frozen bytes that a visit's code has written to, before any other unit begins."""

        def mended(done: Future[None]) -> None:
            done.result()
            self._order_units(self._devices.gate.open(None))
            then()

        self._devices.gate.shut(None)
        mend = partial(self._fetch_manager.mend, tuple(visit.homes.values()))
        self._host.do(mend, self._inbox.through(mended))

    def _settle(self, visit: Visit, kind: FailureKind, why: str, lacking: str | None) -> None:
        """Decide what becomes of a task whose visit has ended with an error."""
        if visit.audits is not None:
            if visit.audits.audit is visit and not visit.audits.over:  # nor did that begin anew
                self._go_on(visit.audits, self._audits.failed(visit, kind, why))
            return
        was_alone = self._entrance.is_alone(visit.task.trial)
        self._leave(visit)
        if visit.task.attempt not in self._reports:
            return  # it was taken back meanwhile, and its trial may be forgotten
        if lacking is not None and self._planner.can_spare(visit):
            self._enter(visit.task)  # once more, from the state before it
        elif kind is FailureKind.SCRATCH_FULL and not was_alone:
            self._entrance.wait_to_be_alone(visit.task, why)
            self._let_in()
        else:
            finer = lacking is not None and self._planner.helps_finer(visit)
            self._reports.failed(visit.task, visit.reported(kind), why, lacking, finer)

    def _raised(self, visit: Visit, error: Exception) -> None:
        """End a visit because of an error of this process."""
        kind, why = FailureKind.of(error), traceback_text(error)
        if kind is FailureKind.SCRATCH_FULL:
            why = f"{described(visit.task)}: {error}"
        self._fail(visit, kind, why, memory_that_ran_out(error))

    def _closed(self, visit: Visit) -> None:
        """End a visit once every device has closed it, and its audit is over."""
        if visit.closing or visit.over:
            return
        if visit.audits is not None:
            self._end_early(visit)
            if (found := self._audits.side_effect(visit)) is not None:
                self._fail(visit.audits, FailureKind.OTHER, found)
            self._go_on(visit.audits, self._audits.ended(visit))
        else:
            visit.closed = True
            self._finish_closed(visit)

    def _unclosed(self, visit: Visit) -> None:
        """End a visit that a device did not live to close; an evaluation is done once more."""
        if visit.over or visit.spec.graph.training:
            self._closed(visit)
        else:
            self._end_early(visit)
            self._leave(visit)
            self._enter(visit.task)

    def _go_on(self, visit: Visit, difference: str | None) -> None:
        """Go on with a visit whose audit is over."""
        visit.audit_ended = True
        if difference is not None:
            self._fail(visit, FailureKind.DIFFERENCE, difference)
        else:
            self._finish_closed(visit)

    def _finish_closed(self, visit: Visit) -> None:
        """Report a visit that its devices have closed, once nothing is left to be audited."""
        if not visit.closed or visit.over or visit.awaits_audit:
            return
        hop = self._fetch_manager.take_hop(visit.task.trial)
        result = visit.result(self._outbox.incarnation, hop)
        if (fault := self._planner.fault(visit.task, result)) is not None:
            self._fail(visit, FailureKind.OTHER, fault)
            return
        # Only code that computes in the agent's memory can write to what was published.
        if visit.resident and visit.state and (late := self._shard_store.altered(visit.state)):
            self._fail(visit, FailureKind.DIFFERENCE, WRITTEN_LATE.format(late))
            return
        visit.over = True
        if not visit.resident:
            self._outbox.report(self._activity.report(self._outbox.incarnation, time.monotonic()))
        self._reports.done(result)
        self._leave(visit)
