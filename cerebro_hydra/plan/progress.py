"""Records live agents, attempts and each trial's progress for the state machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Literal

from cerebro_hydra.plan.events import EvaluationDone, SubEpochDone, WorkerLost
from cerebro_hydra.plan.hop_config import HopConfig, TrialConfig
from cerebro_hydra.plan.instructions import StateSource
from cerebro_hydra.plan.lost_agents import LostAgent
from cerebro_hydra.plan.seeds import seed_of

TaskKind = Literal["train", "evaluate"]


@dataclass(slots=True)
class Attempt:
    """Records one task given to one worker: a sub-epoch or the evaluation of one partition."""

    number: int
    kind: TaskKind
    trial: int
    visit: int  # the state that it makes (train) or measures (evaluate)
    epoch: int
    partition: int
    worker: int
    incarnation: str
    source: StateSource
    started: bool = False  # False: it is reserved, behind another task of the worker
    received: bool = False  # the source state is whole at the worker
    ending: bool = False  # its last window has begun
    done: SubEpochDone | None = None  # held back until the visit before it is committed
    started_at: float = 0.0  # seconds by the clock of the estimates


@dataclass(slots=True)
class LiveAgent:
    """Records one live incarnation of a worker, the task it runs and the task it will run next."""

    worker: int
    incarnation: str
    partitions: tuple[int, ...]
    running: Attempt | None = None
    reserved: Attempt | None = None

    @property
    def open(self) -> bool:
        """Return whether it can be given a task: idle or ending one, with nothing reserved."""
        return self.reserved is None and (self.running is None or self.running.ending)


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """Names a task that could be given to an agent now."""

    trial: int
    kind: TaskKind
    partition: int
    agent: LiveAgent


@dataclass(frozen=True, slots=True)
class CommittedVisit:
    """Records a sub-epoch that counts."""

    attempt: int
    epoch: int
    partition: int
    rows: int
    loss_sum: float


@dataclass(slots=True)
class TrialProgress:
    """Records one trial's committed visits, its ended epochs, and the tasks that are under way."""

    config: TrialConfig
    visits: list[CommittedVisit] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)  # metrics by epoch
    pending_visits: list[Attempt] = field(default_factory=list)  # at most two, in order
    evaluations: dict[int, Attempt] = field(default_factory=dict)  # by partition
    evaluated: dict[int, EvaluationDone] = field(default_factory=dict)  # this epoch's, by partition
    merge_attempt: int | None = None  # the number of a ``MergeMetrics`` that has no answer yet
    transfer_failures: int = 0  # in a row, since the last task that succeeded
    lost_agents: list[LostAgent] = field(default_factory=list)  # in a row, by the trial's tasks
    innocent_below: int = 0  # attempts given out before the latest of them is known
    furthest: tuple[int, int] = (0, 0)  # most visits, and the evaluations after them, ever done
    # (visit, incarnation) of each cancelled fetch: its ``StateReceived`` may still arrive, late.
    abandoned_fetches: set[tuple[int, str]] = field(default_factory=set)
    saving: tuple[int, str] | None = None  # (visit, incarnation) of the checkpoint under way
    uncut: bool = False  # an audit has failed, so it is trained in one piece
    restarting: bool = False  # it goes back to state 0 as soon as no checkpoint is under way
    stop_reason: str | None = None  # None until the trial is stopped
    status: str | None = None  # "finished", "failed" or "stopped"; None until it has ended
    result: int | None = None  # the visit of the trial's result; None until it has ended
    log: list[str] = field(default_factory=list)

    @property
    def newest(self) -> int:
        """Return the visit of the newest committed state."""
        return len(self.visits)

    @property
    def attempts(self) -> list[Attempt]:
        """Return all attempts of the trial, running or reserved."""
        return [*self.pending_visits, *self.evaluations.values()]

    def note_lost_agent(self, ran: Attempt, lost: WorkerLost, next_attempt: int) -> None:
        """Hold the loss of an agent against the trial, which ran on it.

        An attempt that still waits for its shards counts too, because its agent may be building
        the trial's model. Several agents that are lost together, as with their machine, are one
        loss: what was given out before the loss is known is no further evidence.
        """
        if ran.number >= self.innocent_below:
            self.innocent_below = next_attempt
            self.lost_agents.append(
                LostAgent(ran.worker, lost.host, ran.kind, ran.epoch, ran.partition, lost.reason)
            )

    def note_progress(self) -> None:
        """Clear the trial of the agents lost with it, if it is now further than it ever was.

        Doing again what a loss has undone is no progress, or a trial that kills each agent at the
        same place would do so for ever.
        """
        reached = (len(self.visits), len(self.evaluated))
        if reached > self.furthest:
            self.furthest = reached
            self.lost_agents = []

    def forget_evaluation(self) -> None:
        """Drop what was measured, because the epoch is over or void."""
        self.evaluated, self.merge_attempt = {}, None

    def visited(self, partitions: int) -> list[int]:
        """Return this epoch's partitions that are trained or being trained, in visit order."""
        epoch = self.visits[len(self.history) * partitions :]
        return [visit.partition for visit in epoch] + [a.partition for a in self.pending_visits]

    def evaluation_begun(self) -> set[int]:
        """Return this epoch's partitions that are evaluated or being evaluated."""
        return self.evaluated.keys() | self.evaluations.keys()

    def epoch_trained(self, partitions: int) -> bool:
        """Return whether the present epoch is trained on every partition and committed."""
        return len(self.visits) == (len(self.history) + 1) * partitions


def visit_order(config: HopConfig, trial: int, epoch: int) -> tuple[int, ...]:
    """Return the order in which a trial visits an epoch's partitions when ``order="seeded"``.

    It is a row of a seeded Latin square: the partitions are shuffled per epoch, and each trial
    starts one further than the trial before it, so that trials spread over the workers.
    """
    order = _shuffled(config.seed, epoch, config.partitions)
    start = trial % config.partitions
    return order[start:] + order[:start]


@cache
def _shuffled(seed: int, epoch: int, partitions: int) -> tuple[int, ...]:
    order = list(range(partitions))
    Random(seed_of(seed, "visit order", epoch)).shuffle(order)
    return tuple(order)
