"""A plan says what a search takes on different workers, a row for each kind of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.hopper.run_config import hop_config
from cerebro_hydra.observe.records import Decision, Record, RunEnded, RunStarted, TrialAdmitted
from cerebro_hydra.observe.report import render_records
from cerebro_hydra.plan.costs.model import CostModel
from cerebro_hydra.plan.human_units import bytes_text, numbers_text, seconds_text
from cerebro_hydra.plan.messages.events import TrialAdded, TrialProposed
from cerebro_hydra.planning.earlier_run import EarlierRun
from cerebro_hydra.planning.followed_search import Admit, Follower, Recorded
from cerebro_hydra.planning.planned_trials import PlannedTrial
from cerebro_hydra.planning.simulated_search import (
    WORTH_IT,
    Exchange,
    Metric,
    Outcome,
    Place,
    simulate,
)
from cerebro_hydra.storage.names import trial_name
from cerebro_hydra.storage.run_document import RunDocument

HEAD = (
    "workers", "devices", "device memory", "time", "at least", "cost", "busy", "network",
    "device <-> DRAM", "disk", "device peak", "DRAM peak",
)  # fmt: skip

_MOST = {"workers": 10_000, "devices": 256}
"""Of so many of each a plan is made in about a minute."""

_GOLDEN = 0.6180339887498949


def any_metric(trial: int, epoch: int) -> float:
    """Return a loss that falls by epochs, with trials ranked in no order of their numbers.

    So no trial ends early, and those that a rung keeps are drawn evenly from the candidates.
    """
    return 1.0 + (trial * _GOLDEN) % 1.0 + 1.0 / (epoch + 1)


@dataclass(frozen=True)
class Question:
    """Holds what a plan is asked for, checked.

    Args:
        places: the number of workers, and what each of them has.
        price: of an hour of a worker, in any currency; None if nobody asks for the cost.
    """

    places: tuple[tuple[int, WorkerResources], ...]
    price: float | None

    @classmethod
    def checked(
        cls,
        backend: WorkerResources,
        num_workers: int,
        workers: Any,
        devices: Any,
        device_memory: Any,
        price_per_hour: Any,
    ) -> Question:
        """Take what a user asks; what is None is as the backend has it.

        Raises:
            ConfigurationError: an argument can't be used; the message names it and its value.
        """
        sizes = WorkerResources.checked(None, device_memory, None, None, "auto")
        memory = backend.device_memory if device_memory is None else sizes.device_memory
        if backend.device_kind == "cuda" and memory is not None:
            has = backend.device_memory
            if has is not None and memory > has:
                raise ConfigurationError(
                    f"device_memory is {bytes_text(memory)}, and the backend's GPUs have "
                    f"{bytes_text(has)}; lower it, or plan with a backend of larger ones"
                )
        places = []
        counts = _counts("workers", workers, num_workers), _counts("devices", devices, 0)
        for number, count in product(*counts):
            count = count or backend.devices
            if backend.device_kind == "cuda" and count > backend.devices:
                raise ConfigurationError(
                    f"devices has {count}, and each worker of the backend has {backend.devices} "
                    "GPU(s); plan for at most so many, or with a backend of more"
                )
            places.append((number, replace(backend, devices=count, device_memory=memory)))
        return cls(tuple(places), _price(price_per_hour))


def _counts(name: str, value: Any, usual: int) -> Sequence[int]:
    if value is None:
        return (usual,)
    given = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not given or any(type(each) is not int or each < 1 for each in given):
        raise ConfigurationError(
            f"{name} is {value!r}; give whole numbers from 1, such as {name}=[2, 8]"
        )
    if (most := max(given)) > _MOST[name]:
        raise ConfigurationError(
            f"{name} has {most}, and a plan is made for {_MOST[name]} at most; give fewer"
        )
    return tuple(dict.fromkeys(given))


def _price(value: Any) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ConfigurationError(
            f"price_per_hour is {value!r}; give what an hour of a worker costs, a number from 0"
        )
    return float(value)


@dataclass(frozen=True)
class PlanRow:
    """Says what the search takes on one kind of workers.

    Args:
        outcome: None where no trial fits.
        price: of an hour of a worker.
        refused: why trials do not fit, by number.
        document: describes the run that would be.
    """

    workers: int
    resources: WorkerResources
    outcome: Outcome | None
    price: float | None
    refused: dict[int, str]
    document: RunDocument | None = None

    @property
    def cost(self) -> float | None:
        """Return what the workers cost, in the currency of the price."""
        if self.price is None or self.outcome is None:
            return None
        return self.price * self.workers * self.outcome.seconds / 3600

    def to_json(self) -> dict[str, Any]:
        """Describe the row in JSON."""
        numbers: dict[str, Any] = {}
        if (found := self.outcome) is not None:
            names = ("seconds", "start", "bound", "busy", "hopped", "copied", "disk")
            numbers = {name: getattr(found, name) for name in (*names, "device_peak", "host_peak")}
        return {
            "workers": self.workers,
            "devices": self.resources.devices,
            "device_memory": self.resources.device_memory,
            "cost": self.cost,
            **numbers,
            "refused": {trial_name(number): why for number, why in self.refused.items()},
        }

    def records(self) -> Iterator[Record]:
        """Yield the records of the simulated run, as a real one would have them."""
        assert self.outcome is not None and self.document is not None
        timeline, begun = self.outcome.timeline, time.time()
        yield RunStarted(self.document)
        decided = zip(timeline.moments, timeline.records, strict=True)
        for seq, (moment, (event, instructions)) in enumerate(decided):
            if isinstance(event, TrialAdded):
                yield TrialAdmitted(self.outcome.trials[event.config.trial].spec)
            yield Decision(seq, begun + moment, event, tuple(instructions))
        yield RunEnded(timeline.makespan)


@dataclass(frozen=True)
class Plan:
    """Holds a row for each kind of workers that was asked for; prints as a table.

    Args:
        rows: in the order in which they were asked for.
        costs: by what seconds were counted, for the last row.
        notes: what the reader should know of the numbers.
    """

    rows: tuple[PlanRow, ...]
    costs: CostModel
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Describe the plan in JSON."""
        rows = [row.to_json() for row in self.rows]
        return {"rows": rows, "costs": self.costs.to_json(), "notes": list(self.notes)}

    def __str__(self) -> str:
        """Return the table, with what does not fit and the notes below it."""
        cells = [HEAD, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in cells]
        for row in self.rows:
            lines += _refusals(row)
            lines += _exchanges(row)
        return "\n".join([*lines, *self.notes])

    def page(self, row: int = 0) -> str:
        """Return the report of a row, as if it had run: one page that needs only a browser.

        Raises:
            ConfigurationError: there is no such row, or nothing fits there.
        """
        if row not in range(len(self.rows)) or self.rows[row].outcome is None:
            raise ConfigurationError(
                f"row is {row!r}; give that of workers on which trials fit, from 0"
            )
        return render_records(self.rows[row].records(), planned=str(self))


