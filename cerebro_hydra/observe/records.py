"""The stream of a run, record by record, as its observers are given it or its folder holds it.

An observer watches a run; a broken one does not harm it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Protocol, TypedDict, runtime_checkable

from cerebro_hydra.documents import Count, decode, one_of, within
from cerebro_hydra.errors import CerebroHydraError, JournalError, StoreError
from cerebro_hydra.plan.hop.journal import record as journal_record
from cerebro_hydra.plan.messages.codec import from_json
from cerebro_hydra.plan.messages.events import (
    Event,
    RunResumed,
    TrialAdded,
    TrialForked,
    TrialProposed,
)
from cerebro_hydra.plan.messages.instructions import FinishTrial, Instruction
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from cerebro_hydra.storage.run_folder import RunFolder, read_document

ENDS = ("finished", "failed", "stopped")
"""How a trial may end."""

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStarted:
    """The run begins or goes on; comes first.

    `past` reads what was told of a run that goes on: its trials and decisions, in order.
    """

    document: RunDocument
    past: Callable[[], Iterable[TrialAdmitted | Decision]] = tuple


@dataclass(frozen=True)
class TrialAdmitted:
    """A trial joins the run; comes before the decision that adds or forks it."""

    spec: TrialSpec


@dataclass(frozen=True)
class AgentStarted:
    """An agent has dialled in, the first of its worker or one that replaces a lost one.

    `gpus` are the addresses that it was given; `numeric` says what its bits depend on.
    """

    worker: int
    incarnation: str
    host: str
    pid: int
    gpus: tuple[str, ...]
    numeric: Mapping[str, Any]


@dataclass(frozen=True)
class Decision:
    """An event with the instructions that it led to; the journal holds these and nothing else.

    `seq` counts from 0, `time` is in seconds since 1970.
    """

    seq: int
    time: float
    event: Event
    instructions: tuple[Instruction, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the journal's line."""
        return {"time": self.time, **journal_record(self.seq, self.event, self.instructions)}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Decision:
        """Return the decision of a journal's line.

        Raises:
            JournalError: an event or instruction can't be read.
        """
        try:
            fields = decode(_Line, line, "a line of the journal")
        except StoreError as error:
            raise JournalError(str(error)) from error
        instructions = tuple(map(from_json, fields["instructions"]))
        return cls(fields["seq"], fields["time"], from_json(fields["event"]), instructions)


class _Line(TypedDict):
    seq: Count
    time: Annotated[float, within(0)]
    event: dict[str, Any]
    instructions: list[dict[str, Any]]


@dataclass(frozen=True)
class Progress:
    """A sub-epoch has done `step` of its `steps` optimizer steps; comes twice a second at most."""

    worker: int
    trial: int
    epoch: int
    partition: int
    step: int
    steps: int
    loss: float


@dataclass(frozen=True)
class OutputLine:
    """A line that a user's code printed or logged; `trial` is None outside of any trial.

    `stream` is "stdout", "stderr" or "log".
    """

    worker: int
    trial: int | None
    stream: str
    line: str


@dataclass(frozen=True)
class SlowBatch:
    """A batch takes far longer than those before it, and goes on; comes once per task at most.

    `seconds` is what it has taken so far, `median` what this trial's batches take on this agent;
    None before the first one.
    """

    worker: int
    trial: int
    epoch: int
    partition: int
    seconds: float
    median: float | None


@dataclass(frozen=True)
class WorkersMissing:
    """Workers have no agent now; comes every half a minute while they are waited for.

    `seconds` is how long the one that has been missing longest is; after `limit` seconds others
    take over the partitions of a worker.
    """

    workers: tuple[int, ...]
    seconds: float
    limit: float


@dataclass(frozen=True)
class NotSaved:
    """The store refuses a file of the run, which goes on and tries again.

    What can't be written of a trial's states is told by the decision on `CheckpointFailed`.
    """

    what: str
    error: str


@dataclass(frozen=True)
class RunEnded:
    """The run is over, however it ended; comes last."""

    seconds: float
    unwritten: tuple[int, ...] = ()
    """The trials whose ends the store refused to the last, so that the run does not have them."""


Record = (
    RunStarted
    | TrialAdmitted
    | AgentStarted
    | Decision
    | Progress
    | OutputLine
    | SlowBatch
    | WorkersMissing
    | NotSaved
    | RunEnded
)


def unfolded(record: Record) -> Iterator[Record]:
    """Yield a record, and after the start of a run that goes on what was told of it before."""
    if isinstance(record, RunStarted):
        yield RunStarted(record.document)
        yield from record.past()
    else:
        yield record


def records_of(folder: RunFolder) -> Iterator[Record]:
    """Yield the start, trials, every decision, and the end, whose seconds are the journal's.

    Those between the end of a driver and the resume of its run don't count. The folder keeps no
    other kind of record.

    Raises:
        StoreError: the document of the run or of a trial is absent or damaged.
        JournalError: the journal is damaged.
    """
    document = read_document(folder)
    limits = {**_LIMITS, **_limits_of(document)}
    folder.check_journal(document)
    yield RunStarted(document)
    seconds, last = 0.0, math.inf
    for line in folder.read_records():
        decision = Decision.from_json(line)
        if isinstance(decision.event, TrialProposed):
            limits["trial"] = max(limits["trial"], decision.event.trial)
        if isinstance(decision.event, TrialAdded | TrialForked):
            spec = folder.read_trial(decision.event.config.trial, document.run_id)
            limits["trial"] = max(limits["trial"], spec.trial)
            yield TrialAdmitted(spec)
        for each in (decision.event, *decision.instructions):
            _check(each, limits, f"record {decision.seq} of run {folder.path!r}")
        if not isinstance(decision.event, RunResumed):
            seconds += max(0.0, decision.time - last)
        last = decision.time
        yield decision
    yield RunEnded(seconds)


_LIMITS = {
    "attempt": 2**63,
    "state": 2**63,
    "worker": 2**31,
    "seconds": 2**63,
    "audit_seconds": 2**63,
    "bytes_moved": 2**63,
    "bytes_saved": 2**63,
    "nbytes": 2**63,
}
"""Every number of these names lies from 0 up to here, whatever the run."""


def _limits_of(document: RunDocument) -> dict[str, int]:
    return {
        "trial": -1,  # of the trials so far
        "epoch": document.num_epochs - 1,
        "partition": document.num_partitions - 1,
    }


def _check(record: Any, limits: Mapping[str, int], where: str) -> None:
    """Refuse numbers that the run does not have, and ends that no trial comes to."""
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value):
            _check(value, limits, where)
        elif field.name in limits and value is not None:
            within(0, limits[field.name])(value, f"{field.name} in {where}")
    if isinstance(record, FinishTrial):
        one_of(*ENDS)(record.status, f"status in {where}")


@runtime_checkable
class Observer(Protocol):
    """Watches a run: it is given every record, in order, from one thread at a time."""

    def on_record(self, record: Record) -> None:
        """Take in one record."""
        ...


class Observers:
    """Several observers as one that never raises: one that fails is logged once and left out."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)

    def on_record(self, record: Record) -> None:
        """Give a record to each observer that still works."""
        for observer in list(self._observers):
            try:
                observer.on_record(record)
            except Exception as error:
                self._observers.remove(observer)
                said = isinstance(error, CerebroHydraError)
                _LOGGER.error(
                    "%s failed on a %s record and sees no more of this run, which goes on%s",
                    type(observer).__name__,
                    type(record).__name__,
                    f": {error}" if said else "",
                    exc_info=not said,
                )
