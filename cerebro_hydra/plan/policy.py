"""The assignment rule: which of the possible tasks to give out now.

Whenever a worker is free and a trial is ready, the pair with the most work left goes first
(longest remaining work of the trial plus the worker's; Pinedo, "Scheduling", open shops), then
the one with most bytes already there, then a seeded tie-break. As many trials as workers are the
hard case of that rule: they run into each other near the end of an epoch. So each decision looks
ahead a few times with different preferences, and follows the future that ends first. The best
preferences are kept for the next decision, so that the plan gets better and never worse, as far
as the estimates are true.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NamedTuple

from cerebro_hydra.plan.lookahead import Bias, Lookahead, Step, snapshot
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.plan.visits import TaskChoice

if TYPE_CHECKING:
    from cerebro_hydra.plan.hop_config import HopConfig
    from cerebro_hydra.plan.hop_state import HopState

HORIZON = 160  # tasks that one look goes ahead
EFFORT = 640  # tasks that all looks of a decision go ahead
GOOD_ENOUGH = 1.002  # of the lower bound: looking further would not pay
CHANGED = 0.25  # the share of preferences that a new plan draws anew
PATIENCE = (0.0, 0.1, 0.3)  # what a new plan may wait, in mean sub-epochs
TIE, BYTES = 1e-4, 1e-3  # of a preference: too little to outweigh anything but equal work


class Plan(NamedTuple):
    """How to choose: what to prefer, and how long to wait for a better pair.

    Preferences say by trial and partition how much more work, in mean sub-epochs, a pair is
    taken to have than it has. Patience is in mean sub-epochs too.
    """

    preferences: Bias
    patience: float


class Policy:
    """Chooses for one run; what it keeps depends on the events alone."""

    def __init__(self, config: HopConfig) -> None:
        trials, partitions = range(len(config.trials)), range(config.partitions)
        self._random = Random(seed_of(config.seed, "policy"))
        plain = [[TIE * self._random.random() for _ in partitions] for _ in trials]
        # Every trial goes round the same ring, one step apart: exact if all tasks are equal.
        ring = [[-float((p - t) % len(partitions)) for p in partitions] for t in trials]
        self.plan = Plan(plain, 0.0)
        self._untried = [Plan(ring, patience) for patience in PATIENCE]

    def choose(self, state: HopState, choices: list[TaskChoice]) -> list[TaskChoice]:
        """Return the choices to take, at most one per worker and one sub-epoch per trial."""
        lookahead = snapshot(state)
        bound = lookahead.bound * GOOD_ENOUGH
        nearby = _nearby(state, choices)
        end, steps = _rollout(lookahead, self.plan, nearby)
        effort = len(steps)
        while end > bound and effort < EFFORT:
            plan = self._untried.pop() if self._untried else self._varied()
            other_end, other = _rollout(lookahead, plan, nearby)
            effort += max(1, len(other))
            if other_end < end:
                self.plan, end, steps = plan, other_end, other
        return _first_steps(lookahead, steps, choices)

    def _varied(self) -> Plan:
        random = self._random.random
        preferences = [
            [random() if random() < CHANGED else value for value in row]
            for row in self.plan.preferences
        ]
        return Plan(preferences, self._random.choice(PATIENCE))

    def comparable(self) -> object:
        """All that the next choice depends on, for comparisons."""
        return self.plan, self._untried, self._random.getstate()


def _first_steps(
    lookahead: Lookahead, steps: list[Step], choices: list[TaskChoice]
) -> list[TaskChoice]:
    """The choices that are the first thing their worker, and their trial, does in this future."""
    open_ = {Step(c.trial, c.kind, c.partition): c for c in choices}
    workers: set[int] = set()
    trials: set[int] = set()
    given = []
    for step in steps:
        worker = lookahead.workers[step.partition]
        if worker not in workers and step.trial not in trials and step in open_:
            given.append(open_[step])
        workers.add(worker)
        if step.kind == "train":
            trials.add(step.trial)
        if len(workers) == len(lookahead.free):
            break
    return given


def _rollout(
    lookahead: Lookahead, plan: Plan, nearby: dict[tuple[int, int], float]
) -> tuple[float, list[Step]]:
    bias = [[lookahead.mean * value for value in row] for row in plan.preferences]
    for (trial, partition), share in nearby.items():
        bias[trial][partition] += lookahead.mean * share
    return lookahead.rollout(bias, plan.patience * lookahead.mean, HORIZON)


def _nearby(state: HopState, choices: list[TaskChoice]) -> dict[tuple[int, int], float]:
    """Preferences for workers that have bytes of the trial's state already."""
    largest = max(1, *(trial.config.nbytes for trial in state.trials))
    nearby = {}
    for choice in choices:
        trial = state.trials[choice.trial]
        share = state.holders.share(choice.trial, trial.newest, choice.agent.incarnation)
        nearby[choice.trial, choice.partition] = BYTES * share * trial.config.nbytes / largest
    return nearby
