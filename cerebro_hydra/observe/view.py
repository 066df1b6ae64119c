"""Folds the records of a run into its state as people see it; a pure function.

The live table, the plain lines and `SearchResult` all read this one fold, so that what scrolls by
and what is returned cannot differ. It knows no clock but the times in the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cerebro_hydra.observe.records import (
    Decision,
    Progress,
    Record,
    RunEnded,
    RunStarted,
    TrialAdmitted,
    records_of,
)
from cerebro_hydra.plan.hop.ranking import Measured, best_epoch, ranked
from cerebro_hydra.plan.hop.trials import first_epoch
from cerebro_hydra.plan.messages import events, instructions
from cerebro_hydra.plan.messages.actions import HOST
from cerebro_hydra.plan.messages.device_work import DeviceWork
from cerebro_hydra.plan.messages.events import Hop
from cerebro_hydra.plan.messages.instructions import ChangeCut
from cerebro_hydra.storage.names import trial_name
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from cerebro_hydra.storage.run_folder import RunFolder

Task = instructions.StartSubEpoch | instructions.Evaluate


class RunView:
    """The state of a run after the records that were applied."""

    def __init__(self) -> None:
        """Begin before the first record."""
        self.document: RunDocument  # comes with the first record
        self.trials: dict[int, TrialView] = {}
        """By number, as they were proposed; they are admitted or refused later."""
        self.totals = Totals()
        self.workers: dict[int, str] = {}
        """Incarnation of each live worker."""
        self.devices: dict[tuple[int, int], DeviceTotals] = {}
        """Devices of workers with shard queues, and their DRAM, by worker and number."""
        self.audits: int = 0
        """How many steps of training were also taken by the uncut model, with the same bits."""
        self.audit_seconds: float = 0.0
        self.not_saved: dict[int, str] = {}
        """Why the latest state of a trial that was to be written is not in the run's folder."""
        self.differences: list[events.StateDiffers] = []
        """States that were made again after a resume, with other bytes than before."""
        self.seconds: float | None = None
        """Wall-clock seconds of the whole run, or of its journal if it was read from a folder."""
        self.working_seconds = 0.0
        """From the run's first task to its last decision, without the time before a resume."""
        self.rows: dict[tuple[str, int], int] = {}
        """Rows of each ("train" or "val", partition) that a task has gone through."""
        self.closed = False
        """Whether the search proposes nothing more."""
        self.suspended = ""
        """Why the run has ended for now, if it may go on."""
        self._tasks: dict[tuple[int, str], Task] = {}  # by attempt and incarnation
        self._latest: float | None = None  # when the last decision was taken, since the first task
        self._num_devices: dict[int, int] = {}  # of every worker that ever joined
        self._work_seconds = 0.0  # for which devices computed for tasks that ended

    @classmethod
    def of_run(cls, folder: RunFolder) -> RunView:
        """Fold what a run's folder holds: its document, then its journal."""
        view = cls()
        for record in records_of(folder):
            view.apply(record)
        return view

    def apply(self, record: Record) -> None:
        """Take in one record; a kind that it has no use for changes nothing."""
        match record:
            case RunStarted():
                self.document = record.document
                for each in record.past():
                    self.apply(each)
            case TrialAdmitted():
                self._admit(record.spec)
            case Decision():
                self._event(record.event)
                for instruction in record.instructions:
                    self._instruction(instruction)
                self._pass_time(record)
            case Progress():
                trial = self.trials[record.trial]
                if trial.status == "training" and trial.worker == record.worker:
                    trial.loss = record.loss
            case RunEnded():
                self.seconds = record.seconds
                for number, trial in self.trials.items():
                    if not trial.over or number in record.unwritten:
                        trial.status = "paused" if self.suspended else "interrupted"

    @property
    def finished(self) -> int:
        """Return how many trials finished, early ones too."""
        return sum(trial.status == "finished" for trial in self.trials.values())

    def _pass_time(self, decision: Decision) -> None:
        """Count the time since the decision before, unless no driver was at work meanwhile."""
        before, self._latest = self._latest, decision.time
        if before is not None and not isinstance(decision.event, events.RunResumed):
            self.working_seconds += max(0.0, decision.time - before)  # clocks may be set back
        elif before is None and not self._tasks:
            self._latest = None

    def busy(self, devices: Sequence[DeviceTotals] = ()) -> float:
        """Return the share of `working_seconds` in which devices computed, all or only these.

        A device of a worker that comes later or is lost computes nothing meanwhile.
        """
        devices = [each for each in devices or self.devices.values() if not each.is_dram]
        computing = sum(each.computing for each in devices)
        count = len(devices)
        if not devices:  # workers without shard queues tell of their tasks alone
            computing, count = self._work_seconds, sum(self._num_devices.values())
        return min(1.0, computing / (count * self.working_seconds)) if self.working_seconds else 0.0

    @property
    def share_done(self) -> float:
        """Return which part of the sub-epochs of all trials so far is over or no longer needed."""
        steps = self.document.num_partitions
        left = sum(self._left(trial) for trial in self.trials.values())
        whole = sum(self._budget(trial) * steps for trial in self.trials.values())
        return 1 - left / whole if whole else 0.0

    def seconds_left(self) -> float | None:
        """Return the seconds until all trials so far end; None before any pace was seen.

        Workers share what is left, and no trial ends before its own sub-epochs are done.
        """
        etas = {t.trial: self.eta(t) for t in self.trials.values() if self._left(t)}
        if not etas or None in etas.values():
            return None
        paces = {number: (eta or 0.0) / self._sharing for number, eta in etas.items()}
        return max(sum(paces.values()) / len(self.workers), *paces.values())

    def epoch_text(self, trial: TrialView) -> str:
        """Return the epoch that a trial is in, from 1, of those that it may train."""
        epochs = self._budget(trial)
        epoch = len(trial.epochs) if trial.over else min(trial.epoch + 1, epochs)
        return f"{epoch}/{epochs}"

    def eta(self, trial: TrialView) -> float | None:
        """Return the seconds until a trial ends at the pace seen so far; None before any was seen.

        A trial needs its remaining sub-epochs one after the other, and shares the workers with all
        trials that are not over.
        """
        done = sum(t.sub_epochs for t in self.trials.values())
        if trial.over or not done or not self.workers:
            return None
        if trial.sub_epochs:
            pace = trial.seconds / trial.sub_epochs
        else:
            pace = sum(t.seconds for t in self.trials.values()) / done
        return self._left(trial) * pace * self._sharing

    def _left(self, trial: TrialView) -> int:
        """Return how many sub-epochs a trial has still to do."""
        left = self._budget(trial) * self.document.num_partitions - len(trial.visits)
        return 0 if trial.over else max(0, left)

    def _budget(self, trial: TrialView) -> int:
        return trial.budget or self.document.num_epochs

    @property
    def _sharing(self) -> float:
        """Return how many trials share a worker, without those that rest."""
        at_work = sum(not (t.over or t.status == "paused") for t in self.trials.values())
        return max(1.0, at_work / len(self.workers))

    def best_first(self) -> list[TrialView]:
        """Return the finished trials, best first by the evaluation metric, then the others.

        Of these, those that have a value so far come first, again by it, and failed ones last.
        """
        return [trial for _, trial in self._ranked()]

    @property
    def winner(self) -> TrialView | None:
        """Return the best finished trial; of trials that are all over, else the best stopped one.

        None if no such trial has a number as its metric.
        """
        best = self.leader
        if best is None or best.status == "finished" or (self.suspended and best.result_state):
            return best
        over = all(trial.over for trial in self.trials.values())
        return best if over and best.status == "stopped" else None

    @property
    def leader(self) -> TrialView | None:
        """Return the winner, or before any trial has finished the best one so far."""
        group, best = next(iter(self._ranked()), (_NOT_MEASURED, None))
        return best if group < _NOT_MEASURED else None

    def _ranked(self) -> list[tuple[int, TrialView]]:
        """Return all trials, best first, each after the number of its group."""
        groups: dict[int, list[TrialView]] = {}
        measured: dict[int, list[Measured]] = {}
        for trial in self.trials.values():
            epoch = trial.result_epoch or 0
            found = Measured.of(trial.result_metrics, self.metric, epoch, trial.trial)
            so_far = bool(self.suspended and trial.result_state)
            group = 0 if so_far and found is not None else _group(trial, found is not None)
            groups.setdefault(group, []).append(trial)
            if found is not None:
                measured.setdefault(group, []).append(found)
        for group in groups.keys() & {0, 1}:
            order = ranked(measured[group], self.direction)
            groups[group] = [self.trials[each.trial] for each in order]
        return [(group, trial) for group in sorted(groups) for trial in groups[group]]

    def score(self, trial: TrialView) -> float | None:
        """Return the evaluation metric of the trial's result, or of its result so far."""
        return trial.result_metrics.get(self.metric)

    @property
    def metric(self) -> str:
        """Name in a history of the metric that decides, as "val_accuracy" or "train_loss"."""
        split = "val" if self.document.validated else "train"
        return f"{split}_{self.document.evaluation_metric}"

    @property
    def direction(self) -> str:
        """Either "min" or "max": which values of the metric are better."""
        return self.document.metrics[self.document.evaluation_metric]

    def measured(self) -> Iterator[str]:
        """Yield the names that a history holds, in the order in which people want to read them."""
        yield "train_loss"
        if self.document.validated:
            yield from (f"val_{name}" for name in self.document.metrics)

    @property
    def untrained(self) -> int:
        """Return how many epochs no trial trains, of `num_epochs` of every trial.

        Those that trials were stopped before, or rest before now, and those that forks share with
        their parents.
        """
        whole = self.document.num_epochs
        left = sum(
            max(0, whole - len(trial.epochs))
            for trial in self.trials.values()
            if trial.status in ("stopped", "paused") or trial.finished_early
        )
        shared = sum(trial.base for trial in self.trials.values()) // self.document.num_partitions
        return left + shared

    @property
    def has_rungs(self) -> bool:
        """Whether a trial was compared with others at a rung."""
        return any(trial.rung is not None for trial in self.trials.values())

    def falls(self, name: str) -> bool:
        """Return whether lower values are better of a name that a history holds."""
        return name == "train_loss" or self.document.metrics[name.removeprefix("val_")] == "min"

    def _admit(self, spec: TrialSpec) -> None:
        self.trials[spec.trial] = TrialView(
            spec.trial,
            spec.trial_id,
            dict(spec.params),
            spec.keep,
            shards=len(spec.shards),
            parameters=spec.parameters,
        )

    def _event(self, event: events.Event) -> None:
        match event:
            case events.TrialProposed(number, params):
                self.trials[number] = TrialView(number, trial_name(number), params)
            case events.TrialAdded() | events.TrialForked():
                self.trials[event.config.trial].budget = event.budget
            case events.BudgetExtended():
                trial = self.trials[event.trial]
                trial.budget = max(trial.budget, event.budget)
            case events.TrialPaused(number, rung):
                self.trials[number].pause(rung)
            case events.TrialResumed(number):
                self.trials[number].resume()
            case events.SearchClosed():
                self.closed = True
            case events.SearchReopened():
                self.closed = False
            case events.WorkerJoined():
                self._lose(self.workers.get(event.worker, ""))
                self.workers[event.worker] = event.incarnation
                self._num_devices[event.worker] = event.devices
            case events.WorkerLost():
                self._lose(event.incarnation)
            case events.RunSuspended(reason):
                self.suspended = reason
            case events.RunResumed():
                for incarnation in list(self.workers.values()):
                    self._lose(incarnation)
                self._go_on()
            case events.CheckpointFailed():
                self.not_saved[event.trial] = event.error
            case events.Checkpointed():
                self.not_saved.pop(event.trial, None)
            case events.StateDiffers():
                self.differences.append(event)
            case events.SubEpochDone() | events.EvaluationDone():
                self._done(event)
            case events.DevicesWorked():
                self._count(event)

    def _instruction(self, instruction: instructions.Instruction) -> None:
        match instruction:
            case instructions.StartSubEpoch() | instructions.Evaluate():
                self._begin(instruction)
            case instructions.Commit():
                trial = self.trials[instruction.trial]
                first = instruction.state - len(instruction.partitions) + 1
                for number, partition in enumerate(instruction.partitions):
                    trial.visits[first + number] = (instruction.epoch, partition)
                self._rest(trial, instruction.attempt)
            case instructions.Cancel():
                task = self._tasks.pop((instruction.attempt, instruction.incarnation), None)
                if task is not None:
                    self._rest(self.trials[task.trial], instruction.attempt)
            case instructions.Redo():
                self._redo(instruction)
            case instructions.TrainUncut():
                self.trials[instruction.trial].uncut_because = instruction.difference
            case instructions.ChangeCut():
                self.trials[instruction.trial].change_cut(instruction)
            case instructions.EndEpoch():
                trial = self.trials[instruction.trial]
                trial.epochs[instruction.epoch] = dict(instruction.metrics)
                self._find_best(trial)
                self._rest(trial, trial.attempt)
            case instructions.FinishTrial():
                trial = self.trials[instruction.trial]
                trial.status, trial.reason = instruction.status, instruction.reason
                trial.result_state = instruction.state
                if trial.best_epoch is not None and trial.status != "failed":
                    # As the run decided; another version may have compared by another rule.
                    trial.best_epoch = instruction.state // self.document.num_partitions - 1
                trial.worker = trial.partition = trial.attempt = None
            case instructions.ForkState(number, parent, state):
                self._fork(self.trials[number], self.trials[parent], state)
            case instructions.RestTrial():
                self.trials[instruction.trial].result_state = instruction.state
            case instructions.ExtensionFailed():
                trial = self.trials[instruction.trial]
                trial.budget, trial.extension_error = len(trial.epochs), instruction.error
            case instructions.ReopenTrial():
                trial = self.trials[instruction.trial]
                trial.status, trial.result_state, trial.extension_error = "waiting", None, ""

    def _go_on(self) -> None:
        """Let the trials of a run that was suspended wait, which have no result any more."""
        for trial in self.trials.values():
            if self.suspended and not trial.over:
                trial.result_state = None
        self.suspended = ""

    def _lose(self, incarnation: str) -> None:
        """Forget a lost agent and its tasks."""
        self.workers = {w: i for w, i in self.workers.items() if i != incarnation}
        for at, task in list(self._tasks.items()):
            if task.incarnation == incarnation:
                del self._tasks[at]
                self._rest(self.trials[task.trial], task.attempt)

    def _begin(self, task: Task) -> None:
        self._tasks[task.attempt, task.incarnation] = task
        trial = self.trials[task.trial]
        trains = isinstance(task, instructions.StartSubEpoch)
        trial.status, trial.epoch = "training" if trains else "evaluating", task.epoch
        trial.partition, trial.worker, trial.attempt = task.partition, task.worker, task.attempt

    def _done(self, event: events.SubEpochDone | events.EvaluationDone) -> None:
        task = self._tasks.pop((event.attempt, event.incarnation), None)
        if task is None:
            return
        trial, partition = self.trials[task.trial], task.partition
        trial.seconds += event.hop.seconds + event.seconds
        self._work_seconds += event.work_seconds
        if isinstance(event, events.SubEpochDone):
            trial.sub_epochs += 1
            trial.loss = event.loss_sum / event.rows
            self.audits += event.audit_seconds > 0
            self.audit_seconds += event.audit_seconds
            self.rows["train", partition] = event.rows
        else:
            _, self.rows["val", partition] = event.sums["loss"]
            self._rest(trial, event.attempt)
        if task.source.incarnation not in (None, task.incarnation):
            self.totals.add(event.hop)

    def _count(self, event: events.DevicesWorked) -> None:
        for worker, incarnation in self.workers.items():
            for work in event.devices if incarnation == event.incarnation else ():
                key = worker, work.device
                self.devices.setdefault(key, DeviceTotals(*key)).add(work)

    @staticmethod
    def _rest(trial: TrialView, attempt: int | None) -> None:
        """Let a trial wait, unless it is in another task than this one by now."""
        if trial.attempt == attempt and not trial.over:
            trial.status = "waiting"
            trial.worker = trial.partition = trial.attempt = None

    def _redo(self, redo: instructions.Redo) -> None:
        trial = self.trials[redo.trial]
        for state in redo.visits:
            trial.visits.pop(state, None)
        first_void = (min(redo.visits) - 1) // self.document.num_partitions
        trial.epochs = {epoch: m for epoch, m in trial.epochs.items() if epoch < first_void}
        self._find_best(trial)

    def _fork(self, trial: TrialView, parent: TrialView, state: int) -> None:
        """Give a fork what its parent has trained and measured until then."""
        epochs = state // self.document.num_partitions
        trial.base = state
        trial.visits = {v: where for v, where in parent.visits.items() if v <= state}
        trial.epochs = {e: dict(parent.epochs[e]) for e in parent.epochs if e < epochs}
        self._find_best(trial)

    def _find_best(self, trial: TrialView) -> None:
        if trial.keep == "best":
            first = first_epoch(trial.base, self.document.num_partitions)
            own = [trial.epochs[e] for e in sorted(trial.epochs) if e >= first]
            best = best_epoch(own, self.metric, self.direction)
            trial.best_epoch = None if best is None else first + best


