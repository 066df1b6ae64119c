"""The queues of a worker audit steps: real devices and queues, with trials that are bytes."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.agent import audits
from cerebro_hydra.agent.device.messages import Done, RunOrder
from cerebro_hydra.agent.memory.segment_store import SegmentStore
from cerebro_hydra.errors import ScratchFull
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.events import RunRestarted
from cerebro_hydra.shards.engine.layout import Segments
from cerebro_hydra.testing.queue_worker import train
from tests.agent.byte_runs import ByteRun, ByteTrials
from tests.agent.queues.queue_bench import QueueBench, bench
from tests.agent.queues.test_agent_queue_trainer import (
    MICROBATCHES,
    SIZES,
    assert_trained,
    begin,
)
from tests.agent.standins import SECONDS

audited = partial(bench, audit_share=0.01)


def long_trained(made: QueueBench) -> None:
    """Let audits be allowed."""
    made.audits.budget.trained = 1e6


@pytest.mark.parametrize("window", [1, 3])
def test_audits_of_several_trials_change_no_byte(window: int) -> None:
    trials = ByteTrials(SIZES, window)
    need = trials.profile(0).training(0, 1, window, True).device_need
    with audited(trials, len(SIZES), [need, need], 2 * need, window=window) as made:
        long_trained(made)
        begin(made, trials, 3)
        for _ in range(3):
            result = made.result()
            assert_trained(made, trials, result.attempt, result, trials.initial(result.attempt))
            assert result.audit_seconds > 0


def test_a_device_that_dies_meanwhile_changes_no_byte() -> None:
    trials = ByteTrials(SIZES, seconds=0.004)
    with audited(trials, len(SIZES), [4500, 4500]) as made:
        long_trained(made)
        begin(made, trials, 3)
        for done in (10, 60):
            made.state.wait_for_tasks(done)
            made.devices[-1].close()
        for _ in range(3):
            result = made.result()
            assert_trained(made, trials, result.attempt, result, trials.initial(result.attempt))


def at_step(made: QueueBench, step: int) -> None:
    """Let no other step of a run be audited, unless it is the first one that can be."""
    is_due = made.audits.is_due
    made.audits.is_due = lambda run: run.begun_windows == step and is_due(run)


@pytest.mark.parametrize("step", [1, 5, MICROBATCHES - 1])
@pytest.mark.parametrize("recompute", [True, False])
def test_a_trial_that_trains_otherwise_from_a_step_on_is_told_and_trained_uncut(
    step: int, recompute: bool
) -> None:
    trials = ByteTrials(SIZES, seconds=0.02, wrong=frozenset({1}), wrong_from=step)
    budgets = [4500, 4500] if recompute else [None]
    with audited(trials, len(SIZES), budgets, recompute=recompute) as made:
        long_trained(made)
        at_step(made, step)
        begin(made, trials, 2)
        results = {result.attempt: result for result in (made.result(), made.result())}
        assert_trained(made, trials, 0, results[0], trials.initial(0))
        assert isinstance(results[1], events.AuditFailed)
        assert results[1].difference == (
            f"at step {step}, in epoch 1 on partition 0 (worker 0): parameter 'bytes'"
        )
        assert not made.store.knows(1, 1), "nothing of the sub-epoch is published"
        made.perform(train(2, 1, 1, uncut=True))
        assert_trained(made, trials, 1, made.result(), trials.initial(1))


def test_without_audits_it_is_not_found() -> None:
    trials = ByteTrials(SIZES, wrong=frozenset({0}))
    with bench(trials, len(SIZES)) as made:
        long_trained(made)
        begin(made, trials, 1)
        done = made.result()
        assert isinstance(done, events.SubEpochDone)
        assert done.audit_seconds == 0.0
        with pytest.raises(AssertionError):
            assert_trained(made, trials, 0, done, trials.initial(0))


def test_audits_wait_until_training_has_taken_long_enough() -> None:
    trials = ByteTrials(SIZES, seconds=0.001)
    with audited(trials, len(SIZES)) as made:
        begin(made, trials, 1)
        assert made.result().audit_seconds == 0.0
        assert made.audits.budget.trained > 0.0


def test_a_trial_that_cannot_be_built_again_is_told_once_and_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trials = ByteTrials(SIZES, unauditable=frozenset({0}))
    with audited(trials, len(SIZES), [4500]) as made:
        long_trained(made)
        begin(made, trials, 1)
        assert_trained(made, trials, 0, made.result(), trials.initial(0))
        made.perform(train(1, 0, 2))
        assert isinstance(made.result(), events.SubEpochDone)
    (line,) = [r.getMessage() for r in caplog.records if r.name == audits.__name__]
    assert line == "trial 0 is no longer audited on worker 0: OSError: the hub is gone"


def test_an_attempt_that_is_cancelled_takes_its_audit_along() -> None:
    trials = ByteTrials(SIZES, seconds=0.01)
    with audited(trials, len(SIZES), [4500]) as made:
        long_trained(made)
        begin(made, trials, 2)
        made.state.wait_until(lambda: len(made.state.added) == 3)
        first = next(run for run in made.trainer._runs.values() if run.audits).task.attempt
        made.trainer.cancel(first)
        result = made.result()
        assert result.attempt == 1 - first
        assert_trained(made, trials, 1 - first, result, trials.initial(1 - first))
        assert not made.store.knows(first, 1)


@contextmanager
def room_that_waits(made: QueueBench) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Let room for an audit of trial 0 be found late, as if a disk were slow.

    Yield what is set when it is looked for, and what lets it be found.
    """
    looked, found = threading.Event(), threading.Event()
    is_due, has_room = made.audits.is_due, made.store.segments.has_room
    made.audits.is_due = lambda run: run.task.trial == 0 and is_due(run)

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
    trials = ByteTrials(SIZES)
    with audited(trials, len(SIZES), [4500, 4500]) as made, room_that_waits(made) as (_, found):
        long_trained(made)
        begin(made, trials, 2)
        result = made.result()
        assert_trained(made, trials, 1, result, trials.initial(1))
        found.set()
        result = made.result()
        assert_trained(made, trials, 0, result, trials.initial(0))
        assert result.audit_seconds > 0


