"""The stream of a run, record by record, as its observers are given it or its folder holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cerebro_hydra.plan.codec import from_json
from cerebro_hydra.plan.events import Event
from cerebro_hydra.plan.instructions import Instruction
from cerebro_hydra.plan.journal_fold import record as journal_record
from cerebro_hydra.storage.run_document import RUN_FILE, RunDocument
from cerebro_hydra.storage.run_folder import RunFolder


@dataclass(frozen=True)
class RunStarted:
    """The run begins; comes first."""

    document: RunDocument


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
        instructions = tuple(from_json(each) for each in line["instructions"])
        return cls(line["seq"], line["time"], from_json(line["event"]), instructions)


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
class RunEnded:
    """The run is over, however it ended; comes last."""

    seconds: float


Record = RunStarted | AgentStarted | Decision | Progress | OutputLine | SlowBatch | RunEnded


def records_of(folder: RunFolder) -> Iterator[Record]:
    """Yield the start, every decision, and the end, whose seconds are the journal's.

    The folder keeps no other kind of record.

    Raises:
        StoreError: there is no run document.
        JournalError: the journal is damaged.
    """
    yield RunStarted(RunDocument.from_json(folder.read_json(RUN_FILE)))
    first = last = 0.0
    for segment in folder.read_segments():
        for line in segment:
            if "event" in line:
                decision = Decision.from_json(line)
                last = decision.time
                first = first or last
                yield decision
    yield RunEnded(last - first)
