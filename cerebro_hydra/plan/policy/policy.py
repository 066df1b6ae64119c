"""The assignment policy proposes which open tasks to begin, on which workers.

The rule: whenever a worker is free and a trial is ready, the pair with the most work left goes
first (longest remaining work; Pinedo, "Scheduling", open shops), then the pair with the most bytes
already there, then a seeded tie-break. With many trials per worker it is nearly optimal, and
indexes answer it (``most_work_first``).

With few trials per worker they run into conflicts near the end of an epoch. There each decision
rolls out the future a few times with different preferences and follows the one that ends first.
The best rule is kept for the next decision, so that the schedule only gets better, as far as the
estimates are true.

`Scheduler` joins it with the state machine: every event is handled, then what is open is assigned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from operator import or_
from random import Random
from typing import NamedTuple, Protocol

from cerebro_hydra.plan.bits import members
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.events import Assigned, Assignment, Event
from cerebro_hydra.plan.messages.instructions import Instruction
from cerebro_hydra.plan.policy.lookahead import Lookahead, PairValues, PlannedTask, snapshot
from cerebro_hydra.plan.policy.view import View
from cerebro_hydra.plan.seeds import seed_of

FEW_PER_PLACE = 2  # trials per place at a worker, below which conflicts are worth a look ahead
MOST_PAIRS = 1024  # of trials and partitions, beyond which a look ahead takes too long
HORIZON = 160  # tasks in one rollout
EFFORT = 640  # tasks in all rollouts of a decision
GOOD_ENOUGH = 1.002  # times the lower bound; beyond it more rollouts would not pay
MUTATION_RATE = 0.25  # the share of preferences that a new rule draws anew
MAX_WAITS = (0.0, 0.1, 0.3)  # of a rule, in mean sub-epochs
# Preferences too small to outweigh anything but equal work, in mean sub-epochs.
TIE_BREAK, BYTES_THERE = 1e-4, 1e-3


def most_work_first(view: View) -> list[Assignment]:
    """Give open workers a task each, if there is one for it, from the trial with the most work.

    Workers come first whose devices have the least to do. A trial goes to the worker with the
    longest backlog, and of those to one with most of its bytes.
    """
    for free in view.open_levels:
        if chosen := _most_work_first(view, free):
            return chosen
    return []


def _most_work_first(view: View, free: int) -> list[Assignment]:
    chosen: list[Assignment] = []
    for trial in view.ready(free):
        while tasks := view.tasks(trial) & free:
            partition = _longest_backlog(view, trial, tasks)
            chosen.append(view.assignment(trial, partition))
            free &= ~view.partitions_beside(partition)
            if view.one_at_a_time(trial):
                break
        if not free:
            break
    return chosen


def replicas_first(view: View) -> list[Assignment]:
    """Begin sub-epochs with replicas whose workers are idle, from the trials with the most work.

    Of a trial's groups of partitions one is taken whose workers have most of its bytes. The first
    trial that has to wait for a worker keeps the other workers of a group free for it, or tasks of
    other trials could keep one of them busy at any moment.
    """
    chosen: list[Assignment] = []
    for trial in view.ready_replicas():
        found = ((group, _mask_of(view, group)) for group in view.replicas(trial))
        groups = [group for group, mask in found if not mask & view.kept_free]
        if not groups:
            continue
        idle = [group for group in groups if view.idle(group)]
        group = max(idle, key=partial(_there, view, trial)) if idle else groups[0]
        view.kept_free |= _mask_of(view, group)
        if not idle:
            break
        chosen.append(view.assignment(trial, *group))
    return chosen


def _mask_of(view: View, partitions: Sequence[int]) -> int:
    """Return all partitions of the workers of these partitions, as a mask."""
    return reduce(or_, map(view.partitions_beside, partitions))


def _there(view: View, trial: int, partitions: Sequence[int]) -> float:
    return sum(view.share_there(trial, partition) for partition in partitions)


def _longest_backlog(view: View, trial: int, tasks: int) -> int:
    """Return the partition with the longest backlog, and of those one with most of the bytes.

    A worker of several tasks does not wait for one of them, so there a backlog that is shorter by
    one task is as good, and what the trial has there need not move.
    """
    if tasks & (tasks - 1) == 0:
        return tasks.bit_length() - 1
    backlogs = {partition: view.backlog(partition) for partition in members(tasks)}
    longest = max(backlogs.values())
    best = [p for p, backlog in backlogs.items() if backlog + view.slack(p) >= longest]
    return max(best, key=lambda partition: view.share_there(trial, partition))


class DispatchRule(NamedTuple):
    """Says how to choose among free workers and ready trials; its times are in mean sub-epochs.

    ``preferences`` say by trial and partition how much more work a pair is treated as having, and
    ``max_wait`` how long to wait for a better pair.
    """

    preferences: PairValues
    max_wait: float


class Policy:
    """Proposes the tasks of one run; its memory depends on what it has seen alone."""

    def __init__(self, config: HopConfig) -> None:
        self._partitions = config.partitions
        self._random = Random(seed_of(config.seed, "policy"))
        self._rule = DispatchRule({}, 0.0)
        # Every trial goes round the same ring, one partition apart: optimal if all tasks are equal.
        self._untried_rings = list(MAX_WAITS)

    def choose(self, view: View) -> list[Assignment]:
        """Return the tasks to begin: at most one per worker, and one sub-epoch per trial."""
        view.kept_free = 0
        if not any(view.open_levels):
            return []
        if view.has_replicas:
            return replicas_first(view) + most_work_first(view)
        live = view.num_live()
        if live >= FEW_PER_PLACE * view.num_places or live * self._partitions > MOST_PAIRS:
            return most_work_first(view)
        choices = view.choices()
        return self._look_ahead(view, choices) if choices else []

    def _look_ahead(self, view: View, choices: dict[int, int]) -> list[Assignment]:
        lookahead = snapshot(view)
        bound = lookahead.bound * GOOD_ENOUGH
        bytes_there = _bytes_there(view, choices)
        random = self._random.random
        for trial in lookahead.trials:
            if trial not in self._rule.preferences:
                plain = [TIE_BREAK * random() for _ in range(self._partitions)]
                self._rule.preferences[trial] = plain
        end, tasks = _rollout(lookahead, self._rule, bytes_there)
        effort = len(tasks)
        while end > bound and effort < EFFORT:
            rule = self._other_rule(lookahead)
            other_end, other_tasks = _rollout(lookahead, rule, bytes_there)
            effort += max(1, len(other_tasks))
            if other_end < end:
                self._rule, end, tasks = rule, other_end, other_tasks
        return [view.assignment(t.trial, t.partition) for t in _first(lookahead, tasks, choices)]

    def _other_rule(self, lookahead: Lookahead) -> DispatchRule:
        if self._untried_rings:
            size = range(self._partitions)
            ring = {t: [-float((p - t) % len(size)) for p in size] for t in lookahead.trials}
            return DispatchRule(ring, self._untried_rings.pop())
        random = self._random.random
        preferences = {
            trial: [
                random() if random() < MUTATION_RATE else value
                for value in self._rule.preferences[trial]
            ]
            for trial in lookahead.trials
        }
        return DispatchRule(preferences, self._random.choice(MAX_WAITS))


def _first(
    lookahead: Lookahead, tasks: list[PlannedTask], choices: dict[int, int]
) -> list[PlannedTask]:
    """Return the choices that come first in this future for their worker and for their trial."""
    workers: set[int] = set()
    trials: set[int] = set()
    chosen = []
    for task in tasks:
        worker = lookahead.workers[task.partition]
        possible = choices.get(task.trial, 0) >> task.partition & 1
        suspect = lookahead.trials[task.trial].suspect
        if suspect and not possible:
            continue  # nobody waits for a trial that may be lethal
        if worker not in workers and task.trial not in trials and possible:
            chosen.append(task)
        workers.add(worker)
        if task.kind == "train" or suspect:
            trials.add(task.trial)
        if len(workers) == len(lookahead.free_at):
            break
    return chosen


def _rollout(
    lookahead: Lookahead, rule: DispatchRule, bytes_there: dict[tuple[int, int], float]
) -> tuple[float, list[PlannedTask]]:
    preferences = {
        trial: [lookahead.mean * value for value in rule.preferences[trial]]
        for trial in lookahead.trials
    }
    for (trial, partition), preference in bytes_there.items():
        preferences[trial][partition] += lookahead.mean * preference
    return lookahead.rollout(preferences, rule.max_wait * lookahead.mean, HORIZON)


def _bytes_there(view: View, choices: dict[int, int]) -> dict[tuple[int, int], float]:
    """Return preferences for workers that have bytes of the trial's state already."""
    largest = max(1, *(view.nbytes(trial) for trial in choices), 1)
    return {
        (trial, partition): BYTES_THERE
        * view.share_there(trial, partition)
        * view.nbytes(trial)
        / largest
        for trial, partitions in choices.items()
        for partition in members(partitions)
    }


Decision = tuple[Event, list[Instruction]]


class Chooser(Protocol):
    """Proposes which open tasks to begin; `Policy` is one."""

    def choose(self, view: View) -> list[Assignment]:
        """Return the tasks to begin now."""


class Scheduler:
    """Decides for one run; the coordinator, the in-process driver and the simulator drive it."""

    def __init__(
        self, config: HopConfig, state: HopState | None = None, policy: Chooser | None = None
    ) -> None:
        self.state = state or HopState(config)
        self._policy = policy or Policy(config)
        self._view = View(self.state.tables)

    @property
    def tasks_expected(self) -> bool:
        """Whether a worker may be given a task yet, or waits for a trial that another one has."""
        return self._view.tasks_expected

    def handle(self, event: Event) -> list[Decision]:
        """Handle one event, and the choices that it made possible as events of their own.

        A choice has one task for a worker, so where workers hold several there may be more of them.
        """
        decisions = [(event, self.state.handle(event))]
        while tasks := self._policy.choose(self._view):
            assigned = Assigned(tuple(tasks))
            decisions.append((assigned, self.state.handle(assigned)))
            if not self._view.holds_several:
                break
        return decisions
