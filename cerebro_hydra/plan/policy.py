"""The assignment policy chooses which of the possible tasks to assign now.

Whenever a worker is free and a trial is ready, the pair with the most work left goes first
(longest remaining work of the trial plus the worker's; Pinedo, "Scheduling", open shops), then the
pair with the most bytes already there, then a seeded tie-break. That rule is weakest with as many
trials as workers, which run into conflicts near the end of an epoch. So each decision rolls out
the future a few times with different preferences and follows the one that ends first. The best
rule is kept for the next decision, so that the schedule only gets better, as far as the estimates
are true.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NamedTuple

from cerebro_hydra.plan.lookahead import Lookahead, PairValues, PlannedTask, snapshot
from cerebro_hydra.plan.progress import TaskChoice
from cerebro_hydra.plan.seeds import seed_of

if TYPE_CHECKING:
    from cerebro_hydra.plan.hop_config import HopConfig
    from cerebro_hydra.plan.hop_state import HopState

HORIZON = 160  # tasks in one rollout
EFFORT = 640  # tasks in all rollouts of a decision
GOOD_ENOUGH = 1.002  # times the lower bound; beyond it more rollouts would not pay
MUTATION_RATE = 0.25  # the share of preferences that a new rule draws anew
MAX_WAITS = (0.0, 0.1, 0.3)  # of a rule, in mean sub-epochs
# Preferences too small to outweigh anything but equal work, in mean sub-epochs.
TIE_BREAK, BYTES_THERE = 1e-4, 1e-3


class DispatchRule(NamedTuple):
    """Says how to choose among free workers and ready trials; its times are in mean sub-epochs.

    ``preferences`` say by trial and partition how much more work a pair is treated as having, and
    ``max_wait`` how long to wait for a better pair.
    """

    preferences: PairValues
    max_wait: float


class Policy:
    """Chooses the tasks of one run; its memory depends on the events alone."""

    def __init__(self, config: HopConfig) -> None:
        trials, partitions = range(len(config.trials)), range(config.partitions)
        self._random = Random(seed_of(config.seed, "policy"))
        plain = [[TIE_BREAK * self._random.random() for _ in partitions] for _ in trials]
        # Every trial goes round the same ring, one partition apart: optimal if all tasks are equal.
        ring = [[-float((p - t) % len(partitions)) for p in partitions] for t in trials]
        self.rule = DispatchRule(plain, 0.0)
        self._untried = [DispatchRule(ring, max_wait) for max_wait in MAX_WAITS]

    def choose(self, state: HopState, choices: list[TaskChoice]) -> list[TaskChoice]:
        """Return the choices to take: at most one per worker and one sub-epoch per trial."""
        lookahead = snapshot(state)
        bound = lookahead.bound * GOOD_ENOUGH
        bytes_there = _bytes_there(state, choices)
        end, tasks = _rollout(lookahead, self.rule, bytes_there)
        effort = len(tasks)
        while end > bound and effort < EFFORT:
            rule = self._untried.pop() if self._untried else self._mutated_rule()
            other_end, other_tasks = _rollout(lookahead, rule, bytes_there)
            effort += max(1, len(other_tasks))
            if other_end < end:
                self.rule, end, tasks = rule, other_end, other_tasks
        return _first_tasks(lookahead, tasks, choices)

    def _mutated_rule(self) -> DispatchRule:
        random = self._random.random
        preferences = [
            [random() if random() < MUTATION_RATE else value for value in row]
            for row in self.rule.preferences
        ]
        return DispatchRule(preferences, self._random.choice(MAX_WAITS))

    def comparable(self) -> object:
        """Return everything that the next choice depends on, for comparisons."""
        return self.rule, self._untried, self._random.getstate()


def _first_tasks(
    lookahead: Lookahead, tasks: list[PlannedTask], choices: list[TaskChoice]
) -> list[TaskChoice]:
    """Return the choices that come first in this future for their worker and for their trial."""
    possible = {PlannedTask(c.trial, c.kind, c.partition): c for c in choices}
    workers: set[int] = set()
    trials: set[int] = set()
    chosen = []
    for task in tasks:
        worker = lookahead.workers[task.partition]
        suspect = bool(lookahead.state.trials[task.trial].lost_agents)
        if suspect and task not in possible:
            continue  # nobody waits for a trial that may be lethal
        if worker not in workers and task.trial not in trials and task in possible:
            chosen.append(possible[task])
        workers.add(worker)
        if task.kind == "train" or suspect:
            trials.add(task.trial)
        if len(workers) == len(lookahead.free_at):
            break
    return chosen


def _rollout(
    lookahead: Lookahead, rule: DispatchRule, bytes_there: dict[tuple[int, int], float]
) -> tuple[float, list[PlannedTask]]:
    preferences = [[lookahead.mean * value for value in row] for row in rule.preferences]
    for (trial, partition), preference in bytes_there.items():
        preferences[trial][partition] += lookahead.mean * preference
    return lookahead.rollout(preferences, rule.max_wait * lookahead.mean, HORIZON)


def _bytes_there(state: HopState, choices: list[TaskChoice]) -> dict[tuple[int, int], float]:
    """Return preferences for workers that have bytes of the trial's state already."""
    largest = max(1, *(trial.nbytes for trial in state.config.trials))
    preferences = {}
    for choice in choices:
        trial = state.trials[choice.trial]
        share = state.holders.share(choice.trial, trial.newest, choice.agent.incarnation)
        preferences[choice.trial, choice.partition] = (
            BYTES_THERE * share * trial.config.nbytes / largest
        )
    return preferences
