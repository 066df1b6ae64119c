"""A visit in the queues of a worker, as its shell knows it, and the moves of its shards in the
host.

What a microbatch leaves in DRAM between two units is there for whichever device does the next.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from cerebro_hydra.agent.device.messages import (
    Close,
    Compute,
    Done,
    FailureKind,
    Move,
    VisitOrder,
    copy_of,
    home_of,
)
from cerebro_hydra.agent.device.task_watch import Task, VisitTime
from cerebro_hydra.agent.device.worker_devices import WorkerDevice
from cerebro_hydra.agent.memory.shard_store import HeldShard, Shard, ShardHome, ShardStore, State
from cerebro_hydra.errors import TransferError
from cerebro_hydra.plan.messages.actions import Action, ActionKind, Part
from cerebro_hydra.plan.messages.events import EvaluationDone, Hop, SubEpochDone
from cerebro_hydra.plan.messages.instructions import StartSubEpoch
from cerebro_hydra.plan.queues.events import ActionDone
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.engine.barrier import GradientFacts
from cerebro_hydra.shards.engine.differences import StepResult
from cerebro_hydra.shards.engine.graph_passes import PassRecord
from cerebro_hydra.shards.engine.layout import Bytes
from cerebro_hydra.storage.run_document import TrialSpec

SEGMENTS = {
    Part.PARAMETERS: ("frozen", "trainable", "versions"),
    Part.GRADIENTS: ("gradients",),
    Part.OPTIMIZER: ("trainable",),
}
"""The slabs in which the parts of a shard's state lie."""


