"""What the state machine remembers of workers, attempts and trials."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, Literal

from cerebro_hydra.plan.events import SubEpochDone
from cerebro_hydra.plan.hop_config import HopConfig, TrialConfig
from cerebro_hydra.plan.instructions import StateSource
from cerebro_hydra.plan.seeds import seed_of

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
    source: StateSource
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
class TaskChoice:
    """A task that could be given to an agent now."""

    trial: int
    kind: Kind
    partition: int
    agent: Agent


@dataclass(frozen=True, slots=True)
class Visit:
    """A sub-epoch that counts."""

    attempt: int
    epoch: int
    partition: int
    rows: int
    loss_sum: float


@dataclass(slots=True)
class TrialProgress:
    """One trial: its surviving visits, its ended epochs, and what runs for it now."""

    config: TrialConfig
    visits: list[Visit] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    pending_visits: list[Attempt] = field(
        default_factory=list
    )  # the next visit, and the one after it
    evaluations: dict[int, Attempt] = field(default_factory=dict)  # by partition
    sums: dict[int, Sums] = field(default_factory=dict)  # evaluated partitions of this epoch
    states: dict[int, dict[str, Any]] = field(default_factory=dict)  # of custom metrics, likewise
    measuring: int | None = None  # the number of the ``MergeMetrics`` that is not answered yet
    transfer_failures: int = 0  # in a row, since the last thing that worked
    # (visit, incarnation) whose fetch was given up: a receipt may be late and speak of that one
    abandoned_fetches: set[tuple[int, str]] = field(default_factory=set)
    saving: tuple[int, str] | None = None  # the checkpoint under way: visit, incarnation
    stop: str | None = None  # why it was stopped, once it was
    status: str | None = None  # how it ended, once it has
    result: int | None = None  # the visit of the state that it ended with; None while it trains
    log: list[str] = field(default_factory=list)

    @property
    def newest(self) -> int:
        """The visit of the newest committed state."""
        return len(self.visits)

    @property
    def attempts(self) -> list[Attempt]:
        """Everything that runs or is reserved for it."""
        return [*self.pending_visits, *self.evaluations.values()]

    def forget_evaluation(self) -> None:
        """The epoch that was being evaluated is over, or void."""
        self.sums, self.states, self.measuring = {}, {}, None

    def visited(self, partitions: int) -> list[int]:
        """The partitions of this epoch that are trained or being trained, in visit order."""
        epoch = self.visits[len(self.history) * partitions :]
        return [visit.partition for visit in epoch] + [a.partition for a in self.pending_visits]

    def epoch_trained(self, partitions: int) -> bool:
        """Whether the epoch under way is trained whole and committed."""
        return len(self.visits) == (len(self.history) + 1) * partitions


def visit_order(config: HopConfig, trial: int, epoch: int) -> tuple[int, ...]:
    """The order in which a trial visits the partitions of an epoch when ``order="seeded"``.

    A row of a seeded Latin square: the partitions are shuffled per epoch, and each trial starts
    one further, so that trials spread over the workers.
    """
    order = _shuffled(config.seed, epoch, config.partitions)
    start = trial % config.partitions
    return order[start:] + order[:start]


@cache
def _shuffled(seed: int, epoch: int, partitions: int) -> tuple[int, ...]:
    order = list(range(partitions))
    Random(seed_of(seed, "visit order", epoch)).shuffle(order)
    return tuple(order)
