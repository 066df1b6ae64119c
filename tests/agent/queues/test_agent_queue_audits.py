"""The queues of a worker audit steps: real devices and queues, with trials that are bytes."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.queue_worker import train
from cerebro_hydra.agent.visit import Visit
from cerebro_hydra.errors import ScratchFull
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.queues.events import VisitRestarted
from tests.agent.byte_visits import ByteTrials
from tests.agent.queues.queue_bench import MICROBATCHES, SIZES, QueueBench, bench
from tests.agent.standins import SECONDS, refuse_copies


def audited(*args: Any, **options: Any) -> Any:
    """Make a bench whose trials have trained for long, so that audits are allowed."""
    return bench(*args, audit_share=0.01, trained=1e6, **options)


@pytest.mark.parametrize("at_home", [False, True])
@pytest.mark.parametrize("window", [1, 3])
def test_audits_of_several_trials_change_no_byte(window: int, at_home: bool) -> None:
    """The devices have no room for optimizer state if that stays at home, in audits either."""
    trials = ByteTrials(SIZES, window, apart=400, at_home=at_home)
    need = trials.profile(0).training(0, 1, window, True).device_need
    with audited(trials, [need, need], 2 * need) as made:
        made.begin(3)
        assert all(result.audit_seconds > 0 for result in made.end(3))


def test_a_device_that_dies_meanwhile_changes_no_byte() -> None:
    with audited(ByteTrials(SIZES, seconds=0.004), [4500, 4500]) as made:
        made.begin(3)
        for done in (10, 60):
            made.state.wait_for_tasks(done)
            made.devices[-1].close()
        made.end(3)


def chosen(made: QueueBench, step: int | None = None) -> list[int]:
    """Return the attempts of which a step is chosen, as it is; it is the one that is given."""
    attempts: list[int] = []
    watch, is_due = made.audits.watch, made.audits.is_due

    def drawn(visit: Visit) -> None:
        watch(visit)
        visit.drawn = visit.drawn if step is None else step

    def chooses(visit: Visit, unit: Sequence[Action]) -> bool:
        due = is_due(visit, unit)
        attempts.extend([visit.task.attempt] if due else [])
        return due

    made.audits.watch = drawn  # type: ignore[method-assign]
    made.audits.is_due = chooses  # type: ignore[method-assign]
    return attempts


@pytest.mark.parametrize(("step", "recompute"), [(1, True), (5, False), (MICROBATCHES - 1, True)])
def test_a_trial_that_trains_otherwise_from_a_step_on_is_told_and_trained_uncut(
    step: int, recompute: bool
) -> None:
    trials = ByteTrials(SIZES, seconds=0.01, faults={1: "wrong"}, wrong_from=step)
    budgets = [4500, 4500] if recompute else [None]
    with audited(trials, budgets, recompute=recompute) as made:
        chosen(made, step)
        made.begin(2)
        results = made.results(2)
        made.check(0, results[0])
        assert isinstance(results[1], events.AuditFailed)
        assert results[1].difference == (
            f"at step {step}, in epoch 1 on partition 0 (worker 0): parameter 'bytes'"
        )
        assert not made.store.knows(1, 1), "nothing of the sub-epoch is published"
        made.perform(train(2, 1, 1, uncut=True))
        made.check(1, made.result())


def test_an_attempt_that_is_cancelled_takes_its_audit_along() -> None:
    with audited(ByteTrials(SIZES, seconds=0.01), [4500]) as made:
        attempts = chosen(made)
        made.begin(2)
        made.state.wait_until(lambda: len(made.state.added) == 3)
        (first, *_) = attempts
        made.trainer.cancel(first)
        result = made.result()
        assert result.attempt == 1 - first
        made.check(1 - first, result)
        assert not made.store.knows(first, 1)


@contextmanager
def room_that_waits(made: QueueBench) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Let room for an audit of trial 0 be found late, as if a disk were slow.

    Yield what is set when it is looked for, and what lets it be found.
    """
    looked, found = threading.Event(), threading.Event()
    is_due, has_room = made.audits.is_due, made.store.segments.has_room
    made.audits.is_due = lambda visit, unit: visit.task.trial == 0 and is_due(visit, unit)

    def waits(nbytes: int) -> bool:
        looked.set()
        assert found.wait(SECONDS)
        return has_room(nbytes)

    made.store.segments.has_room = waits
    try:
        yield looked, found
    finally:
        found.set()


def test_other_trials_train_on_while_room_for_an_audit_is_made() -> None:
    with audited(ByteTrials(SIZES), [4500, 4500]) as made, room_that_waits(made) as (_, found):
        made.begin(2)
        made.check(1, made.result())
        found.set()
        result = made.result()
        made.check(0, result)
        assert result.audit_seconds > 0


@pytest.mark.parametrize("dies", [False, True])
def test_a_run_ends_or_begins_anew_while_room_for_its_audit_is_made(dies: bool) -> None:
    with audited(ByteTrials(SIZES)) as made, room_that_waits(made) as (looked, found):
        made.begin(1)
        assert looked.wait(SECONDS)
        looked.clear()
        if dies:
            made.devices[-1].close()
            restarted = VisitRestarted(made.state.added[0].visit)
            made.state.wait_until(lambda: restarted in made.state.given)
        else:
            made.trainer.cancel(0)
            made.state.wait_until(lambda: not made.state.visits)
            made.perform(train(1, 0, 1))
        found.set()
        result = made.result()
        made.check(0, result)
        assert looked.is_set() and result.audit_seconds > 0


@pytest.mark.parametrize("error", [MemoryError("no memory"), ScratchFull("no disk")])
def test_a_copy_that_finds_no_memory_costs_the_trial_nothing(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_copies(monkeypatch, error)
    with audited(ByteTrials(SIZES), [4500]) as made:
        made.begin(1)
        result = made.result()
        made.check(0, result)
        assert result.audit_seconds > 0, "the first step is audited, from the state before it"
    assert caplog.messages.count(
        "trial 0 is audited by the first step of a sub-epoch on worker 0, for want of room for a "
        f"copy: {error}"
    )


def test_an_audit_that_hangs_fails_its_trial_alone() -> None:
    trials = ByteTrials(SIZES, faults={0: "hangs audited"})
    with audited(trials, batch_seconds=0.3) as made:
        made.begin(2)
        results = made.results(2)
        assert isinstance(results[0], events.TaskFailed)
        assert re.match(
            r"its audit takes too long \(audit_share=0 makes none\): a batch took \d\.\d s, longer "
            r"than 10 times batch_seconds=0.3, in training of epoch 1 on partition 0 \(worker 0\)",
            results[0].error,
        )
        assert not made.store.knows(0, 1)
        made.check(1, results[1])


def test_an_audit_whose_device_dies_is_not_taken_from_another_state(tmp_path: Path) -> None:
    lethal = tmp_path / "now"
    lethal.touch()
    trials = ByteTrials(SIZES, seconds=0.01, lethal=str(lethal), faults={0: "dies audited"})
    with audited(trials, [None, None]) as made:
        made.begin(1)
        made.check(0, made.result())
        assert not lethal.exists()