@dataclass(eq=False)
class Visit:
    """Holds what a visit has, and what it gave so far.

    Attributes:
        state: what the visit publishes; None for an evaluation.
        start_step: the optimizer steps that the trial has done before the visit.
        look: finds a shard of the state before, or says that it will never come.
        time: of its own computing.
        limited: whether its devices have a budget.
        boundary: what a microbatch leaves between two units, if it goes from device to device.
        opened: the devices that have opened the visit.
        over: whether it has been reported how the visit ended.
        ended: whether the queues have ended it.
        closing: the devices that have yet to say that its results can be used.
        begun: when its first shard was there.
        losses: the mean loss of each microbatch and its rows.
        closed: whether every device has said so, and its audit is not over.
        recompute: whether a backward computes its forward again.
        resident: whether its device computes in the agent's memory, from which nothing leaves.
        mapped: whether what it changes and makes lies in mapped files, for want of memory.
        watched: whether one of its steps may be audited.
        drawn: the window which that step is, if memory has room for copies.
        audits: the visit of which this one takes a step again with the uncut model, if it does.
        audit: the visit that does so with this one.
        audit_ended: whether it is known what that found.
        choosing: whether room is looked for, on which depends which step that is.
        audited: the window which that step is, once it is chosen.
        audit_is_mapped: whether the uncut model takes it in mapped files.
        copies: memory for the shards as they are before that step, until they are copied.
        given: homes of shards that are not looked for, because they were copied.
        steps: what steps gave that may be audited, by their windows.
        first_seconds: what devices computed for the first one.
        audit_seconds: what an audit took that found no difference; 0 if there was none.
    """

    trial: TrialSpec
    task: Task
    profile: TrialProfile
    spec: VisitSpec
    look: Callable[[int], HeldShard | None]
    time: VisitTime
    limited: bool = False
    recompute: bool = False
    resident: bool = False
    mapped: bool = False
    state: State | None = None
    start_step: int | None = None
    homes: dict[int, ShardHome] = field(default_factory=dict)
    boundary: VisitBoundary | None = None
    opened: set[WorkerDevice] = field(default_factory=set)
    over: bool = False
    ended: bool = False
    closing: set[WorkerDevice] = field(default_factory=set)
    begun: float | None = None
    losses: dict[int, tuple[float, int]] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    digests: dict[int, tuple[str, str]] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    closed: bool = False
    watched: bool = False
    drawn: int = 0
    audits: Visit | None = None
    audit: Visit | None = None
    audit_ended: bool = False
    choosing: bool = False
    audited: int | None = None
    audit_is_mapped: bool = False
    copies: dict[int, Bytes] = field(default_factory=dict)
    given: dict[int, ShardHome] = field(default_factory=dict)
    steps: dict[int, StepResult] = field(default_factory=dict)
    first_seconds: float = 0.0
    audit_seconds: float = 0.0

    @property
    def number(self) -> int:
        """Return what tells the visits of a worker apart."""
        return self.spec.visit

    def announce(self, store: ShardStore) -> None:
        """Announce the state that a sub-epoch will publish."""
        if isinstance(self.task, StartSubEpoch) and self.audits is None:
            shards = self.spec.graph.shards
            self.state = store.expect(self.task.trial, self.task.state, shards)

    def retract(self, store: ShardStore) -> None:
        """Take back what was published."""
        if self.state is not None:
            store.retract(self.state)

    def begin_anew(self) -> None:
        """Forget what the visit gave."""
        self.homes.clear()
        self.boundary = None
        self.opened.clear()
        self.losses.clear()
        self.digests.clear()
        self.nbytes.clear()
        self.audit = self.audited = None
        self.audit_ended = False
        self.copies.clear()
        self.given.clear()
        self.steps.clear()
        self.first_seconds = self.audit_seconds = 0.0

    def order(self, cursor: Mapping[str, Any] | None) -> VisitOrder:
        """Return what a device must know to open the visit, one of whose shards has this cursor."""
        if self.start_step is None:  # the first device opens a visit before any update
            self.start_step = int((cursor or {}).get("step", 0))
        return VisitOrder(
            self.number,
            self.trial,
            self.task,
            self.start_step,
            self.recompute,
            self.drawn if self.watched else None,
            None if self.audits is None else self.audits.audited,
            self.spec.task_bytes if self.limited else None,
            self.spec.moves,
            self.spec.crossings,
            self.resident,
            self.mapped,
        )

    def unit(self, tasks: Sequence[Action]) -> Compute:
        """Return the order to do a unit."""
        graph = self.spec.graph
        order = Compute(tuple(tasks)) if self.boundary is None else self.boundary.order(tasks)
        if self.spec.updates_at_home:
            updated = [task.shard for task in tasks if task.kind is ActionKind.U]
            homes = {home_of(k): self.homes[k].slabs["trainable"] for k in updated}
            order = replace(order, slabs={**order.slabs, **homes})
        if self.watched or self.audits is not None:
            ends = (graph.window_of(n * graph.window)[-1] for n in {0, self.audited or 0})
            order = replace(order, watched=tuple(ends))
        if self.audited:
            window = graph.window_of(self.audited * graph.window)
            edges = (ActionKind.F, window[0]), (ActionKind.U, window[-1])
            copied = {task.shard for task in tasks if (task.kind, task.microbatch) in edges}
            # Of a U that is done again, because its device was lost, all was copied before.
            if slabs := {copy_of(k): self.copies[k] for k in copied if k in self.copies}:
                slabs, step = {**order.slabs, **slabs}, (window[0], window[-1])
                order = replace(order, slabs=slabs, copied=step)
        return order

    def load(self, action: Action) -> Move:
        """Return the order to bring parts of a shard to a device."""
        home, parts = self.homes[action.shard], action.parts or tuple(Part)
        wanted = {name for part in parts for name in SEGMENTS[part]}
        slabs = {name: slab for name, slab in home.slabs.items() if name in wanted}
        gradients = self.gradients(action.shard) if Part.GRADIENTS in parts else 0
        return Move(action, slabs, home.cursor, gradients, self.split(action.shard))

    def split(self, shard: int) -> int:
        """Return where devices part a shard's trainable segment; 0 if they have it in one."""
        apart = 0 if self.spec.whole else self.spec.shards[shard].optimizer
        return self.profile.shards[shard].trainable - apart if apart else 0

    def cancel(self) -> None:
        """Let every device end the visit where it stands."""
        for device in self.opened:
            device.give(Close(self.number, cancelled=True))

    def lose(self, device: WorkerDevice, number: int) -> None:
        """Note that the device of a number has died."""
        self.opened.discard(device)
        self.time.died(device)
        if self.boundary is not None:
            self.boundary.lose(number)

    def note_closed(self, device: WorkerDevice, evaluation: Evaluation | None) -> None:
        """Note that a device has closed the visit, and what it summed."""
        self.closing.discard(device)
        if evaluation is not None:  # in a pipeline, one device has summed it
            self.evaluation = evaluation

    def saved_sizes(self, action: Action) -> dict[str, int]:
        """Return the bytes of slabs that get a shard's changes, by name."""
        shard, parts = action.shard, action.parts or tuple(Part)
        sizes = {
            "trainable": self.profile.shards[shard].trainable,
            "gradients": self.gradients(shard),
            "versions": self.versions(shard),
        }
        written = {name for part in parts for name in SEGMENTS[part]}
        return {name: nbytes for name, nbytes in sizes.items() if nbytes and name in written}

    def saves_a_part(self, action: Action) -> bool:
        """Return whether a move writes some of the trainable segment and leaves the rest."""
        saved = {Part.PARAMETERS, Part.OPTIMIZER}.intersection(action.parts)
        return len(saved) == 1 and bool(self.split(action.shard))

    def gradients(self, shard: int) -> int:
        """Return the bytes of a shard's gradients if they leave the device, else 0."""
        return 0 if self.resident else self.profile.kept_gradients(shard, self.spec.graph)

    def versions(self, shard: int) -> int:
        """Return the bytes of a shard's older weights, which tasks read."""
        return self.profile.versions(shard, self.spec.graph)

    def reported(self, kind: FailureKind) -> FailureKind:
        """Return what a failure is reported as.

        A trial that reads older weights can't be trained in one piece instead of in shards.
        """
        differs = kind is FailureKind.DIFFERENCE and self.spec.graph.staleness
        return FailureKind.OTHER if differs else kind

    def published(self, number: int, shard: Shard) -> None:
        """Note what was published of a shard."""
        self.digests[number] = shard.digests
        self.nbytes[number] = sum(buffer.nbytes for _, buffer in shard.segments.values())

    def begins_last_step(self, action: Action) -> bool:
        """Return whether a task is the first of the last optimizer step."""
        graph = self.spec.graph
        last = graph.window_of(graph.microbatches - 1).start
        first = action.kind is ActionKind.F and action.shard == 0 and action.microbatch == last
        return first and graph.training and self.audits is None

    def note(self, done: Done) -> None:
        """Keep what a task gave."""
        self.losses |= done.losses
        if done.record is not None and self.boundary is not None:
            self.boundary.note(done.action, done.record)
        graph, number = self.spec.graph, done.action.microbatch or 0
        if number in graph.window_of(0):
            self.first_seconds += done.seconds
        if done.digests is not None:
            step = self.steps.setdefault(number // graph.window, StepResult())
            step.shards[done.action.shard] = done.digests
            if len(step.shards) == graph.shards:
                step.loss = self.window_loss(number)

    def note_move(self, done: Done) -> None:
        """Note that a device has taken a shard, or written it back."""
        home = self.homes.get(done.action.shard)
        if home is None:
            return  # the visit is over
        if self.mapped:
            home.leave_dram()  # the device has copied what it changes
        if done.action.kind is ActionKind.SPILL and not self.over:
            trained = done.action.parts != (Part.GRADIENTS,)
            home.changed(done.cursor, done.has_gradients, trained)

    def copied(self, done: Done) -> ShardHome | None:
        """Return the home of a shard, all of which was copied by a task, if it was."""
        k = done.action.shard
        if done.action.kind is not ActionKind.U or done.cursor is None or k not in self.copies:
            return None
        return ShardHome.of_copy(self.homes[k], self.copies.pop(k), done.cursor)

    def begins_drawn_step(self, tasks: Sequence[Action]) -> bool:
        """Return whether a unit has the first task of the step that may be audited."""
        first = self.drawn * self.spec.graph.window
        return any((t.kind, t.shard, t.microbatch) == (ActionKind.F, 0, first) for t in tasks)

    @property
    def awaits_audit(self) -> bool:
        """Return whether a step is chosen to be audited, or was, and that is not over."""
        chosen = self.choosing or self.audited is not None
        return self.watched and chosen and not self.audit_ended

    @property
    def can_be_audited(self) -> bool:
        """Return whether all is there that the audit of the chosen step needs, and it may begin."""
        if self.over or not self.watched or self.audited is None or self.audit is not None:
            return False
        copied = not self.audited or len(self.given) == self.spec.graph.shards
        return copied and self.step_is_over(self.audited)

    def give_to(self, audit: Visit) -> None:
        """Let an audit have what was copied for it."""
        self.audit = audit
        audit.mapped = self.audit_is_mapped
        audit.start_step = self.start_step
        audit.given, self.given = self.given, {}

    def step_is_over(self, window: int) -> bool:
        """Return whether everything is known of a step that may be audited."""
        step = self.steps.get(window)
        return step is not None and len(step.shards) == self.spec.graph.shards

    @property
    def takes_windows(self) -> bool:
        """Return whether one task does all batches of a window; see `PlainVisit`."""
        uncut = self.audits is not None or self.task.uncut or self.profile.uncut
        return uncut and self.spec.graph.training and not self.recompute

    @property
    def _times_windows(self) -> bool:
        """Return whether the batches of a window are timed together, as they have no ends apart."""
        return self.takes_windows or self.spec.is_pipelined

    def ends_batch(self, task: Action) -> bool:
        """Return whether a batch has been through all shards with a task."""
        if self.spec.graph.training:
            if task.kind is not ActionKind.B or task.shard > 0:
                return False
            window = self.spec.graph.window_of(task.microbatch or 0)
            return not self._times_windows or task.microbatch == window[-1]
        return task.shard == self.spec.graph.shards - 1

    def batches(self, tasks: Sequence[Action]) -> int:
        """Return how many batches are timed with a unit."""
        ended = sum(map(self.ends_batch, tasks))
        return max(ended, 1) * self.spec.graph.window if self._times_windows else ended

    def seconds(self) -> float:
        """Return the seconds since the visit's first shard was there."""
        return 0.0 if self.begun is None else time.perf_counter() - self.begun

    def progress(self, microbatch: int) -> dict[str, Any]:
        """Return what a view shows after a microbatch's forward."""
        graph = self.spec.graph
        return {
            "trial": self.task.trial,
            "epoch": self.task.epoch,
            "partition": self.task.partition,
            "step": microbatch // graph.window + 1,
            "steps": graph.windows,
            "loss": self.window_loss(microbatch),
        }

    def result(self, incarnation: str, hop: Hop) -> SubEpochDone | EvaluationDone:
        """Return what the whole visit gave."""
        training = self.spec.graph.training
        return self._trained(incarnation, hop) if training else self._evaluated(incarnation, hop)

    def window_loss(self, microbatch: int) -> float:
        """Return the mean loss over the rows of a microbatch's window, as far as it was trained."""
        window = self.spec.graph.window_of(microbatch)
        parts = [self.losses[m] for m in window if m in self.losses]
        return sum(loss * rows for loss, rows in parts) / sum(rows for _, rows in parts)

    def _trained(self, incarnation: str, hop: Hop) -> SubEpochDone:
        """Return what a sub-epoch gave; losses are summed in the order of its batches."""
        loss_sum = 0.0
        for microbatch in sorted(self.losses):
            loss, rows = self.losses[microbatch]
            loss_sum += loss * rows
        return SubEpochDone(
            attempt=self.task.attempt,
            incarnation=incarnation,
            rows=sum(rows for _, rows in self.losses.values()),
            loss_sum=loss_sum,
            digests=tuple(self.digests[shard] for shard in sorted(self.digests)),
            nbytes=sum(self.nbytes.values()),
            seconds=self.seconds(),
            hop=hop,
            device_seconds=self.time.seconds,
            audit_seconds=self.audit_seconds,
        )

    def _evaluated(self, incarnation: str, hop: Hop) -> EvaluationDone:
        """Return what an evaluation gave."""
        assert self.evaluation is not None
        found = self.evaluation
        return EvaluationDone(
            attempt=self.task.attempt,
            incarnation=incarnation,
            sums=found.sums,
            seconds=self.seconds(),
            hop=hop,
            states=found.states,
            device_seconds=self.time.seconds,
        )


class Arrivals:
    """Knows the shards of states before their visits that have yet to come; one thread uses it."""

    def __init__(self, shard_store: ShardStore) -> None:
        self._shard_store = shard_store
        self._waiting: list[tuple[Visit, Action]] = []

    def wait(self, visit: Visit, action: Action) -> None:
        """Wait for a shard of a visit until it is there, or never comes, or the visit is over."""
        self._waiting.append((visit, action))

    def look(self) -> list[tuple[Visit, Action, HeldShard | TransferError | None]]:
        """Return what is waited for no more: the shard, why it never comes, or else None."""
        found, left = [], []
        for visit, action in self._waiting:
            held = (
                None
                if visit.over or action.shard in visit.given
                else self._seek(visit, action.shard)
            )
            if held is None and not (visit.over or action.shard in visit.given):
                left.append((visit, action))
            else:
                found.append((visit, action, held))
        self._waiting = left
        return found

    def _seek(self, visit: Visit, shard: int) -> HeldShard | TransferError | None:
        """Return a shard if it is here, an error if it will never come."""
        trial, state = visit.task.trial, visit.task.source.state
        try:
            held = visit.look(shard)
        except TransferError as error:
            return error
        if held is None and not self._shard_store.knows(trial, state):
            # It was asked for, so it is here or on its way, unless that has failed.
            return TransferError(f"state {state} of trial {trial} did not come")
        return held


_THREADS = 4

T = TypeVar("T")

OnMoved = Callable[[Visit, ActionDone, Exception | None], object]
OnNoRoom = Callable[[Visit, Exception], object]


class HostMoves:
    """Carries out the queues' actions within the host.

    Args:
        on_moved: is told from any thread that an action was carried out, or why it could not be.
        on_no_room: is told why a device has no slabs to write a shard's changes to.
    """

    def __init__(self, shard_store: ShardStore, on_moved: OnMoved, on_no_room: OnNoRoom) -> None:
        self._shard_store = shard_store
        self._on_moved, self._on_no_room = on_moved, on_no_room
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="host-moves")

    def close(self) -> None:
        """End after what is being done."""
        self._threads.shutdown(cancel_futures=True)

    def receive(self, visit: Visit, action: Action, held: HeldShard | None) -> None:
        """Make a shard of the state before one of a visit, and room for its microbatches.

        Args:
            held: the shard; None if it is given to the visit.
        """

        def work() -> None:
            segments = self._shard_store.segments
            if held is None:
                home = visit.given.pop(action.shard)
                home.to_dram()
            else:
                home = ShardHome(held, segments)
            changed = visit.resident or visit.spec.updates_at_home
            if changed and visit.spec.graph.training and not visit.mapped:
                home.own_trainable()
            if nbytes := visit.versions(action.shard):
                home.room_for({"versions": nbytes})
            visit.homes[action.shard] = home
            if action.shard == 0 and visit.spec.moves:
                nbytes, number = visit.spec.boundary_bytes, visit.spec.most_open
                slabs = [segments.allocate(nbytes) for _ in range(number)]
                visit.boundary = VisitBoundary(slabs, visit.spec.graph)

        self._submit(visit, action, work)

    def do(self, work: Callable[[], T], then: Callable[[Future[T]], object]) -> None:
        """Do something that may wait, and hand on from any thread what it gave or raised."""
        self._threads.submit(work).add_done_callback(then)

    def move(self, visit: Visit, action: Action) -> None:
        """Carry out SEND, or a move between DRAM and disk."""
        home = visit.homes.get(action.shard)
        if home is None:
            return  # DROP of a visit that begins anew
        match action.kind:
            case ActionKind.SPILL:
                self._submit(visit, action, home.to_disk)
            case ActionKind.LOAD:
                self._submit(visit, action, home.to_dram)
            case ActionKind.SEND if visit.audits is not None:
                self._submit(visit, action, home.leave)  # nobody needs the state that it makes
            case ActionKind.SEND:
                publish = partial(self._publish, visit, visit.state, action.shard, home)
                self._submit(visit, action, publish)
            case _:
                home.leave_dram()

    def write_back(self, visit: Visit, action: Action, device: WorkerDevice) -> None:
        """Let a device write a shard's changes to slabs; only the device tells that it is done.

        Nobody needs those of a step in mapped files, for which there is no room.
        """
        if visit.mapped:
            device.give(Move(action))
            return
        home = visit.homes[action.shard]  # a visit that begins anew meanwhile gets another one

        def work() -> None:
            try:
                slabs = home.room_for(visit.saved_sizes(action), visit.saves_a_part(action))
            except Exception as error:
                self._on_no_room(visit, error)
                device.give(Move(action))  # it lets go of them, and answers
            else:
                device.give(Move(action, slabs, split=visit.split(action.shard)))

        self._threads.submit(work)

    def _publish(self, visit: Visit, state: State | None, number: int, home: ShardHome) -> None:
        shard = home.published()
        visit.published(number, shard)
        if state is not None:
            self._shard_store.put(state, number, shard)
        home.leave()

    def _submit(self, visit: Visit, action: Action, work: Callable[[], None]) -> None:
        def carry_out() -> None:
            begun, failure = time.perf_counter(), None
            try:
                work()
            except Exception as error:
                failure = error
            seconds, home = time.perf_counter() - begun, visit.homes.get(action.shard)
            nbytes = 0 if home is None else home.bytes_on_disk
            self._on_moved(visit, ActionDone(action, seconds, nbytes), failure)

        self._threads.submit(carry_out)


