"""What a decision costs, what its indexes hold, and that a journal folds without its policy."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

import pytest

from benchmarks.scheduler.bound import lower_bound
from benchmarks.scheduler.run import measure, task_seconds
from cerebro_hydra.plan.bits import members
from cerebro_hydra.plan.hop.attempts import Attempts
from cerebro_hydra.plan.hop.journal import fold, record
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.hop.tables import RunTables
from cerebro_hydra.plan.hop.trial_status import TrialStatus
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.messages.events import Assignment
from cerebro_hydra.plan.policy.policy import Scheduler, most_work_first
from cerebro_hydra.plan.policy.view import View
from cerebro_hydra.plan.simulate.run import Simulation
from tests.journals import comparable
from tests.plan.closed_search import ClosedSearch
from tests.plan.driver import Driver, config


def search(workers: int, trials: int) -> tuple[ClosedSearch, Any]:
    cost, seconds = task_seconds(workers, trials)
    each = tuple(TrialConfig(t, cost[t], 100, (("f", f"t{t}"),)) for t in range(trials))
    return ClosedSearch(HopConfig(workers), each, 2), seconds


def calls_per_event(workers: int, trials: int) -> float:
    """Count function calls, which do not depend on the machine, in the middle of a run."""
    closed, seconds = search(workers, trials)
    simulation = Simulation(closed, [(w,) for w in range(workers)], seconds)
    for _ in range(trials + 20 * workers):
        simulation.step()
    counts: list[int] = []
    handle = simulation.scheduler.handle

    def counted(event: ev.Event) -> Any:
        calls = 0

        def count(frame: object, kind: str, argument: object) -> None:
            nonlocal calls
            calls += kind in ("call", "c_call")

        sys.setprofile(count)
        try:
            return handle(event)
        finally:
            sys.setprofile(None)
            counts.append(calls)

    simulation.scheduler.handle = counted  # type: ignore[method-assign]
    while len(counts) < 300:
        simulation.step()
    return median(counts)


def test_an_event_costs_hardly_more_with_sixteen_times_the_trials_and_workers() -> None:
    assert calls_per_event(64, 640) < 1.5 * calls_per_event(16, 160)


def test_a_trial_that_waits_takes_less_memory_than_a_number_per_partition() -> None:
    partitions, trials = 1000, 30
    tracemalloc.start()
    state = HopState(HopConfig(partitions))
    before, _ = tracemalloc.get_traced_memory()
    for number in range(trials):
        state.handle(ev.TrialAdded(TrialConfig(number, 1.0, 100, (("f", f"t{number}"),)), 9))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / trials < 8 * partitions


def test_many_trials_per_worker_end_close_to_the_lower_bound_without_a_look_ahead() -> None:
    closed, seconds = search(6, 36)
    workers = [(worker,) for worker in range(6)]
    ratio = Simulation(closed, workers, seconds).run().makespan / lower_bound(
        closed, workers, seconds
    )
    assert 1 - 1e-9 <= ratio <= 1.02


def test_the_benchmark_counts_every_event_of_a_run_with_losses() -> None:
    figures = measure(workers=3, trials=6, events=None)
    assert figures.finished and figures.median_ms <= figures.p99_ms <= figures.max_ms
    assert measure(workers=3, trials=6, events=50).events == 50


# ---------------------------------------------------------------------- indexes


def flip_open_task(tables: RunTables) -> None:
    tables.open_tasks._trials[1] ^= 1


def forget_turn(tables: RunTables) -> None:
    tables.open_tasks._queue.pop()


def open_all(tables: RunTables) -> None:
    tables.workers.open_levels[0] = 0b11


def lose_status(tables: RunTables) -> None:
    tables._statuses[TrialStatus.TRAINING] = 0


def lose_holder(tables: RunTables) -> None:
    tables.holders._whole["store"].clear()


def train_all(tables: RunTables) -> None:
    tables.in_training = 0


@pytest.mark.parametrize(
    "spoil", [flip_open_task, forget_turn, open_all, lose_status, lose_holder, train_all]
)
def test_an_index_that_is_wrong_is_noticed(spoil: Callable[[RunTables], None]) -> None:
    run = Driver(trials=5, partitions=2)
    run.state.validate()
    spoil(run.state.tables)
    with pytest.raises(AssertionError):
        run.state.validate()


def test_an_attempt_changes_its_status_only_as_the_table_says() -> None:
    run = Driver(trials=1, evaluate=False)
    (attempt,) = run.state.attempts.values()
    attempts = Attempts(run.state.tables)
    attempt.status = "reserved"
    with pytest.raises(KeyError):
        attempts.move(attempt, "ending")


# ---------------------------------------------------------------------- choices


class AnyTask:
    """Chooses at random, as no version of the policy ever did."""

    def __init__(self) -> None:
        self._random = Random(3)

    def choose(self, view: View) -> list[Assignment]:
        """Return one task, if there is one."""
        possible = [
            view.assignment(trial, partition)
            for trial, partitions in view.choices().items()
            for partition in members(partitions)
        ]
        return [self._random.choice(possible)] if possible else []


def test_a_journal_folds_without_the_policy_that_chose() -> None:
    closed, seconds = search(3, 5)
    simulation = Simulation(closed, [(0,), (1,), (2,)], seconds)
    simulation.scheduler = Scheduler(closed.config, policy=AnyTask())
    records = [record(n, *each) for n, each in enumerate(simulation.run().records)]
    text = [json.loads(json.dumps(each)) for each in records]
    assert comparable(fold(closed.config, text)) == comparable(simulation.state)


def test_a_choice_that_is_not_open_is_refused_by_name() -> None:
    run = Driver(trials=3, partitions=2, evaluate=False)
    (busy, _) = run.state.attempts.values()
    taken = Assignment(busy.trial, busy.partition, busy.worker)
    with pytest.raises(ValueError, match=r"Assignment\(.*was chosen, and it can't be begun now"):
        run.state.handle(ev.Assigned((taken,)))


def test_the_trial_with_the_most_work_left_goes_first() -> None:
    state = HopState(HopConfig(2, evaluate=False))
    for number, cost in enumerate((1.0, 3.0, 2.0)):
        state.handle(ev.TrialAdded(TrialConfig(number, cost, 100, (("f", f"t{number}"),)), 1))
    state.handle(ev.WorkerJoined(1, "b", (1,)))
    assert most_work_first(View(state.tables)) == [Assignment(1, 1, 1)]


def test_the_story_of_a_trial_keeps_its_last_lines() -> None:
    closed = config(partitions=1, epochs=110, evaluate=False)
    simulation = Simulation(closed, [(0,)], lambda *_: 1.0)
    simulation.run()
    lines = simulation.state.story(0).splitlines()
    assert len(lines) == 100 and "finished with state 110" in lines[-1]
