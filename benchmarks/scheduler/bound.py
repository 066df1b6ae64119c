"""Computes a lower bound on how long a run takes, whatever the assignment rule."""

from __future__ import annotations

from collections.abc import Sequence

from cerebro_hydra.plan.simulate.run import TaskSeconds
from tests.plan.closed_search import ClosedSearch


def lower_bound(
    search: ClosedSearch,
    workers: Sequence[tuple[int, ...]],
    seconds: TaskSeconds,
    devices: int = 1,
) -> float:
    """Return the larger of the longest trial and the fullest worker, in seconds.

    A trial trains on one partition at a time and is then evaluated on all workers at once; a
    worker runs a task on each of its ``devices`` at a time. It is the bound of an open shop, with
    evaluations between the epochs.
    """
    trials = [trial.trial for trial in search.trials]
    partitions_of_all = range(search.config.partitions)

    def evaluation(trial: int, partitions: Sequence[int]) -> float:
        if not search.config.evaluate:
            return 0.0
        return sum(seconds("evaluate", trial, partition) for partition in partitions)

    def training(trial: int, partitions: Sequence[int]) -> float:
        return sum(seconds("train", trial, partition) for partition in partitions)

    longest_trial = max(
        training(trial, partitions_of_all)
        + max(
            max(
                evaluation(trial, partitions) / devices,
                *(evaluation(trial, (p,)) for p in partitions),
            )
            for partitions in workers
        )
        for trial in trials
    )
    fullest_worker = max(
        sum(training(trial, partitions) + evaluation(trial, partitions) for trial in trials)
        / devices
        for partitions in workers
    )
    return search.epochs * max(longest_trial, fullest_worker)