class VisitBoundary:
    """Keeps the memory of a visit's microbatches that are under way, and a record after each unit.

    A unit begins with the record of the one before it, also if it is done again because a device
    was lost. A device that was given the one before it, too, has that itself. Every order refers to
    the memory, so nobody else gets that before it is answered.

    Args:
        slabs: memory that devices share, each for all that a microbatch leaves. A microbatch has
            that of the one which began so many before it, as the queues allow.
        graph: of the visit's tasks.
    """

    def __init__(self, slabs: Sequence[Bytes], graph: TaskGraph) -> None:
        self._slabs = slabs
        self._graph = graph
        self._records: dict[int, dict[int, PassRecord]] = {}  # by microbatch and place in it
        self._facts: defaultdict[int, dict[int, GradientFacts]] = defaultdict(dict)
        """What is known of gradients, by window and shard."""
        self._places: dict[Action, int] = {}  # of units under way, by their last tasks

    def order(self, tasks: Sequence[Action]) -> Compute:
        """Return the order to do a unit."""
        number = tasks[0].microbatch or 0
        window = number // self._graph.window
        record = PassRecord()
        passes = [task for task in tasks if task.kind is not ActionKind.U]
        self._places.pop(tasks[-1], None)  # of a unit of more tasks, which was lost
        if passes:
            if number not in self._records:
                self._begin(number)
            records, first = self._records[number], self._place_of(passes[0])
            before = max((place for place in records if place < first), default=None)
            under_way = (p for t, p in self._places.items() if t.microbatch == number)
            if before is not None and first - 1 not in under_way:
                record = records[before]
            self._places[tasks[-1]] = self._place_of(passes[-1])
        record = replace(record, facts=dict(self._facts[window]))  # of units that came later, too
        return Compute(tuple(tasks), {"boundary": self._slab_of(number)}, record)

    def note(self, last: Action, record: PassRecord) -> None:
        """Keep what a unit has left, by its last task."""
        number, k = last.microbatch or 0, last.shard
        # Only the last backward of a window has all gradients, whichever is done again after it.
        ends = last.kind is not ActionKind.F and number == self._graph.window_of(number)[-1]
        if ends and k in record.facts:
            self._facts[number // self._graph.window][k] = record.facts[k]
        if (place := self._places.pop(last, None)) is not None:
            self._records[number][place] = record

    def lose(self, device: int) -> None:
        """Note that a device does none of its units, because it has died."""
        self._places = {t: p for t, p in self._places.items() if t.device != device}

    def _begin(self, number: int) -> None:
        """Forget what nobody needs any more when a microbatch begins."""
        self._records = {m: r for m, r in self._records.items() if m > number - len(self._slabs)}
        self._records[number] = {}
        self._places = {t: p for t, p in self._places.items() if t.microbatch in self._records}
        # F of shard 0 waits for the update that makes its weights, and that for all facts of it.
        open_windows = 1 + max(self._graph.staleness, default=0)
        for window in [w for w in self._facts if w < number // self._graph.window - open_windows]:
            del self._facts[window]

    def _slab_of(self, number: int) -> Bytes:
        return self._slabs[number % len(self._slabs)]

    def _place_of(self, task: Action) -> int:
        """Return where in its microbatch a forward or backward comes."""
        return task.shard if task.kind is ActionKind.F else 2 * self._graph.shards - 1 - task.shard
