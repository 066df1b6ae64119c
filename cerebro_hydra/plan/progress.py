"""Records attempts and each trial's progress for the state machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Literal

from cerebro_hydra.plan.bits import mask_of
from cerebro_hydra.plan.evaluation import Evaluation
from cerebro_hydra.plan.events import SubEpochDone, WorkerLost
from cerebro_hydra.plan.hop_config import HopConfig, TrialConfig
from cerebro_hydra.plan.instructions import StateSource
from cerebro_hydra.plan.lost_agents import LostAgent
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.plan.visit_log import VisitLog

TaskKind = Literal["train", "evaluate"]
AttemptStatus = Literal["reserved", "fetching", "running", "ending", "done", "cancelled"]
TrialStatus = Literal["waiting", "running", "paused", "finished", "stopped", "failed"]

OVER: tuple[TrialStatus, ...] = ("finished", "stopped", "failed")
MOST_FAILED_TRANSFERS = 3  # of a state from one place, which is no source of it any more then
STORY_LINES = 100  # of a trial that are kept; the journal has all of them


@dataclass(slots=True)
class Attempt:
    """Records one task given to one worker: a sub-epoch or the evaluation of one partition.

    ``plan/attempts.py`` has the table of what happens when its status changes.
    """

    number: int
    kind: TaskKind
    trial: int
    visit: int  # the state that it makes (train) or measures (evaluate)
    epoch: int
    partition: int
    worker: int
    incarnation: str
    source: StateSource
    status: AttemptStatus = "reserved"
    done: SubEpochDone | None = None  # held back until the visit before it is committed
    started_at: float = 0.0  # seconds by the clock of the estimates


@dataclass(frozen=True, slots=True)
class FailedWrite:
    """Notes that a state could not be written to the store, how often in a row, and why."""

    visit: int
    times: int
    error: str


@dataclass(slots=True)
class TrialProgress:
    """Records one trial's committed visits, its ended epochs, and the tasks that are under way."""

    config: TrialConfig
    budget: int  # the epoch up to which it may train now
    tie_break: float  # decides between trials with as much work left
    visits: VisitLog
    status: TrialStatus = "waiting"
    history: list[dict[str, float]] = field(default_factory=list)  # metrics by epoch
    trained: int = 0  # the partitions of the present epoch that are committed, as a mask
    pending_visits: list[Attempt] = field(default_factory=list)  # at most two, in order
    evaluations: dict[int, Attempt] = field(default_factory=dict)  # by partition
    evaluating: int = 0  # the partitions of ``evaluations``, as a mask
    evaluation: Evaluation = field(default_factory=Evaluation)  # of the present epoch
    merge_attempt: int | None = None  # the number of a ``MergeMetrics`` that has no answer yet
    failed_transfers: dict[tuple[int, str], int] = field(default_factory=dict)  # by visit and place
    lost_agents: list[LostAgent] = field(default_factory=list)  # in a row, by the trial's tasks
    innocent_below: int = 0  # attempts given out before the latest of them is known
    void_tasks: dict[tuple[TaskKind, int], int] = field(default_factory=dict)
    """The partitions of tasks that were done, and whose results were lost, by kind and epoch."""
    furthest: tuple[int, int] = (0, 0)  # most visits, and the evaluations after them, ever done
    # (visit, incarnation) of states that arrived before they were committed, and of each cancelled
    # fetch, whose ``StateReceived`` may still arrive, late.
    arrived: set[tuple[int, str]] = field(default_factory=set)
    abandoned_fetches: set[tuple[int, str]] = field(default_factory=set)
    saving: tuple[int, str] | None = None  # (visit, incarnation) of the checkpoint under way
    failed_write: FailedWrite | None = None  # the latest of a state, until one is written
    uncut: bool = False  # an audit has failed, so it is trained in one piece
    restarting: bool = False  # it goes back to state 0 as soon as no checkpoint is under way
    lacking: str | None = None  # why it is to be cut finer, for want of memory
    recutting: tuple[int, ...] | None = None  # the states of a ``CutFiner`` without an answer
    shards_before: int | None = None  # it was cut finer
    stop_reason: str | None = None  # None until the trial is stopped
    rest_at: int | None = None  # while paused, the epochs that it has or, after a loss, makes again
    base: int = 0  # the visit of the oldest state that it may fall back to
    awaits: int | None = None  # the parent whose state ``base`` is not in the store yet
    result: int | None = None  # the visit of the trial's result; None until it has ended
    log: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Return whether the trial has ended."""
        return self.status in OVER

    @property
    def newest(self) -> int:
        """Return the visit of the newest committed state."""
        return len(self.visits)

    @property
    def attempts(self) -> list[Attempt]:
        """Return all attempts of the trial, running or reserved."""
        return [*self.pending_visits, *self.evaluations.values()]

    def tell(self, line: str) -> None:
        """Add a line to the trial's story; the oldest ones go."""
        self.log.append(line)
        if len(self.log) > STORY_LINES:
            del self.log[0]

    def note_lost_agent(self, ran: Attempt, lost: WorkerLost, next_attempt: int) -> None:
        """Hold the loss of an agent against the trial, which ran on it.

        An attempt that still waits for its shards counts too, because its agent may be building
        the trial's model. Several agents that are lost together, as with their machine, are one
        loss: what was given out before the loss is known is no further evidence.
        """
        if ran.number >= self.innocent_below:
            self.innocent_below = next_attempt
            again = self.void_tasks.get((ran.kind, ran.epoch), 0) >> ran.partition & 1 == 1
            where = (ran.worker, lost.host, ran.kind, ran.epoch, ran.partition)
            self.lost_agents.append(LostAgent(*where, lost.reason, again))

    def note_progress(self) -> None:
        """Clear the trial of the agents lost with it, if it is now further than it ever was.

        Doing again what a loss has undone is no progress, or a trial that kills each agent at the
        same place would do so for ever. It clears the trial only of agents that were lost in such
        tasks, which it did not kill when it did them before.
        """
        reached = (len(self.visits), self.evaluation.done.bit_count())
        if reached > self.furthest:
            self.furthest = reached
            self.lost_agents, self.void_tasks = [], {}
        else:
            self.lost_agents = [lost for lost in self.lost_agents if not lost.again]

    def is_source(self, visit: int, place: str) -> bool:
        """Return whether a state may still be fetched from this place."""
        return self.failed_transfers.get((visit, place), 0) < MOST_FAILED_TRANSFERS

    def forget_failed_transfers(self, kept: Callable[[int, str], bool]) -> None:
        """Forget what failed from other places, or for other states, than those that are kept."""
        self.failed_transfers = {
            at: failures for at, failures in self.failed_transfers.items() if kept(*at)
        }

    def forget_evaluation(self) -> None:
        """Drop what was measured, because the epoch is over or void."""
        self.evaluation, self.merge_attempt = Evaluation(), None

    def roll_back(self, visit: int, partitions: int) -> None:
        """Make ``visit`` the newest state again."""
        for each in self.visits[visit:]:
            self._note_void("train", each.epoch, 1 << each.partition)
        for epoch in range(visit // partitions, len(self.history)):
            self._note_void("evaluate", epoch, (1 << partitions) - 1)
        self._note_void("evaluate", len(self.history), self.evaluation.done)
        self.visits.truncate(visit)
        del self.history[visit // partitions :]
        self.trained = mask_of(self.visits.partitions_from(len(self.history) * partitions))
        self.arrived = {(each, place) for each, place in self.arrived if each <= visit}
        self.forget_failed_transfers(lambda each, place: each <= visit)
        self.forget_evaluation()

    def _note_void(self, kind: TaskKind, epoch: int, partitions: int) -> None:
        self.void_tasks[kind, epoch] = self.void_tasks.get((kind, epoch), 0) | partitions

    def makes_again(self, visit: int) -> bool:
        """Return whether the trial, which went back to an older state, will have this one again."""
        return visit > self.newest and self.status in ("waiting", "running")

    def follow(self, parent: TrialProgress, partitions: int) -> None:
        """Have done what a parent did up to the state that this trial begins with."""
        self.visits = parent.visits.first(self.base)
        self.history = [dict(metrics) for metrics in parent.history[: self.base // partitions]]
        begun = len(self.history) * partitions
        self.trained = mask_of(self.visits.partitions_from(begun))
        self.furthest = (self.base, 0)
        if self.rest_at is not None:
            self.rest_at = len(self.history)

    def visited(self) -> int:
        """Return this epoch's partitions that are trained or being trained, as a mask."""
        return self.trained | mask_of(attempt.partition for attempt in self.pending_visits)

    def evaluation_begun(self) -> int:
        """Return this epoch's partitions that are evaluated or being evaluated, as a mask."""
        return self.evaluation.done | self.evaluating

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


def next_partition(config: HopConfig, number: int, trial: TrialProgress) -> int:
    """Return the first partition in the trial's seeded order that the epoch has not visited yet."""
    partitions, epoch, visited = config.partitions, len(trial.history), trial.visited()
    if trial.base > epoch * partitions:  # it inherited visits in another order
        order = visit_order(config, number, epoch)
        return next(partition for partition in order if not visited >> partition & 1)
    order = _shuffled(config.seed, epoch, partitions)
    return order[(number + visited.bit_count()) % partitions]


@cache
def _shuffled(seed: int, epoch: int, partitions: int) -> tuple[int, ...]:
    order = list(range(partitions))
    Random(seed_of(seed, "visit order", epoch)).shuffle(order)
    return tuple(order)
