"""Records attempts and each trial's progress: what it has visited and measured, and how it ends."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import nan
from random import Random
from typing import Any, Literal, NamedTuple, overload

from cerebro_hydra.plan.bits import mask_of
from cerebro_hydra.plan.hop.ranking import best_epoch
from cerebro_hydra.plan.hop.trial_status import (
    OVER,
    TRAIN,
    WAITING,
    AwaitingParent,
    Ended,
    Goal,
    Stage,
    StopGoal,
    TrialStatus,
)
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.messages.events import SubEpochDone, WorkerLost
from cerebro_hydra.plan.messages.instructions import StateSource
from cerebro_hydra.plan.seeds import seed_of

MOST_FAILED_TRANSFERS = 3  # of a state from one place, which is no source of it any more then
STORY_LINES = 100  # of a trial that are kept; the journal has all of them

MOST_VOID_STATES = 3
"""How often in a row a state of one trial may be useless to everybody; with the last it fails."""

MOST_LOST_AGENTS = 3
"""How many agents in a row may be lost while one trial runs on them; with the last it fails."""

MOST_LOST_AGAIN = 4 * MOST_LOST_AGENTS
"""How many agents may be lost in one task that is done again, and forgiven for work in between."""

_CAUSES = (
    "likely causes: the trial calls os._exit, a native library crashes (segmentation fault), "
    "memory runs out, or code holds Python's lock for so long that the agent stops answering; if "
    "other trials end like this on one worker only, look at that machine"
)


class Evaluation:
    """Holds the (sum, rows) of every metric by partition, in twenty bytes each."""

    __slots__ = ("_partitions", "_rows", "_sums", "done", "states")

    def __init__(self) -> None:
        self.done = 0
        """The partitions that are evaluated, as a mask."""
        self.states: dict[int, dict[str, Any]] = {}
        """What custom metrics computed, by partition; empty without custom metrics."""
        self._partitions = array("I")
        self._sums: dict[str, array[float]] = {}
        self._rows: dict[str, array[int]] = {}

    def add(
        self, partition: int, sums: dict[str, tuple[float, int]], states: dict[str, Any] | None
    ) -> None:
        """Add what was measured on one partition."""
        self.done |= 1 << partition
        self._partitions.append(partition)
        for name, (value, rows) in sums.items():
            self._sums.setdefault(name, array("d")).append(value)
            self._rows.setdefault(name, array("Q")).append(rows)
        if states is not None:
            self.states[partition] = states

    def merged(self) -> dict[str, float]:
        """Return the mean of every metric over all rows, added up in partition order."""
        by_partition = sorted(range(len(self._partitions)), key=self._partitions.__getitem__)
        return {
            name: _mean((sums[at], self._rows[name][at]) for at in by_partition)
            for name, sums in self._sums.items()
        }

    def check(self) -> None:
        """Raise AssertionError if the mask is not that of what was added."""
        added = list(self._partitions)
        assert self.done == mask_of(added), f"{self.done:b} are not {added}"


def epoch_metrics(
    visits: Sequence[CommittedVisit], evaluation: Evaluation, custom: dict[str, float]
) -> dict[str, float]:
    """Return "train_loss" and a "val_<name>" for every evaluated metric, the custom ones last.

    Sums are added as Python floats (float64) in partition order and then divided by the rows. The
    mean over no rows is NaN.
    """
    trained = sorted(visits, key=lambda visit: visit.partition)
    metrics = {"train_loss": _mean((visit.loss_sum, visit.rows) for visit in trained)}
    validated = evaluation.merged() | custom
    return metrics | {f"val_{name}": value for name, value in validated.items()}


def _mean(sums_and_rows: Iterable[tuple[float, int]]) -> float:
    total, total_rows = 0.0, 0
    for value, rows in sums_and_rows:
        total += value
        total_rows += rows
    return total / total_rows if total_rows else nan


TaskKind = Literal["train", "evaluate"]
AttemptStatus = Literal["reserved", "fetching", "running", "ending", "done", "cancelled"]


@dataclass(frozen=True, slots=True)
class Rank:
    """Says which agent trains a visit over one of its partitions."""

    partition: int
    worker: int
    incarnation: str


@dataclass(slots=True)
class Attempt:
    """Records one task given to one worker: a sub-epoch or the evaluation of one partition.

    A sub-epoch with replicas is given to several workers at once, one for each of its partitions;
    the first is that of the attempt itself, and ``others`` has the further ranks in their order.
    ``plan/hop/attempts.py`` has the table of what happens when its status changes.
    """

    number: int
    kind: TaskKind
    trial: int
    state: int  # the state that it makes (train) or measures (evaluate)
    epoch: int
    partition: int
    worker: int
    incarnation: str
    source: StateSource
    status: AttemptStatus = "reserved"
    done: SubEpochDone | None = None  # held back until the visit before it is committed
    started_at: float = 0.0  # seconds by the clock of the estimates
    others: tuple[Rank, ...] = ()
    reports: dict[str, SubEpochDone] = field(default_factory=dict)  # by incarnation, of all ranks

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Return all that train it, in rank order."""
        return (Rank(self.partition, self.worker, self.incarnation), *self.others)

    @property
    def incarnations(self) -> tuple[str, ...]:
        """Return the agents that work on it, in rank order."""
        return (self.incarnation, *(rank.incarnation for rank in self.others))

    @property
    def partitions(self) -> tuple[int, ...]:
        """Return the partitions that it goes over, in rank order."""
        return (self.partition, *(rank.partition for rank in self.others))