_NOT_MEASURED = 2
"""The first group of trials that have no number as their metric, and stay in their order."""


def _group(trial: TrialView, measured: bool) -> int:
    if trial.status == "failed":
        return 5
    if not measured:
        return _NOT_MEASURED if trial.status == "finished" else 4 if trial.worker is None else 3
    return 0 if trial.status == "finished" else 1


@dataclass
class TrialView:
    """One trial: its parameters, where it is, and what it has measured."""

    trial: int
    trial_id: str
    params: dict[str, Any]
    keep: str = "last"
    """Whether its result is the state after its "best" epoch, or after its "last"."""
    status: str = "waiting"
    """"waiting", "training", "evaluating", "paused", or the end: "finished", "failed", "stopped",
    and "interrupted" if the run ended before the trial."""
    budget: int = 0
    """The epoch up to which the search lets it train; 0 before it is admitted."""
    rungs: list[int] = field(default_factory=list)
    """After how many epochs its search has compared it with others, ascending."""
    reason: str = ""
    """Why it ended: a failed trial's traceback, or why a trial finished early or was stopped."""
    extension_error: str = ""
    """Why it could not be trained further after it had finished; it has what it had reached."""
    uncut_because: str = ""
    """What an audit found to differ, so that it is trained again in one piece."""
    epoch: int = 0
    partition: int | None = None
    worker: int | None = None
    attempt: int | None = None
    """The task that it is in; the next one may start before this one is committed."""
    loss: float | None = None
    """Training loss of the latest batch or sub-epoch that an agent reported."""
    base: int = 0
    """The state at which it was forked from another trial, whose sub-epochs and epochs before that
    are its own too; 0 if it was not."""
    visits: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(epoch, partition) of each surviving sub-epoch, by the state that it made."""
    epochs: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics of each ended epoch: "train_loss", "val_loss", ..."""
    best_epoch: int | None = None
    """The epoch, from 0, with the best finite value so far; None for trials that keep the last."""
    shards: int = 0
    shards_before: int = 0
    """How many it had before it ran out of memory and was cut finer; 0 if it was not."""
    parameters: int = 0
    """How many the model has, frozen ones too; 0 if it was not admitted."""
    result_state: int | None = None
    """The state that is its result, which the run folder holds; 0 if it failed."""
    seconds: float = 0.0
    """Seconds spent in sub-epochs, their hops and evaluations, repeated ones too."""
    sub_epochs: int = 0
    """How many sub-epochs those seconds include."""

    @property
    def rung(self) -> int | None:
        """Return after how many epochs it was compared last; None if it never was."""
        return self.rungs[-1] if self.rungs else None

    @property
    def over(self) -> bool:
        """Return whether nothing more will happen to it."""
        return self.status in ("finished", "failed", "stopped")

    @property
    def rests(self) -> bool:
        """Return whether its run has ended for now, and keeps its result so far."""
        return not self.over and bool(self.result_state)

    def pause(self, rung: int | None) -> None:
        """Note that its search lets it rest, at a rung if there is one."""
        if not self.over:
            if rung is not None:
                self.rungs.append(rung)
            self.status = "paused"
            self.worker = self.partition = self.attempt = None

    def resume(self) -> None:
        """Note that its search lets it go on."""
        if self.status == "paused":
            self.status = "waiting"

    def change_cut(self, change: ChangeCut) -> None:
        """Note that it was cut finer."""
        self.shards, self.shards_before = change.shards, change.shards_before

    @property
    def finished_early(self) -> bool:
        """Return whether it finished before its last epoch because it had stopped improving."""
        return self.status == "finished" and self.reason != ""

    @property
    def stage(self) -> str:
        """Return its status as tables show it: "finished early" where it did that."""
        return "finished early" if self.finished_early else self.status

    @property
    def result_epoch(self) -> int | None:
        """Return the epoch, from 0, of its result: the best one, or the last that ended."""
        return self.best_epoch if self.best_epoch is not None else max(self.epochs, default=None)

    @property
    def result_metrics(self) -> dict[str, float]:
        """Return the metrics of `result_epoch`; empty before the first epoch has ended."""
        epoch = self.result_epoch
        return {} if epoch is None else self.epochs[epoch]

    @property
    def visit_log(self) -> list[tuple[int, int]]:
        """Return (epoch, partition) of each surviving sub-epoch, in the order of training."""
        return [self.visits[state] for state in sorted(self.visits)]

    @property
    def history(self) -> dict[str, list[float]]:
        """Return the values of each measured name, one per ended epoch."""
        ended = [self.epochs[epoch] for epoch in sorted(self.epochs)]
        return {name: [metrics[name] for metrics in ended] for name in (ended[0] if ended else ())}


