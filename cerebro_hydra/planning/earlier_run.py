"""Reads what a run cost from its folder, to plan others by it; no Spark job is needed for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.protocol.resources import QUEUED_SHARE, WorkerResources
from cerebro_hydra.hopper.run_config import hop_config
from cerebro_hydra.observe.records import Decision, records_of
from cerebro_hydra.observe.view import RunView
from cerebro_hydra.plan.costs.measured import Decided, measured
from cerebro_hydra.plan.costs.model import CostModel, Kind
from cerebro_hydra.plan.costs.moves import MoveRates
from cerebro_hydra.plan.messages.actions import HOST
from cerebro_hydra.plan.messages.events import (
    DevicesWorked,
    EvaluationDone,
    Event,
    RunResumed,
    RunSuspended,
    SubEpochDone,
    TaskFailed,
    TransferFailed,
    WorkerGivenUp,
    WorkerJoined,
    WorkerLost,
)
from cerebro_hydra.plan.simulate.fluid import Flow
from cerebro_hydra.planning.followed_search import Recorded
from cerebro_hydra.planning.planned_trials import PlannedTrial
from cerebro_hydra.planning.simulated_search import Place, simulate
from cerebro_hydra.storage.run_document import RunDocument
from cerebro_hydra.storage.run_folder import RunFolder


class EarlierRun:
    """Is a run that others are planned by.

    Args:
        folder: its own.
        rates: the speeds of moves that are known; that of the wire is corrected.

    Attributes:
        document: describes it.
        trials: those that were admitted, by number.
        epochs: how many each of them has trained.
        seconds: that it took, as its journal says.
        workers: how many joined it.
        resources: what each of them had.
        rows: of all training and of all validation partitions.

    Raises:
        StoreError: there is no run document.
        JournalError: the journal is damaged.
        ConfigurationError: it has not gone through all rows once, so that it says too little.
    """

    def __init__(self, folder: RunFolder, rates: MoveRates) -> None:
        view, decisions = RunView(), list[Decided]()
        resources, joined = WorkerResources(), set[int]()
        for record in records_of(folder):
            view.apply(record)
            if not isinstance(record, Decision):
                continue
            event = record.event
            decisions.append((record.time, event, record.instructions))
            if isinstance(event, WorkerJoined):
                joined.add(event.worker)
                resources = replace(resources, devices=event.devices, residents=event.residents)
            if isinstance(event, DevicesWorked):
                for work in event.devices:
                    if work.device != HOST:
                        resources = replace(resources, device_memory=work.budget)
                    elif work.budget is not None:  # of which the queues plan with a share
                        resources = replace(resources, host_memory=int(work.budget / QUEUED_SHARE))
        self.document: RunDocument = view.document
        self.seconds = view.seconds or 0.0
        usual = replace(resources, residents=None)
        if usual.most_residents == resources.residents:  # other devices have as many as is usual
            resources = usual
        self.workers, self.resources = len(joined), resources
        numbers = [number for number in folder.trials() if number in view.trials]
        specs = {n: folder.read_trial(n, self.document.run_id) for n in numbers}
        self.trials = {number: PlannedTrial(spec) for number, spec in specs.items()}
        self.epochs = {number: len(view.trials[number].epochs) for number in self.trials}
        splits = ("train", "val") if self.document.validated else ("train",)
        partitions = range(self.document.num_partitions)
        if any((split, p) not in view.rows for split in splits for p in partitions):
            raise ConfigurationError(
                f"run {folder.path!r} has not gone through all of its partitions, so that it does "
                "not say what they cost; plan by a run in which a trial ended an epoch"
            )
        train, val = (
            sum(view.rows.get((split, partition), 0) for partition in partitions)
            for split in ("train", "val")
        )
        self.rows = train, val
        self._decisions, self._rates, self._partition_rows = decisions, rates, dict(view.rows)

    def costs(self, measured_anew: Mapping[str, PlannedTrial] | None = None) -> CostModel:
        """Return what its events say.

        Args:
            measured_anew: trials by structure whose tasks were measured since. Their profiles are
                corrected, instead of those that the run began with.
        """
        anew = measured_anew or {}
        trials = {  # whose admissions the run's events tell, whatever those took that were measured
            n: replace(anew.get(trial.structure, trial), admission=None)
            for n, trial in self.trials.items()
        }

        @cache
        def profiled(kind: Kind, structure: str, rows: int) -> float:
            return Flow(by_structure[structure].visit(kind, rows, self.resources, 1.0)).seconds

        by_structure = {trial.structure: trial for trial in trials.values()}
        structures = {number: trial.structure for number, trial in trials.items()}

        def seconds(kind: Kind, trial: int, partition: int) -> float:
            rows = self._partition_rows["train" if kind == "train" else "val", partition]
            return profiled(kind, structures[trial], rows)

        found = measured(self._decisions, structures, seconds, self._rates)
        return replace(found, lag=self._lag(found, trials))

    def _lag(self, costs: CostModel, trials: Mapping[int, PlannedTrial]) -> float:
        """Return what the run took for each second that it takes when it is simulated by its costs.

        Nobody measures what devices wait for between two tasks, or lose to one another.
        """
        rows = [
            tuple(
                self._partition_rows.get((split, partition), 0)
                for partition in range(self.document.num_partitions)
            )
            for split in ("train", "val")
        ]
        disturbed = any(isinstance(event, _DISTURBANCES) for _, event, _ in self._decisions)
        if disturbed or self.workers != self.document.num_partitions:
            return 1.0
        again = [(trials[number], epochs) for number, epochs in self.epochs.items() if epochs]
        place = Place(self.workers, self.resources, *rows)
        config = hop_config(self.document)
        timeline = simulate(
            config,
            Recorded(again),
            lambda candidate: again[candidate.trial][0].numbered(candidate.trial),
            place,
            costs,
            lambda trial, epoch: 1.0 / (epoch + 1),
        ).timeline
        simulated = zip(timeline.moments, (event for event, _ in timeline.records), strict=True)
        took = _span((moment, event) for moment, event, _ in self._decisions)
        would = _span(simulated)
        return took / would if would > 0 else 1.0


_DISTURBANCES = (WorkerLost, WorkerGivenUp, TaskFailed, TransferFailed, RunResumed, RunSuspended)


def _span(events: Iterable[tuple[float, Event]]) -> float:
    """Return the seconds from the first forward of any task to the end of the last one."""
    tasks = [
        (moment - event.seconds, moment)
        for moment, event in events
        if isinstance(event, SubEpochDone | EvaluationDone)
    ]
    return max(end for _, end in tasks) - min(begin for begin, _ in tasks)