@dataclass(slots=True)
class TrialProgress:
    """Records one trial's committed visits, its ended epochs, and the tasks that are under way."""

    config: TrialConfig
    budget: int  # the epoch up to which it may train now
    tie_break: float  # decides between trials with as much work left
    visits: VisitLog
    stage: Stage = WAITING  # `RunTables.enter` changes it
    goal: Goal = TRAIN  # `RunTables.aim` changes it
    history: list[dict[str, float]] = field(default_factory=list)  # metrics by epoch
    told_epochs: int = 0  # that the search was told of; what is lost of them is made again
    early: int | None = None  # the epochs after which it ended by itself, before its budget's end
    trained: int = 0  # the partitions of the present epoch that are committed, as a mask
    pending_visits: list[Attempt] = field(default_factory=list)  # at most two, in order
    evaluations: dict[int, Attempt] = field(default_factory=dict)  # by partition
    evaluating: int = 0  # the partitions of ``evaluations``, as a mask
    evaluation: Evaluation = field(default_factory=Evaluation)  # of the present epoch
    failed_transfers: dict[tuple[int, str], int] = field(default_factory=dict)  # by state and place
    void_states: list[str] = field(default_factory=list)  # why in a row, without getting further
    lost_agents: list[LostAgent] = field(default_factory=list)  # in a row, by the trial's tasks
    innocent_below: int = 0  # attempts given out before the latest of them is known
    void_tasks: dict[tuple[TaskKind, int], int] = field(default_factory=dict)
    """The partitions of tasks that were done, and whose results were lost, by kind and epoch."""
    lethal_tasks: dict[tuple[TaskKind, int, int], int] = field(default_factory=dict)
    """How many agents were lost by kind, epoch and partition, since the trial got further."""
    furthest: tuple[int, int] = (0, 0)  # most visits, and the evaluations after them, ever done
    # (state, incarnation) of states that arrived before they were committed, and of each cancelled
    # fetch, whose ``StateReceived`` may still arrive, late.
    arrived: set[tuple[int, str]] = field(default_factory=set)
    abandoned_fetches: set[tuple[int, str]] = field(default_factory=set)
    had_finished: bool = False  # it goes on after it had a result
    unreached: int | None = None  # the budget to which its extension failed to bring it
    uncut: bool = False  # an audit has failed, so it is trained in one piece
    shards_before: int | None = None  # it was cut finer
    base: int = 0  # the oldest state that it may fall back to
    tail: dict[int, int] = field(default_factory=dict)
    """How many replicas each epoch has that began when the config asked for a tail."""
    log: list[str] = field(default_factory=list)

    @property
    def replicas(self) -> int:
        """Return over how many partitions at once the present epoch goes.

        A trial that is trained in one piece, as an audit has failed, has no tail: agents that do so
        don't sum gradients.
        """
        tail = {} if self.uncut else self.tail
        return tail.get(len(self.history), self.config.replicas)

    @property
    def status(self) -> TrialStatus:
        """Return the name of its stage."""
        return self.stage.status

    @property
    def over(self) -> bool:
        """Return whether the trial has ended."""
        return self.stage.status in OVER

    @property
    def awaits(self) -> bool:
        """Return whether the trial, a fork, waits for its first state."""
        return isinstance(self.stage, AwaitingParent)

    @property
    def at_goal(self) -> bool:
        """Return whether the search wants no more of the trial than it has."""
        return self.goal is not TRAIN and len(self.history) >= self.told_epochs

    @property
    def paused(self) -> bool:
        """Return whether the trial does nothing because the search wants it so."""
        return self.at_goal and not self.over

    @property
    def stops(self) -> bool:
        """Return whether the trial was stopped, and may train no further."""
        return isinstance(self.goal, StopGoal)

    @property
    def result(self) -> int | None:
        """Return the state that is the trial's result; None until it has ended."""
        return self.stage.result if isinstance(self.stage, Ended) else None

    @property
    def newest(self) -> int:
        """Return the newest committed state."""
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
            task = (ran.kind, ran.epoch, ran.partition)
            self.lethal_tasks[task] = deaths = self.lethal_tasks.get(task, 0) + 1
            done_before = self.void_tasks.get((ran.kind, ran.epoch), 0) >> ran.partition & 1 == 1
            again = done_before and deaths <= MOST_LOST_AGAIN
            where = (ran.worker, lost.host, ran.kind, ran.epoch, ran.partition)
            self.lost_agents.append(LostAgent(*where, lost.reason, again))

    def note_progress(self) -> None:
        """Clear the trial of agents and states lost with it, if it is further than it ever was.

        Doing again what a loss has undone is no progress, or a trial that kills each agent at the
        same place would do so for ever. It clears the trial only of agents that were lost in such
        tasks, which it did not kill when it did them before, and not of ever more in one of them.
        """
        reached = (len(self.visits), self.evaluation.done.bit_count())
        if reached > self.furthest:
            self.furthest = reached
            self.lost_agents, self.void_states = [], []
            self.void_tasks, self.lethal_tasks = {}, {}
        else:
            self.lost_agents = [lost for lost in self.lost_agents if not lost.again]

    def is_source(self, state: int, place: str) -> bool:
        """Return whether a state may still be fetched from this place."""
        return self.failed_transfers.get((state, place), 0) < MOST_FAILED_TRANSFERS

    def forget_failed_transfers(self, kept: Callable[[int, str], bool]) -> None:
        """Forget what failed from other places, or for other states, than those that are kept."""
        self.failed_transfers = {
            at: failures for at, failures in self.failed_transfers.items() if kept(*at)
        }

    def forget_evaluation(self) -> None:
        """Drop what was measured, because the epoch is over or void."""
        self.evaluation = Evaluation()

    def roll_back(self, state: int, partitions: int) -> None:
        """Make ``state`` the newest one again."""
        for each in self.visits[state:]:
            self._note_void("train", each.epoch, 1 << each.partition)
        for epoch in range(state // partitions, len(self.history)):
            self._note_void("evaluate", epoch, (1 << partitions) - 1)
        self._note_void("evaluate", len(self.history), self.evaluation.done)
        self.visits.truncate(state)
        del self.history[state // partitions :]
        self.trained = mask_of(self.visits.partitions_from(len(self.history) * partitions))
        self.arrived = {(each, place) for each, place in self.arrived if each <= state}
        self.forget_failed_transfers(lambda each, place: each <= state)
        self.forget_evaluation()

    def _note_void(self, kind: TaskKind, epoch: int, partitions: int) -> None:
        self.void_tasks[kind, epoch] = self.void_tasks.get((kind, epoch), 0) | partitions

    def makes_again(self, state: int, partitions: int) -> bool:
        """Return whether a trial that went back will have this state and its metrics again."""
        lost = state > self.newest or len(self.history) < min(self.told_epochs, state // partitions)
        wanted = self.goal is TRAIN or state <= self.told_epochs * partitions
        return lost and wanted and not self.over

    def follow(self, parent: TrialProgress, partitions: int) -> None:
        """Have done what a parent did up to the state that this trial begins with."""
        self.visits = parent.visits.first(self.base)
        self.history = [dict(metrics) for metrics in parent.history[: self.base // partitions]]
        self.told_epochs = len(self.history)
        begun = len(self.history) * partitions
        self.trained = mask_of(self.visits.partitions_from(begun))
        self.furthest = (self.base, 0)

    def visited(self) -> int:
        """Return this epoch's partitions that are trained or being trained, as a mask."""
        return self.trained | mask_of(p for each in self.pending_visits for p in each.partitions)

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


def replica_groups(config: HopConfig, number: int, trial: TrialProgress) -> list[tuple[int, ...]]:
    """Return the groups of partitions that the epoch has still to visit, less what it has visited.

    Partitions are grouped by their numbers, as many as there are replicas, the last ones maybe
    fewer, so the steps of an epoch do not depend on who is free. When ``order="seeded"`` the groups
    are in a seeded order of their own, and only the first one is returned.
    """
    size, visited, epoch = trial.replicas, trial.visited(), len(trial.history)
    numbers = list(range(-(-config.partitions // size)))
    if config.order == "seeded":
        order = _shuffled(config.seed, epoch, len(numbers))
        numbers = [order[(number + place) % len(order)] for place in numbers]
    groups = []
    for each in numbers:
        group = range(each * size, min((each + 1) * size, config.partitions))
        if left := tuple(partition for partition in group if not visited >> partition & 1):
            groups.append(left)
    return groups[:1] if config.order == "seeded" else groups


@cache
def _shuffled(seed: int, epoch: int, partitions: int) -> tuple[int, ...]:
    order = list(range(partitions))
    Random(seed_of(seed, "visit order", epoch)).shuffle(order)
    return tuple(order)


@dataclass(frozen=True, slots=True)
class CommittedVisit:
    """Records a sub-epoch that counts."""

    epoch: int
    partition: int
    rows: int
    loss_sum: float


class VisitLog(Sequence[CommittedVisit]):
    """Lists a trial's committed visits in their order; the n-th made the state n + 1."""

    __slots__ = ("_losses", "_partitions", "_rows", "_visited")

    def __init__(self, partitions: int) -> None:
        """Begin a log of visits to ``partitions`` partitions in every epoch."""
        self._partitions = partitions
        self._visited, self._rows, self._losses = array("I"), array("Q"), array("d")

    def append(self, partition: int, rows: int, loss_sum: float) -> None:
        """Add the next visit."""
        self._visited.append(partition)
        self._rows.append(rows)
        self._losses.append(loss_sum)

    def truncate(self, visits: int) -> None:
        """Forget all visits after the first ``visits``."""
        for column in (self._visited, self._rows, self._losses):
            del column[visits:]

    def first(self, visits: int) -> VisitLog:
        """Return a log of the first ``visits`` visits."""
        log = VisitLog(self._partitions)
        log._visited = self._visited[:visits]
        log._rows, log._losses = self._rows[:visits], self._losses[:visits]
        return log

    def partitions_from(self, state: int) -> Sequence[int]:
        """Return the partitions of the visits after the first ``state``, in their order."""
        return self._visited[state:]

    def __len__(self) -> int:
        """Return the number of visits, which is the number of the newest state."""
        return len(self._visited)

    @overload
    def __getitem__(self, at: int) -> CommittedVisit: ...
    @overload
    def __getitem__(self, at: slice) -> list[CommittedVisit]: ...
    def __getitem__(self, at: int | slice) -> CommittedVisit | list[CommittedVisit]:
        """Return one visit, or a list of several."""
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        index = range(len(self))[at]
        return CommittedVisit(
            index // self._partitions, self._visited[index], self._rows[index], self._losses[index]
        )

    def __iter__(self) -> Iterator[CommittedVisit]:
        """Iterate over all visits in their order."""
        return map(self.__getitem__, range(len(self)))


class Outcome(NamedTuple):
    """Holds the status and reason with which a trial ends once its result is in the store."""

    status: TrialStatus
    reason: str


def outcome(config: HopConfig, trial: TrialProgress, search_closed: bool) -> Outcome | None:
    """Return the trial's outcome, or None while it has epochs to train or may be given more."""
    complete = len(trial.history) >= trial.budget and trial.early != len(trial.history)
    if search_closed and complete and not trial.stops:
        return Outcome(TrialStatus.FINISHED, "")
    if spent := out_of_patience(config, trial):
        return spent
    if isinstance(trial.goal, StopGoal) and trial.at_goal:
        return Outcome(TrialStatus.STOPPED, trial.goal.reason)
    return None


def out_of_patience(config: HopConfig, trial: TrialProgress) -> Outcome | None:
    """Return the outcome of a trial that has not improved for too many epochs, else None."""
    patience = trial.config.patience
    if patience is None:
        return None
    best = _best_epoch(config, trial, trial.newest)
    since = first_epoch(trial.base, config.partitions) if best is None else best + 1
    if len(trial.history) - since < patience:
        return None
    epochs = "1 epoch" if patience == 1 else f"{patience} epochs"
    if best is None:
        reason = f"{config.metric} was not finite in {epochs}"
        return Outcome(TrialStatus.FINISHED, reason)
    value = trial.history[best][config.metric]
    reason = (
        f"{config.metric} was best after epoch {best + 1} ({value:.4g}) and not better for {epochs}"
    )
    return Outcome(TrialStatus.FINISHED, reason)


def best_state(config: HopConfig, trial: TrialProgress, visits: int) -> int | None:
    """Return the best state among the epochs that the first ``visits`` complete.

    It is None if the trial keeps its last state, or if no such epoch was finite.
    """
    best = _best_epoch(config, trial, visits) if trial.config.keep == "best" else None
    return None if best is None else (best + 1) * config.partitions


def _best_epoch(config: HopConfig, trial: TrialProgress, visits: int) -> int | None:
    """Return the best of the epochs that the first ``visits`` complete.

    Of the epochs that a fork inherits only the last one counts, and only if it goes on from the end
    of that.
    """
    first = first_epoch(trial.base, config.partitions)
    epochs = trial.history[first : visits // config.partitions]
    best = best_epoch(epochs, config.metric, config.direction)
    return None if best is None else first + best


def first_epoch(base: int, partitions: int) -> int:
    """Return the first epoch after which a state was the own one of a trial that began at base."""
    return max(0, -(-base // partitions) - 1)


def result_state(config: HopConfig, trial: TrialProgress) -> int:
    """Return the state that is the trial's result so far: its best, else its newest."""
    best = best_state(config, trial, trial.newest)
    return trial.newest if best is None else best


def needed_states(config: HopConfig, trial: TrialProgress, search_closed: bool) -> set[int]:
    """Return the states that a trial needs: its result and, to go on, its newest."""
    if outcome(config, trial, search_closed) is not None:
        return {result_state(config, trial)}
    return {result_state(config, trial), trial.newest}


@dataclass(frozen=True, slots=True)
class LostAgent:
    """Records an agent that was lost while it trained or evaluated a trial."""

    worker: int
    host: str
    kind: str
    epoch: int
    partition: int
    reason: str
    again: bool
    """Whether the trial had done the same task before, and its result was lost."""

    def __str__(self) -> str:
        """Return where, when and why, in one line."""
        where = f"worker {self.worker}" + (f" on {self.host}" if self.host else "")
        doing = "training" if self.kind == "train" else "evaluation"
        when = f"{doing} of epoch {self.epoch + 1} on partition {self.partition}"
        return f"{where}, {when}: {self.reason}"


def story(trial: int, lost: Sequence[LostAgent]) -> str:
    """Return why a trial failed that ran on each of these agents when they were lost."""
    first = f"{len(lost)} agents in a row were lost while trial {trial} ran on them; {_CAUSES}"
    return "\n".join((first, *(f"  {number}. {each}" for number, each in enumerate(lost, 1))))