@dataclass
class Totals:
    """Sums over the hops from worker to worker, for training and for evaluation.

    First loads from the store are not hops.
    """

    hops: int = 0
    bytes_moved: int = 0
    bytes_saved: int = 0
    seconds: float = 0.0

    def add(self, hop: Hop) -> None:
        """Count one hop."""
        self.hops += 1
        self.bytes_moved += hop.bytes_moved
        self.bytes_saved += hop.bytes_saved
        self.seconds += hop.seconds

    @property
    def seconds_per_hop(self) -> float:
        """Mean seconds of one hop; 0 before the first."""
        return self.seconds / self.hops if self.hops else 0.0

    @property
    def saved_share(self) -> float:
        """Share of the bytes of all hops that the receiver had already."""
        total = self.bytes_moved + self.bytes_saved
        return self.bytes_saved / total if total else 0.0

    def __str__(self) -> str:
        """Describe the totals in one line."""
        return (
            f"{self.hops} hops: {human_bytes(self.bytes_moved)} moved, "
            f"{human_bytes(self.bytes_saved)} saved ({self.saved_share:.0%}), "
            f"{1000 * self.seconds_per_hop:.0f} ms per hop"
        )


def human_bytes(count: int) -> str:
    """Format a count of bytes in decimal units, as 12.3 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


@dataclass
class DeviceTotals:
    """Sums up what one device has done, or DRAM, since its worker's queues got their first task."""

    worker: int
    device: int
    """Its number, or `HOST` for DRAM, whose bytes are promoted from disk and spilled to it."""
    budget: int | None = None
    """The bytes that may be in use at once; None if there is no limit."""
    peak: int = 0
    """The most bytes that were in use at once."""
    computing: float = 0.0
    copying: float = 0.0
    promoted: int = 0
    spilled: int = 0

    @property
    def name(self) -> str:
        """Return what it is called beside others of its worker."""
        return "DRAM" if self.is_dram else f"device {self.device}"

    @property
    def is_dram(self) -> bool:
        """Return whether it is no device, but the worker's memory, whose transfers are to disk."""
        return self.device == HOST

    def add(self, work: DeviceWork) -> None:
        """Count what it did."""
        self.budget, self.peak = work.budget, max(self.peak, work.peak)
        self.computing += work.computing
        self.copying += work.copying
        self.promoted += work.promoted
        self.spilled += work.spilled