def _cells(row: PlanRow) -> tuple[str, ...]:
    memory = row.resources.device_memory
    place = (
        str(row.workers),
        str(row.resources.devices),
        "no limit" if memory is None else bytes_text(memory),
    )
    if (found := row.outcome) is None:
        return *place, "does not fit", *[""] * (len(HEAD) - len(place) - 1)
    return (
        *place,
        seconds_text(found.seconds),
        seconds_text(found.bound),
        "" if row.cost is None else f"{row.cost:,.2f}",
        f"{100 * found.busy:.0f}%",
        bytes_text(found.hopped),
        bytes_text(found.copied),
        bytes_text(found.disk),
        bytes_text(found.device_peak),
        bytes_text(found.host_peak),
    )


def _refusals(row: PlanRow) -> list[str]:
    trials_of: dict[str, list[int]] = {}
    for number, why in row.refused.items():
        trials_of.setdefault(why.strip().splitlines()[-1], []).append(number)
    where = f"{row.workers} worker(s) of {row.resources.devices} device(s)"
    return [f"{where}: trial {numbers_text(n)}: {why}" for why, n in trials_of.items()]


def _exchanges(row: PlanRow) -> list[str]:
    """Return for each kind of trials whether their replicas are worth what they exchange."""
    trials_of: dict[Exchange, list[int]] = {}
    for number, each in ({} if row.outcome is None else row.outcome.exchanges).items():
        trials_of.setdefault(each, []).append(number)
    return [
        f"{row.workers} workers: trial {numbers_text(numbers)}: {each.replicas} replicas exchange "
        f"{bytes_text(each.nbytes)} of gradients in each step, {1e3 * each.seconds:.1f} ms beside "
        f"{1e3 * each.step:.1f} ms of computing, {each.share:.2f} of it; "
        f"{'worth it, as it is' if each.share < WORTH_IT else 'not worth it, as it is not'} "
        f"below {WORTH_IT}"
        for each, numbers in trials_of.items()
    ]


