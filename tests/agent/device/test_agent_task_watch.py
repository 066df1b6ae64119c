"""When a batch counts as slow or overdue, by a clock that the test moves."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from cerebro_hydra.agent.device.task_watch import BatchSeconds, TaskWatch, TimeLimits, VisitTime
from cerebro_hydra.plan.messages.instructions import Evaluate, StartSubEpoch, StateSource

SOURCE = StateSource(0, None)
TRAIN = StartSubEpoch(7, 0, 1, 0, (1,), 2, "me", SOURCE, {})
OTHER = StartSubEpoch(8, 1, 1, 0, (1,), 2, "me", SOURCE, {})
EVALUATE = Evaluate(9, 0, 0, 1, (1,), 2, "me", SOURCE)


class Bench:
    def __init__(self, batch: float | None = None, sub_epoch: float | None = None) -> None:
        self.now = 0.0
        self.slow: list[tuple[Any, float, float | None]] = []
        self.overdue: list[tuple[Any, Any]] = []
        self.known = BatchSeconds()
        self.watch = TaskWatch(
            TimeLimits(batch, sub_epoch, lambda *told: self.slow.append(told)),
            self.known,
            lambda *told: self.overdue.append(told),
            lambda: self.now,
        )

    def batches(self, *seconds: float) -> None:
        """Train so many batches, and begin the next one."""
        self.watch.run_on(threading.get_ident(), 1)
        self.watch.batch()
        for each in seconds:
            self.now += each
            self.watch.check()
            self.watch.batch()

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.watch.check()


def test_a_batch_of_twenty_times_the_median_is_told_of_once_per_task() -> None:
    bench = Bench()
    bench.watch.begin(TRAIN)
    bench.batches(1.0, 1.0, 9.0)
    bench.passes(19.9)
    assert bench.slow == []
    bench.passes(0.1)
    bench.passes(100.0)
    assert bench.slow == [(TRAIN, 20.0, 1.0)]
    bench.watch.begin(TRAIN)
    bench.batches()
    bench.passes(1000.0)
    assert len(bench.slow) == 2 and bench.overdue == []


def test_batches_that_take_next_to_nothing_are_not_told_of_for_less_than_seconds() -> None:
    bench = Bench()
    bench.watch.begin(TRAIN)
    bench.batches(0.001, 0.001)
    bench.passes(4.9)
    assert bench.slow == []
    bench.passes(0.1)
    assert bench.slow == [(TRAIN, 5.0, 0.001)]


def test_a_first_batch_is_told_of_after_a_minute_and_each_trial_and_kind_has_its_median() -> None:
    bench = Bench()
    bench.watch.begin(TRAIN)
    bench.batches(1.0)
    for task in (OTHER, EVALUATE):
        bench.watch.begin(task)
        bench.batches()
        bench.passes(59.0)
        bench.passes(1.0)
    assert bench.slow == [(OTHER, 60.0, None), (EVALUATE, 60.0, None)]


def test_of_batches_that_are_timed_together_one_may_take_the_limit() -> None:
    bench = Bench(batch=2.0)
    bench.watch.begin(TRAIN)
    bench.batches(1.0, 1.0, 1.0)
    bench.watch.run_on(None, 4)
    bench.passes(4.9)
    assert bench.overdue == []
    bench.passes(0.2)
    ((_, why),) = bench.overdue
    assert why.startswith("a batch took 2.1 s")


def test_a_batch_may_take_the_limit_as_often_as_it_is_said() -> None:
    bench = Bench(batch=2.0)
    bench.watch.begin(TRAIN)
    bench.batches()
    bench.now += 19.0
    bench.watch.check(10)
    assert bench.overdue == []
    bench.now += 2.0
    bench.watch.check(10)
    ((_, why),) = bench.overdue
    assert why.startswith("a batch took 21.0 s, longer than 10 times batch_seconds=2")


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"batch": 3.0}, "a batch took 4.0 s, longer than batch_seconds=3, in training of epoch 1"),
        ({"sub_epoch": 5.0}, "it took 6.0 s, longer than sub_epoch_seconds=5, in training of"),
    ],
)
def test_what_exceeds_a_limit_is_told_once_with_the_stack_of_its_thread(
    limits: dict[str, float], said: str
) -> None:
    bench = Bench(**limits)
    bench.watch.begin(TRAIN)
    bench.passes(100.0)  # its model is built
    bench.batches(2.0)
    assert bench.overdue == []
    bench.passes(4.0)
    bench.passes(4.0)
    ((task, why),) = bench.overdue
    assert task is TRAIN and why.startswith(said)
    assert "on partition 1 (worker 2)" in why and "test_what_exceeds_a_limit" in why


def timed(
    monkeypatch: pytest.MonkeyPatch, batch: float, sub_epoch: float
) -> tuple[Bench, VisitTime]:
    """Return the time of a visit with these limits, by a clock that a bench turns."""
    bench = Bench(batch=batch, sub_epoch=sub_epoch)
    monkeypatch.setattr(time, "monotonic", lambda: bench.now)
    limits = TimeLimits(batch, sub_epoch, lambda *told: bench.slow.append(told))
    overdue = lambda *told: bench.overdue.append(told)  # noqa: E731
    return bench, VisitTime(TRAIN, limits, bench.known, overdue)


def test_the_time_between_units_and_that_of_building_count_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, visit = timed(monkeypatch, 3.0, 5.0)

    def passes(seconds: float) -> None:
        bench.now += seconds
        visit.check()

    passes(1000.0)
    visit.build("a")
    visit.start("a", None, 1, bench.now)
    passes(1000.0)
    visit.built("a")
    passes(1.0)
    visit.stop("a", ends_batch=True, now=bench.now)
    passes(1000.0)
    visit.start("a", None, 1, bench.now)
    passes(2.0)
    assert (visit.seconds, bench.overdue, bench.slow) == (3.0, [], [])
    passes(1.5)
    assert bench.overdue[0][0].startswith("a batch took 3.5 s") and bench.overdue[0][1] == "a"


def test_devices_at_the_same_time_count_each_and_a_lost_one_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, visit = timed(monkeypatch, 3.0, 50.0)
    visit.start("a", None, 1, bench.now)
    bench.now += 1.0
    visit.start("b", None, 1, bench.now)
    bench.now += 1.0
    visit.lose("a", bench.now)
    visit.stop("b", ends_batch=False, now=bench.now)
    assert visit.seconds == 3.0
    bench.now += 1000.0  # while the first is replaced
    visit.build("a")
    visit.start("a", None, 1, bench.now)
    bench.now += 1000.0
    visit.built("a")
    bench.now += 0.5
    visit.check()
    assert (visit.seconds, bench.overdue) == (3.5, [])
    bench.now += 1.0
    visit.check()
    assert bench.overdue[0][0].startswith("a batch took 3.5 s")


def test_of_several_devices_the_one_that_computes_longest_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, visit = timed(monkeypatch, 3.0, 50.0)
    visit.start("hangs", None, 1, bench.now)
    bench.now += 2.0
    visit.start("works", None, 1, bench.now)
    bench.now += 1.5
    visit.check()
    assert [longest for _, longest in bench.overdue] == ["hangs"]
    visit.died("hangs")
    bench.now += 1.0
    visit.check()
    assert len(bench.overdue) == 1, "it may take as long from now on"
    bench.now += 2.5
    visit.check()
    assert [longest for _, longest in bench.overdue] == ["hangs", "works"]
    visit.stop("works", ends_batch=False, now=bench.now)
    bench.now += 1000.0
    visit.check()
    assert len(bench.overdue) == 2


def test_a_device_is_not_judged_while_it_may_be_dead_and_what_it_took_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, visit = timed(monkeypatch, 3.0, 5.0)
    for _ in range(3):
        visit.start("a", None, 1, bench.now)
        bench.now += 2.5
        visit.check()
        bench.now += 10.0
        visit.check(silence=10.0)
        visit.died("a")
    assert bench.overdue == []
    visit.start("a", None, 1, bench.now)
    bench.now += 3.4
    visit.check(silence=0.5)
    assert bench.overdue == []
    visit.check(silence=0.3)
    assert bench.overdue[0][0].startswith("a batch took 3.1 s")
