"""The makespan of runs by the real state machine, against a lower bound and the optimum."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import mean

import pytest

from benchmarks.scheduler.bound import lower_bound
from cerebro_hydra.plan.hop.trials import TaskKind
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.policy import policy
from cerebro_hydra.plan.simulate.run import Simulation, TaskSeconds
from tests.plan.closed_search import ClosedSearch

Instance = tuple[ClosedSearch, list[tuple[int, ...]], TaskSeconds]


def instance(
    seed: int, trials: int, workers: int, epochs: int, evaluate: bool, spread: float
) -> Instance:
    """Make lognormal trials, workers of paces that the config does not tell, and 5 % noise."""
    random = Random(seed)
    cost = [random.lognormvariate(0, spread) for _ in range(trials)]
    pace = [random.lognormvariate(0, spread / 3) for _ in range(workers)]
    noise = {
        (kind, t, p): random.lognormvariate(0, 0.05 if spread else 0.0)
        for kind in ("train", "evaluate")
        for t in range(trials)
        for p in range(workers)
    }

    def seconds(kind: TaskKind, trial: int, partition: int) -> float:
        share = 1.0 if kind == "train" else 0.3
        return cost[trial] * pace[partition] * noise[kind, trial, partition] * share

    each = tuple(TrialConfig(t, cost[t], 100, ((f"f{t}", f"t{t}"),)) for t in range(trials))
    config = HopConfig(workers, seed=seed, evaluate=evaluate)
    return ClosedSearch(config, each, epochs), [(p,) for p in range(workers)], seconds


def instances() -> list[Instance]:
    """Make 36 fixed instances, a third of them at the hard size of 8 trials on 8 workers."""
    found = []
    for seed in range(24):
        random = Random(seed)
        trials, workers = random.randint(2, 16), random.randint(2, 8)
        spread = random.choice([0.0, 0.2, 0.5, 0.8])
        found.append(instance(seed, trials, workers, random.randint(1, 3), seed % 2 == 0, spread))
    for seed in range(24, 36):
        spread = (0.0, 0.1, 0.3, 0.5)[seed % 4]
        found.append(instance(seed, 8, 8, 1 + seed % 3, seed % 2 == 0, spread))
    return found


# A third of the instances, of every number of epochs, a third of them hard.
DOZEN = [number for number in range(36) if number // 3 % 3 == number % 3]


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(DOZEN, id="a dozen instances"),
        pytest.param(range(36), id="all instances", marks=pytest.mark.long),
    ],
)
def test_mean_makespan_is_within_one_percent_of_the_lower_bound(numbers) -> None:
    ratios, fixed = [], instances()
    for number in numbers:
        config, workers, seconds = fixed[number]
        bound = lower_bound(config, workers, seconds)
        ratios.append(Simulation(config, workers, seconds).run().makespan / bound)
    assert min(ratios) >= 1 - 1e-9
    assert mean(ratios) <= 1.01


def test_equal_trials_on_as_many_workers_never_wait() -> None:
    for size in (2, 4, 8):
        config, workers, seconds = instance(1, size, size, 2, False, 0.0)
        assert abs(Simulation(config, workers, seconds).run().makespan - 2 * size) < 1e-9


def optimum(seconds: Callable[[int, int], float], trials: int, workers: int) -> float:
    """Return the shortest one-epoch makespan without evaluation, over all semi-active schedules."""
    best = float("inf")

    def extend(left: frozenset[tuple[int, int]], ready: list[float], free: list[float]) -> None:
        nonlocal best
        for t in range(trials):
            if ready[t] + sum(seconds(t, p) for u, p in left if u == t) >= best:
                return
        for p in range(workers):
            if free[p] + sum(seconds(t, q) for t, q in left if q == p) >= best:
                return
        if not left:
            best = max(*ready, *free)
            return
        # The next task in the order of starts begins before any task could end.
        ends = {(t, p): max(ready[t], free[p]) + seconds(t, p) for t, p in left}
        soonest = min(ends.values())
        for t, p in sorted(left):
            if max(ready[t], free[p]) < soonest:
                extend(
                    left - {(t, p)},
                    [*ready[:t], ends[t, p], *ready[t + 1 :]],
                    [*free[:p], ends[t, p], *free[p + 1 :]],
                )

    pairs = frozenset((t, p) for t in range(trials) for p in range(workers))
    extend(pairs, [0.0] * trials, [0.0] * workers)
    return best


def test_small_runs_are_close_to_the_exact_optimum() -> None:
    ratios = []
    for seed in range(24):
        random = Random(seed)
        trials, workers = random.randint(2, 3), random.randint(2, 3)
        config, slots, seconds = instance(seed, trials, workers, 1, False, 0.6)
        best = optimum(lambda t, p, s=seconds: s("train", t, p), trials, workers)
        ratios.append(Simulation(config, slots, seconds).run().makespan / best)
    assert min(ratios) >= 1 - 1e-9
    assert mean(ratios) <= 1.03


def test_a_decision_looks_ahead_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks that a decision simulates bound its time on any machine."""
    config, workers, seconds = instance(27, 8, 8, 1, False, 0.5)
    simulated: list[int] = []
    choose, rollout = policy.Policy.choose, policy._rollout

    def counted_choose(self, view):
        simulated.append(0)
        return choose(self, view)

    def counted_rollout(*arguments):
        end, tasks = rollout(*arguments)
        simulated[-1] += len(tasks)
        return end, tasks

    monkeypatch.setattr(policy.Policy, "choose", counted_choose)
    monkeypatch.setattr(policy, "_rollout", counted_rollout)
    Simulation(config, workers, seconds).run()
    assert 300 < max(simulated) <= 800  # the case is hard enough to use what is allowed
