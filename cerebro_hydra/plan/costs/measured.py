"""Makes a cost model of what the events of a run say; a pure function of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cerebro_hydra.plan.costs.model import CostModel, Kind, Spread
from cerebro_hydra.plan.costs.moves import MoveRates, wire_of
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins

Decided = tuple[float, ev.Event, Sequence[ins.Instruction]]
"""When an event was decided on, what it was, and what was told then."""

_Task = ins.StartSubEpoch | ins.Evaluate


def measured(
    decisions: Iterable[Decided],
    structures: Mapping[int, str],
    profiled: Callable[[Kind, int, int], float],
    rates: MoveRates,
) -> CostModel:
    """Return what a run cost.

    Args:
        decisions: all of the run's, in order.
        structures: names the structure of each trial; trials of equal structure cost the same.
        profiled: the device seconds of a task by its profile, by kind, trial and partition.
        rates: the speeds that are known; that of the wire is corrected.
    """
    log = _CostLog(structures, profiled)
    for time, event, instructions in decisions:
        log.take(time, event, instructions)
    wire, latency = wire_of(log.hops, rates.wire)
    return CostModel(
        rates=replace(rates, wire=wire, latency=latency),
        start=Spread.of(log.joined[:1]),
        later=Spread.of(each - log.joined[0] for each in log.joined[1:]),
        devices=Spread.of(log.first_waits),
        admission=Spread.of(log.admissions[True]),
        admission_again=Spread.of(log.admissions[False]),
        build=log.waited(True),
        turn=log.waited(False),
        pace={
            key: Spread.of([took / told for took, told in tasks], [told for _, told in tasks])
            for key, tasks in log.tasks.items()
        },
    )


class _CostLog:
    """Gathers what each thing took, event by event."""

    def __init__(
        self, structures: Mapping[int, str], profiled: Callable[[Kind, int, int], float]
    ) -> None:
        self._structures, self._profiled = structures, profiled
        self.hops: list[tuple[int, float]] = []
        self.joined: list[float] = []
        self.admissions: dict[bool, list[float]] = {True: [], False: []}
        self.waits: dict[bool, list[float]] = {True: [], False: []}  # by whether it is the first
        self.first_waits: list[float] = []
        self.crowded: dict[bool, list[float]] = {True: [], False: []}
        self.tasks: defaultdict[tuple[str, Kind], list[tuple[float, float]]] = defaultdict(list)
        self._begun: float | None = None
        self._latest = 0.0
        self._paused = 0.0  # the seconds in which no driver was at work
        self._workers: set[int] = set()
        self._admitted_at: float | None = None
        self._admitted: set[str] = set()
        self._open: dict[tuple[int, str], tuple[_Task, float]] = {}  # by attempt and incarnation
        self._received: dict[tuple[str, int, int], float] = {}
        self._had: set[tuple[str, int]] = set()
        self._residents: dict[str, int] = {}
        self._trained: set[str] = set()
        self._forward: dict[str, float] = {}  # when the first task of each incarnation ended
        self._queued: set[str] = set()  # incarnations whose devices tell what they did

    def take(self, time: float, event: ev.Event, instructions: Sequence[ins.Instruction]) -> None:
        """Take in a decision."""
        if isinstance(event, ev.RunResumed):
            self._paused, self._admitted_at = time - self._latest, None
        time = self._latest = time - self._paused
        self._begun = time if self._begun is None else self._begun
        match event:
            case ev.TrialAdded() | ev.TrialForked():
                self._admit(time, event.config.trial)
            case ev.WorkerJoined():
                self._residents[event.incarnation] = event.residents
                if event.worker not in self._workers:
                    self._workers.add(event.worker)
                    self.joined.append(time - self._begun)
            case ev.DevicesWorked():
                self._queued.add(event.incarnation)
            case ev.StateReceived():
                self._received[event.incarnation, event.trial, event.state] = time
            case ev.SubEpochDone() | ev.EvaluationDone():
                self._done(time, event)
        for told in instructions:
            if isinstance(told, _Task):
                self._open[told.attempt, told.incarnation] = told, time

    def waited(self, first: bool) -> Spread:
        """Return what tasks waited before their first forward.

        Of tasks that shared devices it is what the quickest of them did, because the others waited
        for devices, too.
        """
        if self.waits[first]:
            return Spread.of(self.waits[first])
        shared = Spread.of(self.crowded[first])
        return replace(shared, mean=shared.low)

    def _admit(self, time: float, trial: int) -> None:
        structure = self._structures[trial]
        if self._admitted_at is not None:
            first = structure not in self._admitted
            self.admissions[first].append(time - self._admitted_at)
        self._admitted.add(structure)
        self._admitted_at = time

    def _done(self, time: float, event: ev.SubEpochDone | ev.EvaluationDone) -> None:
        opened = self._open.pop((event.attempt, event.incarnation), None)
        if opened is None:
            return
        task, given = opened
        partition = task.partition
        kind: Kind = "train" if isinstance(task, ins.StartSubEpoch) else "evaluate"
        received = self._received.get((task.incarnation, task.trial, task.source.state), given)
        begun = time - event.seconds
        wait = max(0.0, begun - max(given, min(received, begun)))
        first = (task.incarnation, task.trial) not in self._had
        self._had.add((task.incarnation, task.trial))
        if task.incarnation not in self._trained:
            self._trained.add(task.incarnation)
            self.first_waits.append(wait)
        elif begun > self._forward[task.incarnation]:  # its devices had started by then
            alone = self._residents.get(task.incarnation, 1) == 1
            (self.waits if alone else self.crowded)[first].append(wait)
        self._forward.setdefault(task.incarnation, time)
        if event.hop.bytes_moved and task.source.incarnation is not None:
            self.hops.append((event.hop.bytes_moved, event.hop.seconds))
        audited = event.audit_seconds if isinstance(event, ev.SubEpochDone) else 0.0
        took = event.seconds - audited
        if task.incarnation in self._queued or self._residents.get(task.incarnation, 1) > 1:
            took = event.work_seconds
        if isinstance(task, ins.StartSubEpoch) and task.replicas:
            return  # it has waited for others, nobody says how long
        told = self._profiled(kind, task.trial, partition)
        if told > 0 and took > 0:
            self.tasks[self._structures[task.trial], kind].append((took, told))