@pytest.mark.parametrize("dies", [False, True])
def test_a_run_ends_or_begins_anew_while_room_for_its_audit_is_made(dies: bool) -> None:
    trials = ByteTrials(SIZES)
    with audited(trials, len(SIZES), [None]) as made, room_that_waits(made) as (looked, found):
        long_trained(made)
        begin(made, trials, 1)
        assert looked.wait(SECONDS)
        looked.clear()
        if dies:
            made.devices[-1].close()
            restarted = RunRestarted(made.state.added[0].run)
            made.state.wait_until(lambda: restarted in made.state.given)
        else:
            made.trainer.cancel(0)
            made.state.wait_until(lambda: not made.state.runs)
            made.perform(train(1, 0, 1))
        found.set()
        result = made.result()
        assert_trained(made, trials, 0, result, trials.initial(0))
        assert looked.is_set() and result.audit_seconds > 0


@pytest.mark.parametrize("error", [MemoryError("no memory"), ScratchFull("no disk")])
def test_a_copy_that_finds_no_memory_costs_the_trial_nothing(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_copies(monkeypatch, error)
    trials = ByteTrials(SIZES)
    with audited(trials, len(SIZES), [4500]) as made:
        long_trained(made)
        begin(made, trials, 1)
        result = made.result()
        assert_trained(made, trials, 0, result, trials.initial(0))
        assert result.audit_seconds > 0, "the first step is audited, from the state before it"
    assert caplog.messages.count(
        "trial 0 is audited by the first step of a sub-epoch on worker 0, for want of room for a "
        f"copy: {error}"
    )


def refuse_copies(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let memory that has room for an audit's copies refuse them all the same."""
    looking: set[int] = set()
    has_room, allocate = SegmentStore.has_room, SegmentStore.allocate

    def asked(self: SegmentStore, nbytes: int) -> bool:
        looking.add(threading.get_ident())
        return has_room(self, nbytes)

    def refused(self: SegmentStore, nbytes: int) -> Any:
        if threading.get_ident() in looking:
            looking.clear()
            raise error
        return allocate(self, nbytes)

    monkeypatch.setattr(SegmentStore, "has_room", asked)
    monkeypatch.setattr(SegmentStore, "allocate", refused)


@dataclass(frozen=True)
class HangingAudits(ByteTrials):
    """Trials whose uncut model never returns in the audit of trial 0."""

    def open(self, order: RunOrder) -> ByteRun:
        run = super().open(order)
        if order.audits is not None and order.task.trial == 0:
            run.perform = lambda task, then=None: threading.Event().wait()  # type: ignore[method-assign]
        return run


def test_an_audit_that_hangs_fails_its_trial_alone() -> None:
    trials = HangingAudits(SIZES)
    with audited(trials, len(SIZES), [None], batch_seconds=0.3) as made:
        long_trained(made)
        begin(made, trials, 2)
        results = {result.attempt: result for result in (made.result(), made.result())}
        assert isinstance(results[0], events.TaskFailed)
        assert re.match(
            r"its audit takes too long \(audit_share=0 makes none\): a batch took \d\.\d s, longer "
            r"than 10 times batch_seconds=0.3, in training of epoch 1 on partition 0 \(worker 0\)",
            results[0].error,
        )
        assert not made.store.knows(0, 1)
        assert_trained(made, trials, 1, results[1], trials.initial(1))


@dataclass(frozen=True)
class DyingAudits(ByteTrials):
    """Trials whose uncut model ends its device's process once, with a step half done.

    As the shards of models, theirs take the step that they are asked for, whatever it was before.

    Args:
        lethal_audit: a file that is there until then.
    """

    lethal_audit: str = ""

    def open(self, order: RunOrder) -> ByteRun:
        run = super().open(order)
        if order.audits is not None:
            load, perform = run.load, run.perform

            def loads(shard: int, slots: Segments, cursor: Any) -> None:
                load(shard, slots, {"step": order.first_step})

            def dies(task: Action, then: Any = None) -> Done:
                if task.kind is ActionKind.U and Path(self.lethal_audit).exists():
                    os.unlink(self.lethal_audit)
                    os._exit(1)
                return perform(task)

            run.load, run.perform = loads, dies  # type: ignore[method-assign]
        return run


def test_an_audit_whose_device_dies_is_not_taken_from_another_state(tmp_path: Path) -> None:
    lethal = tmp_path / "now"
    lethal.touch()
    trials = DyingAudits(SIZES, seconds=0.01, lethal_audit=str(lethal))
    with audited(trials, len(SIZES), [None, None]) as made:
        long_trained(made)
        begin(made, trials, 1)
        result = made.result()
        assert_trained(made, trials, 0, result, trials.initial(0))
        assert not lethal.exists()
