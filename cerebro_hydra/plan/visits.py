"""What the state machine remembers of workers, attempts and trials."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cerebro_hydra.plan.events import SubEpochDone
from cerebro_hydra.plan.hop_config import TrialConfig
from cerebro_hydra.plan.instructions import Source

Kind = Literal["train", "evaluate"]
Sums = dict[str, tuple[float, int]]


@dataclass(slots=True)
class Attempt:
    """One task given to one worker: a sub-epoch or the evaluation of one partition."""

    number: int
    kind: Kind
    trial: int
    visit: int  # the state that it makes (train) or looks at (evaluate)
    epoch: int
    partition: int
    worker: int
    incarnation: str
    source: Source
    started: bool = False  # False: a reservation, behind another task of the worker
    received: bool = False  # the source state is whole at the worker
    ending: bool = False
    done: SubEpochDone | None = None  # held back until the visit before it is committed
    started_at: float = 0.0  # by the estimates' clock


@dataclass(slots=True)
class Agent:
    """One live incarnation of a worker."""

    worker: int
    incarnation: str
    partitions: tuple[int, ...]
    running: Attempt | None = None
    reserved: Attempt | None = None

    @property
    def open(self) -> bool:
        """Whether it can be given a task: it is idle, or about to be and not yet promised."""
        return self.reserved is None and (self.running is None or self.running.ending)


@dataclass(frozen=True, slots=True)
class Visit:
    """A sub-epoch that counts."""

    attempt: int
    epoch: int
    partition: int
    rows: int
    loss_sum: float


@dataclass(slots=True)
class Trial:
    """One trial: its surviving visits, its ended epochs, and what runs for it now."""

    config: TrialConfig
    visits: list[Visit] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    chain: list[Attempt] = field(default_factory=list)  # the next visit, and the one after it
    evaluations: dict[int, Attempt] = field(default_factory=dict)  # by partition
    sums: dict[int, Sums] = field(default_factory=dict)  # evaluated partitions of this epoch
    transfer_failures: int = 0  # in a row, since the last thing that worked
    # (visit, incarnation) whose fetch was given up: a receipt may be late and speak of that one
    doubtful: set[tuple[int, str]] = field(default_factory=set)
    saving: tuple[int, str] | None = None  # the checkpoint under way: visit, incarnation
    stop: str | None = None  # why it was stopped, once it was
    status: str | None = None  # how it ended, once it has
    log: list[str] = field(default_factory=list)

    @property
    def newest(self) -> int:
        """The visit of the newest committed state."""
        return len(self.visits)

    @property
    def attempts(self) -> list[Attempt]:
        """Everything that runs or is reserved for it."""
        return [*self.chain, *self.evaluations.values()]

    def visited(self, partitions: int) -> list[int]:
        """The partitions of this epoch that are trained or being trained, in visit order."""
        epoch = self.visits[len(self.history) * partitions :]
        return [visit.partition for visit in epoch] + [a.partition for a in self.chain]

    def epoch_trained(self, partitions: int) -> bool:
        """Whether the epoch under way is trained whole and committed."""
        return len(self.visits) == (len(self.history) + 1) * partitions
