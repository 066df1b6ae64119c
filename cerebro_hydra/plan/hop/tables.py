"""Holds everything that is known about a run, with the indexes over it.

Indexes go over open tasks and live agents. Estimates of how long tasks take learn from the seconds
that events report; they are the only notion of time that the decisions have.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from math import isnan, nan
from operator import or_
from random import Random
from typing import NamedTuple

from cerebro_hydra.plan.bits import mask_of, members
from cerebro_hydra.plan.hop.holders import Holders
from cerebro_hydra.plan.hop.trial_status import (
    AWAY,
    IN_TRAINING,
    OVER,
    WAITING,
    Goal,
    Stage,
    TrialStatus,
    check_goal,
    check_stage,
)
from cerebro_hydra.plan.hop.trials import (
    Attempt,
    TaskKind,
    TrialProgress,
    VisitLog,
    next_partition,
    outcome,
    replica_groups,
)
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.messages.events import TrialProposed
from cerebro_hydra.plan.seeds import seed_of

StateCopy = tuple[int, str]
"""A state, and a place that has it."""

FEW = 64  # candidates are sorted rather than looked for in the queue of all

KINDS: tuple[TaskKind, ...] = ("train", "evaluate")


@dataclass(frozen=True, slots=True)
class FailedWrite:
    """Notes how often in a row a state could not be written to the store, and why."""

    times: int
    error: str


class RunTables:
    """Holds the tables of one run.

    Each is changed by one class: agents and attempts by `Attempts`, what is written by
    `Checkpoints`, candidates by `SearchEvents`. A trial's stage and goal change here alone.
    """

    def __init__(self, config: HopConfig) -> None:
        self.config = config
        self.trials: dict[int, TrialProgress] = {}
        self.attempts: dict[int, Attempt] = {}  # live ones, by number
        self.workers = Workers()
        self.holders = Holders()
        self.estimates = Estimates(config.partitions)
        self.open_tasks = OpenTasks(config.partitions)
        self.saving: dict[int, StateCopy] = {}  # the state of each trial that is being written
        # By trial and state, until a write of the trial succeeds.
        self.failed_writes: dict[int, dict[int, FailedWrite]] = {}
        self.forks: dict[int, list[int]] = {}  # by parent, those whose states are not stored yet
        self.candidates: dict[int, TrialProposed] = {}  # neither admitted nor refused yet
        self.refused: set[int] = set()  # the candidates that can't be trials
        self.search_closed = False  # whether nothing is proposed and no budget extended any more
        self.keeps_results = False  # whether trials that had finished keep what they had then
        self.finished = False  # whether the run is over
        self.suspended = False  # whether the run ends for now, and every trial rests
        self.resting: set[int] = set()  # of a suspended run, the trials that need nothing more
        self.replicated: list[int] = []  # trials that have had replicas, or will, over or not
        self.events = 0
        self.in_training = 0
        """The trials that may go on now, as a mask."""
        self._next_attempt = 0
        self._statuses: dict[TrialStatus, int] = {}  # the trials of each status, as masks
        self._all_partitions = mask_of(range(config.partitions))

    @property
    def next_attempt(self) -> int:
        """Return the number that the next attempt will have."""
        return self._next_attempt

    def take_number(self) -> int:
        """Return a number that no attempt has had."""
        self._next_attempt += 1
        return self._next_attempt - 1

    def log(self, trial: int, line: str) -> None:
        """Add a line to a trial's story."""
        self.trials[trial].tell(f"[{self.events}] {line}")

    # ------------------------------------------------------------------ trials

    def add_trial(self, config: TrialConfig, budget: int, stage: Stage = WAITING) -> TrialProgress:
        """Take in a new trial."""
        tie_break = Random(seed_of(self.config.seed, "turn", config.trial)).random()
        visits = VisitLog(self.config.partitions)
        trial = TrialProgress(config, budget, tie_break, visits, stage)
        self.trials[config.trial] = trial
        if config.replicas > 1:
            self.replicated.append(config.trial)
        self._statuses[stage.status] = self.with_status(stage.status) | 1 << config.trial
        self.estimates.add(config.trial, config.cost)
        return trial

    def with_status(self, *statuses: TrialStatus) -> int:
        """Return the trials with one of these statuses, as a mask."""
        found = 0
        for status in statuses:
            found |= self._statuses.get(status, 0)
        return found

    def enter(self, number: int, stage: Stage) -> None:
        """Let a trial enter a stage, if it may.

        Raises:
            ValueError: the stage does not follow that of the trial.
        """
        trial, bit = self.trials[number], 1 << number
        check_stage(trial.stage, stage)
        self._statuses[trial.stage.status] ^= bit
        self._statuses[stage.status] = self._statuses.get(stage.status, 0) | bit
        trial.stage = stage

    def aim(self, number: int, goal: Goal) -> None:
        """Give a trial another goal, if it may have it.

        Raises:
            ValueError: the goal does not follow that of the trial.
        """
        trial = self.trials[number]
        if goal != trial.goal:
            check_goal(trial.goal, goal)
            trial.goal = goal

    @property
    def not_over(self) -> list[int]:
        """Return the trials that have not ended."""
        return [number for number, trial in self.trials.items() if not trial.over]

    @property
    def all_over(self) -> bool:
        """Return whether every trial has ended, and no candidate may become one."""
        ended = self.with_status(*OVER).bit_count() == len(self.trials)
        return ended and not self.candidates

    def may_train(self, trial: TrialProgress) -> bool:
        """Return whether the trial may go on now.

        It has budget left, is not at its end, and its newest state can be fetched from somewhere.
        It waits where a fork begins with that state until it is stored: if it were lost after the
        trial had gone on, nobody would make it again.
        """
        return (
            trial.stage.status in IN_TRAINING
            and not self.suspended
            and not trial.at_goal
            and len(trial.history) < trial.budget
            and outcome(self.config, trial, self.search_closed) is None
            and any(self.sources(trial))
            and not self._is_forked_here(trial)
        )

    def _is_forked_here(self, trial: TrialProgress) -> bool:
        """Return whether a fork waits for the newest state, of which all metrics are known."""
        forks = self.forks.get(trial.config.trial, ())
        evaluated = not trial.epoch_trained(self.config.partitions)
        return evaluated and any(self.trials[fork].base == trial.newest for fork in forks)

    def begin_tail(self, number: int) -> None:
        """Let the epoch that a trial is about to begin have replicas, if workers would be idle.

        An epoch that is begun again, after a loss, has as many as before. One that is left to a
        resumed run has none: nobody knows how many trials and workers that has.
        """
        trial, epoch = self.trials[number], len(self.trials[number].history)
        if not trial.config.tail or trial.uncut or epoch in trial.tail:
            return
        more = not self.search_closed or self.candidates or any(self.forks.values())
        ends = epoch >= trial.budget or outcome(self.config, trial, self.search_closed) is not None
        plain = more or ends or self.suspended
        live = (self.in_training | self.with_status(*AWAY) | 1 << number).bit_count()
        workers = sum(1 for agent in self.workers if agent.partitions)  # some may have none
        trial.tail[epoch] = 1 if plain else max(1, min(workers // live, self.config.partitions))
        if (replicas := trial.tail[epoch]) > 1:
            self.log(
                number, f"epoch {epoch + 1} has {replicas} replicas: {workers} workers for {live}"
            )
            if number not in self.replicated:
                self.replicated.append(number)

    # ------------------------------------------------------------------ open tasks

    def phase(self, trial: TrialProgress) -> TaskKind:
        """Return which kind of task the trial does now."""
        return "evaluate" if trial.epoch_trained(self.config.partitions) else "train"

    def work_left(self, number: int) -> float:
        """Return the work that is not assigned yet, in units of cost.

        The evaluations of an epoch count once, because they can run side by side.
        """
        trial, partitions = self.trials[number], self.config.partitions
        later_epochs = trial.budget - len(trial.history) - 1
        sub_epochs = later_epochs * partitions
        if self.phase(trial) == "train":
            sub_epochs += partitions - trial.visited().bit_count()
        work = sub_epochs * self.estimates.cost("train", number)
        if self.config.evaluate:
            work += (later_epochs + 1) * self.estimates.cost("evaluate", number)
        return work

    def _open_partitions(self, number: int, trial: TrialProgress) -> int:
        """Return the partitions of the tasks of the present phase that no attempt has, as a mask.

        When the visits of an epoch are in seeded order, only the next one is among them.
        """
        if self.phase(trial) == "evaluate":
            return self._all_partitions & ~trial.evaluation_begun()
        visited = trial.visited()
        if trial.replicas > 1:
            groups = replica_groups(self.config, number, trial)
            return mask_of(partition for group in groups for partition in group)
        if self.config.order == "seeded" and visited != self._all_partitions:
            return 1 << next_partition(self.config, number, trial)
        return self._all_partitions & ~visited

    def sources(self, trial: TrialProgress) -> Iterator[str]:
        """Yield the places from which the state that the trial's next task needs can be fetched.

        A sub-epoch that is ending is one such place: its agent publishes the state soon.
        """
        state = trial.newest
        places: Iterable[str] = self.holders.where(trial.config.trial, state)
        if trial.pending_visits:
            state, places = trial.pending_visits[0].state, (trial.pending_visits[0].incarnation,)
        return (place for place in places if trial.is_source(state, place))

    def _turn(self, number: int, trial: TrialProgress) -> Turn | None:
        """Return the turn of a trial that can begin a task now, else None."""
        if trial.lost_agents and (trial.pending_visits or trial.evaluations):
            return None  # one agent at a time, while it may be lethal
        pending = trial.pending_visits
        if len(pending) > 1 or (pending and pending[0].status != "ending"):
            return None
        return Turn(-self.work_left(number), trial.tie_break, number)

    def refresh(self, number: int) -> None:
        """Bring the index of open tasks up to date with a trial that has changed."""
        trial, bit = self.trials[number], 1 << number
        if self.may_train(trial):
            self.in_training |= bit
            turn = self._turn(number, trial)
            self.open_tasks.put(number, self._open_partitions(number, trial), turn)
        else:
            self.in_training &= ~bit
            self.open_tasks.put(number, 0, None)

    def check_indexes(self) -> None:
        """Raise AssertionError if an index is not what it is recomputed as."""
        self.workers.check()
        self.holders.check((n, *copy) for n, copy in self.saving.items())
        self._check_statuses()
        training = {n: trial for n, trial in self.trials.items() if self.may_train(trial)}
        assert self.in_training == mask_of(training), f"{list(training)} may train"
        opened = {n: (self._open_partitions(n, t), self._turn(n, t)) for n, t in training.items()}
        self.open_tasks.check(dict.fromkeys(self.trials, (0, None)) | opened)
        for number, trial in self.trials.items():
            trial.evaluation.check()
            assert trial.evaluating == mask_of(trial.evaluations), f"trial {number}: {trial}"
            begun = len(trial.history) * self.config.partitions
            assert trial.trained == mask_of(trial.visits.partitions_from(begun)), (
                f"trial {number} has trained on other partitions than {trial.trained:b}"
            )

    def _check_statuses(self) -> None:
        for status in TrialStatus:
            there = mask_of(n for n, trial in self.trials.items() if trial.status == status)
            mask = self.with_status(status)
            assert mask == there, f"{there:b} are {status}, and not {mask:b}"


class Turn(NamedTuple):
    """Orders ready trials: the most work left first, then by a seeded number."""

    negative_work: float
    tie_break: float
    trial: int


class OpenTasks:
    """Keeps the open tasks of each trial and partition, and the ready trials in their order.

    A task is open if no attempt has it. A trial is ready if it may begin an open task now.
    """

    def __init__(self, partitions: int) -> None:
        self.ready = 0
        """The ready trials, as a mask."""
        self._trials: list[int] = [0] * partitions  # by partition, as masks
        self._partitions: dict[int, int] = {}  # by trial, as masks
        self._turns: dict[int, Turn] = {}  # of the ready trials
        self._queue: list[Turn] = []

    def put(self, trial: int, partitions: int, turn: Turn | None) -> None:
        """Note the partitions of a trial's open tasks, and its turn if it is ready."""
        bit = 1 << trial
        for partition in members(self._partitions.get(trial, 0) ^ partitions):
            self._trials[partition] ^= bit
        self._partitions[trial] = partitions
        if turn == self._turns.get(trial):
            return
        if (before := self._turns.pop(trial, None)) is not None:
            del self._queue[bisect_left(self._queue, before)]
            self.ready ^= bit
        if turn is not None:
            self._turns[trial] = turn
            insort(self._queue, turn)
            self.ready ^= bit

    def partitions(self, trial: int) -> int:
        """Return the partitions of a trial's open tasks, as a mask."""
        return self._partitions[trial]

    def trials(self, partition: int) -> int:
        """Return the trials with an open task on this partition, ready or not, as a mask."""
        return self._trials[partition]

    def ready_for(self, partitions: int) -> int:
        """Return the ready trials with an open task on one of these partitions, as a mask.

        If these partitions are more than the ready trials, all of those are returned.
        """
        if partitions.bit_count() > self.ready.bit_count():
            return self.ready
        found = 0
        for partition in members(partitions):
            found |= self._trials[partition]
        return found & self.ready

    def in_turn(self, trials: int) -> Iterator[int]:
        """Iterate over some of the ready trials in their order."""
        if trials.bit_count() <= FEW:
            for turn in sorted(self._turns[trial] for trial in members(trials)):
                yield turn.trial
            return
        chosen = trials.to_bytes((trials.bit_length() + 7) // 8, "little")
        last = 8 * len(chosen)
        for _, _, trial in self._queue:
            if trial < last and chosen[trial >> 3] >> (trial & 7) & 1:
                yield trial

    def check(self, expected: dict[int, tuple[int, Turn | None]]) -> None:
        """Raise AssertionError if an index is not what these tasks and turns give, by trial."""
        assert self._partitions == {trial: mask for trial, (mask, _) in expected.items()}, (
            "the open tasks of a trial are other ones"
        )
        for partition, trials in enumerate(self._trials):
            there = {trial for trial, (mask, _) in expected.items() if mask >> partition & 1}
            assert set(members(trials)) == there, f"partition {partition} is open for {there}"
        turns = {trial: turn for trial, (_, turn) in expected.items() if turn is not None}
        assert self._turns == turns, f"the ready trials are {turns}, and not {self._turns}"
        assert self._queue == sorted(turns.values()), "the queue is not that of the ready trials"
        assert set(members(self.ready)) == turns.keys(), "the mask of ready trials is another"


@dataclass(slots=True)
class LiveAgent:
    """Records one live incarnation of a worker, its residents and those that come after them.

    It holds up to ``residents`` attempts at once, which share its ``devices``. More are reserved
    behind those that are ending.
    """

    worker: int
    incarnation: str
    partitions: tuple[int, ...]
    devices: int = 1
    residents: int = 1
    adopted: set[int] = field(default_factory=set)
    """Those of its partitions that are another worker's, which is not there."""
    started: list[Attempt] = field(default_factory=list)
    reserved: list[Attempt] = field(default_factory=list)
    mask: int = field(init=False)
    """The partitions as a mask."""

    def __post_init__(self) -> None:
        """Compute the mask once."""
        self.hold(self.partitions)

    def hold(self, partitions: Iterable[int]) -> None:
        """Hold these partitions from now on."""
        self.partitions = tuple(partitions)
        self.mask = mask_of(self.partitions)

    @property
    def attempts(self) -> list[Attempt]:
        """Return all its attempts in the order in which they were given."""
        return [*self.started, *self.reserved]

    @property
    def width(self) -> int:
        """Return how many of its residents can compute at once."""
        return min(self.devices, self.residents)

    @property
    def load(self) -> int:
        """Return how many attempts it has beside those that are ending."""
        load = len(self.reserved)
        for attempt in self.started:  # faster than a sum, and every event asks
            load += attempt.status != "ending"
        return load

    @property
    def open(self) -> bool:
        """Return whether it can be given a task."""
        return self.load < self.residents

    @property
    def level(self) -> int:
        """Return how many tasks each of its devices has; 0 if one has none."""
        return self.load // self.width


class Workers:
    """Indexes the live agents; whoever changes an agent's tasks calls :meth:`refresh`."""

    def __init__(self) -> None:
        self.by_worker: dict[int, LiveAgent] = {}
        self.open_levels: list[int] = [0]
        """The partitions of the agents that can be given a task, as a mask for each level."""
        self.residents = 0
        """How many attempts all live agents may hold at once."""
        self._by_incarnation: dict[str, LiveAgent] = {}
        self._by_partition: dict[int, LiveAgent] = {}

    def __iter__(self) -> Iterator[LiveAgent]:
        """Iterate over the live agents in the order of their workers."""
        return (self.by_worker[worker] for worker in sorted(self.by_worker))

    @property
    def open_partitions(self) -> int:
        """The partitions of the agents that can be given a task, as a mask."""
        return reduce(or_, self.open_levels)

    @property
    def num_held(self) -> int:
        """The number of partitions that live agents hold."""
        return len(self._by_partition)

    def get(self, incarnation: str) -> LiveAgent | None:
        """Return the live agent with this incarnation."""
        return self._by_incarnation.get(incarnation)

    def of_partition(self, partition: int) -> LiveAgent | None:
        """Return the live agent that holds this partition."""
        return self._by_partition.get(partition)

    def add(self, agent: LiveAgent) -> None:
        """Take in an agent, to which its partitions go back that others have taken over.

        Raises:
            ValueError: another live agent holds one of its partitions as its own, or it can't hold
                a task.
        """
        if agent.width < 1:
            raise ValueError(
                f"worker {agent.worker} joined with devices={agent.devices} and "
                f"residents={agent.residents}; both must be at least 1"
            )
        for partition in agent.partitions:
            if (other := self._by_partition.get(partition)) and partition in other.adopted:
                other.hold(p for p in other.partitions if p != partition)
                other.adopted.discard(partition)
                self.refresh(other)
            elif other:
                shared = sorted(set(other.partitions) & set(agent.partitions))
                raise ValueError(
                    f"worker {agent.worker} joined with partitions {shared}, which the "
                    f"live worker {other.worker} holds; give each partition to one worker"
                )
        self.by_worker[agent.worker] = self._by_incarnation[agent.incarnation] = agent
        self._by_partition.update(dict.fromkeys(agent.partitions, agent))
        self.residents += agent.residents
        self.refresh(agent)

    def adopt(self, agent: LiveAgent, partitions: tuple[int, ...]) -> None:
        """Let an agent hold partitions of other workers, which no live agent holds."""
        agent.hold((*agent.partitions, *partitions))
        agent.adopted.update(partitions)
        self._by_partition.update(dict.fromkeys(partitions, agent))
        self.refresh(agent)

    def remove(self, agent: LiveAgent) -> None:
        """Forget a lost agent."""
        del self.by_worker[agent.worker], self._by_incarnation[agent.incarnation]
        for partition in agent.partitions:
            del self._by_partition[partition]
        self.residents -= agent.residents
        self.open_levels = [partitions & ~agent.mask for partitions in self.open_levels]

    def refresh(self, agent: LiveAgent) -> None:
        """Note anew whether the agent can be given a task, and at which level."""
        load, mask = agent.load, agent.mask
        levels = self.open_levels = [partitions & ~mask for partitions in self.open_levels]
        if load < agent.residents:
            level = load // agent.width
            while level >= len(levels):
                levels.append(0)
            levels[level] |= mask

    def check(self) -> None:
        """Raise AssertionError if an index is not what the agents give."""
        agents = self.by_worker.values()
        by_incarnation = {agent.incarnation: agent for agent in agents}
        assert self._by_incarnation == by_incarnation, "an agent is not found by its incarnation"
        held = {partition: agent for agent in agents for partition in agent.partitions}
        assert self._by_partition == held, "an agent is not found by its partition"
        assert len(held) == sum(len(agent.partitions) for agent in agents), (
            "a partition has two workers"
        )
        assert self.residents == sum(agent.residents for agent in agents), "residents"
        for level, partitions in enumerate(self.open_levels):
            at_level = [agent for agent in agents if agent.open and agent.level == level]
            there = mask_of(partition for agent in at_level for partition in agent.partitions)
            assert partitions == there, (
                f"{partitions:b} are open at level {level} by the index, {there:b} by the agents"
            )
        levels = [agent.level for agent in agents if agent.open]
        assert max(levels, default=0) < len(self.open_levels), f"the levels are {levels}"


class Estimates:
    """Estimates seconds per (kind, trial, partition), and keeps a clock that follows the events.

    A duration is modelled as cost(trial) x pace(partition) until that very pair was measured. The
    prior is the trial's relative cost at pace 1; the first measurement says what its unit is. An
    evaluation starts at a third of a sub-epoch, the share of a forward pass.
    """

    def __init__(self, partitions: int) -> None:
        self.now = 0.0
        self._partitions = partitions
        self._unit = 1.0  # seconds per unit of the trials' relative costs
        self._has_seen_any = False
        self._cost: dict[TaskKind, dict[int, float]] = {kind: {} for kind in KINDS}
        self._pace: dict[TaskKind, list[float]] = {kind: [1.0] * partitions for kind in KINDS}
        # By trial, from its first measurement on: the seconds by partition, NaN where unknown.
        self._seen: dict[TaskKind, dict[int, array[float]]] = {kind: {} for kind in KINDS}

    def add(self, trial: int, cost: float) -> None:
        """Take in a trial by the relative cost of one of its sub-epochs."""
        self._cost["train"][trial] = cost * self._unit
        self._cost["evaluate"][trial] = cost / 3 * self._unit

    def cost(self, kind: TaskKind, trial: int) -> float:
        """Return the relative cost of one task of a trial; its unit never changes."""
        return self._cost[kind][trial] / self._unit

    def pace(self, kind: TaskKind, partition: int) -> float:
        """Return how long tasks of cost 1 take on a partition, in any unit."""
        return self._pace[kind][partition]

    def seconds(self, kind: TaskKind, trial: int, partition: int) -> float:
        """Return the expected duration of a task."""
        seen = self._seen[kind].get(trial)
        if seen is not None and not isnan(known := seen[partition]):
            return known
        return self._modelled(kind, trial, partition)

    def learn(self, kind: TaskKind, trial: int, partition: int, seconds: float) -> None:
        """Update the estimates with a measured duration."""
        if not seconds > 0:
            return
        error = seconds / self._modelled(kind, trial, partition)
        if self._has_seen_any:  # cost and pace share the error equally
            self._cost[kind][trial] *= error**0.5
            self._pace[kind][partition] *= error**0.5
        else:
            self._has_seen_any = True
            self._unit = error
            for costs in self._cost.values():
                costs.update({each: cost * error for each, cost in costs.items()})
        seen = self._seen[kind]
        if trial not in seen:
            seen[trial] = array("d", [nan]) * self._partitions
        seen[trial][partition] = seconds

    def advance_clock(self, moment: float) -> None:
        """Advance the clock to the moment at which a task ended, if that is later."""
        self.now = max(self.now, moment)

    def _modelled(self, kind: TaskKind, trial: int, partition: int) -> float:
        return self._cost[kind][trial] * self._pace[kind][partition]