# ---------------------------------------------------------------------- making plans


@dataclass(frozen=True)
class SearchParts:
    """Holds what a plan needs of a search.

    Args:
        rows: of all training and of all validation partitions.
        follower: returns one that has not begun, by the number of partitions.
        admitting: returns what admits candidates for workers of a kind.
        document: describes the run, by the number of partitions; a trial was admitted before.
        metric: what trials measure, by number and epoch; None for any.
    """

    rows: tuple[int, int]
    follower: Callable[[int], Follower]
    admitting: Callable[[WorkerResources], Admit]
    document: Callable[[int], RunDocument]
    metric: Metric | None = None


def plan_search(
    question: Question, parts: SearchParts, costs: CostModel, notes: Sequence[str]
) -> Plan:
    """Plan a search on every kind of workers that is asked for."""
    rows = []
    for workers, resources in question.places:
        admit = parts.admitting(resources)
        rows.append(_row(workers, resources, parts, admit, costs, question.price))
    part = max((row.outcome.part for row in rows if row.outcome is not None), default=1)
    more = []
    if part > 1:
        more = [
            f"Of a search of so many sub-epochs, a {part}th of the trials was simulated on a "
            f"{part}th of the workers."
        ]
    return Plan(tuple(rows), costs, (*notes, *more))


def _row(
    workers: int,
    resources: WorkerResources,
    parts: SearchParts,
    admitted: Admit,
    costs: CostModel,
    price: float | None,
) -> PlanRow:
    place = Place(workers, resources, *(_shared(rows, workers) for rows in parts.rows))

    def admit(candidate: TrialProposed) -> PlannedTrial | str:
        found = admitted(candidate)
        if isinstance(found, PlannedTrial):
            try:
                resources.check_replicas(found.spec.asked_replicas, workers, workers)
            except ConfigurationError as error:
                return str(error)
        return found

    refused: dict[int, str] = {}
    for event in parts.follower(workers).begin():
        if isinstance(event, TrialProposed):
            found = admit(event)
            if not isinstance(found, str):
                break
            refused[event.trial] = found
    else:
        return PlanRow(workers, resources, None, price, refused)
    document = replace(parts.document(workers), run_id=f"plan-of-{workers}-workers")
    config = hop_config(document)
    sign = 1.0 if config.direction == "min" else -1.0
    metric = parts.metric or (lambda trial, epoch: sign * any_metric(trial, epoch))
    outcome = simulate(config, parts.follower(workers), admit, place, costs, metric)
    return PlanRow(workers, resources, outcome, price, outcome.refused, document)


def _shared(rows: int, partitions: int) -> tuple[int, ...]:
    """Return how rows are shared out, as preparation does."""
    return tuple((rows + partition) // partitions for partition in range(partitions))


def plan_again(run: EarlierRun, question: Question) -> Plan:
    """Plan the trials of an earlier run, each for as many epochs as it trained there.

    Raises:
        ConfigurationError: the run did not measure what tasks need on such devices.
    """
    trials = {n: trial for n, trial in run.trials.items() if run.epochs[n]}
    for _, resources in question.places:
        for trial in trials.values():
            trial.require_measured(resources)
    rows = run.rows
    again = [(trial, run.epochs[number]) for number, trial in trials.items()]

    def admitting(resources: WorkerResources) -> Admit:
        def admit(candidate: TrialProposed) -> PlannedTrial | str:
            trial = again[candidate.trial][0].numbered(candidate.trial)
            return fitting(replace(trial, spec=replace(trial.spec, patience=None)), resources, rows)

        return admit

    parts = SearchParts(
        rows,
        lambda partitions: Recorded(again),
        admitting,
        lambda partitions: replace(run.document, num_partitions=partitions),
    )
    measured = f"By run {run.document.run_id}, which took {seconds_text(run.seconds)}."
    return plan_search(question, parts, run.costs(), [measured])


def fitting(
    trial: PlannedTrial, resources: WorkerResources, rows: Sequence[int]
) -> PlannedTrial | str:
    """Return a trial, or why its largest task fits no such worker, with the numbers."""
    budget = math.inf if resources.device_memory is None else resources.device_memory
    host = math.inf if resources.queued_memory is None else resources.queued_memory
    visit = trial.visit("train", max(rows[0], 1), resources, 1.0)
    lacking = visit.lacking((budget,) * resources.devices, host)
    return lacking or trial
