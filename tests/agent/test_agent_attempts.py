"""What a task does when it is taken back, or what it needs can't be had."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.queue_worker import ME
from cerebro_hydra.agent.device.messages import FailureKind
from cerebro_hydra.errors import NonFiniteLoss, ScratchFull, StepDiffers, TransferError
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.instructions import FetchShards, StartSubEpoch, StateSource
from cerebro_hydra.storage.digest import digest
from tests.agent.byte_visits import ByteTrials, gradient_of
from tests.agent.queues.queue_bench import BATCH, QueueBench
from tests.agent.standins import SECONDS, Peer

STATE = 3
TASK = StartSubEpoch(7, 0, STATE, 1, (0,), 0, ME, StateSource(STATE - 1, "a"), {})


class Bench:
    """A worker that computes on this thread, and fetches from peer "a"; a state 3 is at "b"."""

    def __init__(self, **hooks: Callable[[], object]) -> None:
        self.peers = {"uri-a": Peer(1), "uri-b": Peer(9)}
        self.peers["uri-a"].answer.set()
        hooks = {"cancelled": lambda: self.worker.reported.put("cancelled"), **hooks}
        calls = {name: lambda trial, hook=hook: hook() for name, hook in hooks.items()}
        connect: Any = lambda uri: self.peers[uri].lent()  # noqa: E731
        trials = ByteTrials((8,), hooks=calls)
        self.worker = QueueBench(trials, place="main", rows=BATCH, connect=connect)
        self.store, self.trainer = self.worker.store, self.worker.trainer

    def perform(self) -> Any:
        """Carry the task out on this thread until it is reported or cancelled."""
        self.worker.perform(TASK, "uri-a")
        return self.worker.result()

    def trainable(self, state: int) -> list[int]:
        return self.store.wait(0, state, 0).segments["trainable"][1].tolist()

    def bring_redone_state(self) -> Peer:
        """What the coordinator does after a redo: the same visit was made again elsewhere."""
        self.trainer.prefetch(FetchShards(0, 0, ME, StateSource(STATE, "b")), "uri-b")
        return self.peers["uri-b"]


@pytest.fixture
def made() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**hooks: Callable[[], object]) -> Bench:
        benches.append(Bench(**hooks))
        return benches[-1]

    yield make
    for bench in benches:
        bench.worker.close()


def test_a_task_is_trained_and_published(made: Callable[..., Bench]) -> None:
    bench = made()
    assert isinstance(bench.perform(), events.SubEpochDone)
    before = np.full(8, 1, np.uint8)
    assert bench.trainable(STATE) == (before + gradient_of(before, 0)).tolist()
    assert bench.trainable(STATE - 1) == before.tolist(), "it is kept as it was"
    for state in (STATE - 1, STATE):
        named, buffer = bench.store.wait(0, state, 0).segments["trainable"]
        assert digest(buffer) == named


def test_a_task_is_told_of_before_the_trials_code_runs_on_the_thread_for_it(
    made: Callable[..., Bench],
) -> None:
    ran: list[Any] = []

    def note() -> None:
        ran.append((threading.current_thread(), list(bench.worker.begun)))

    bench = made(factory=note, forward=note)
    bench.perform()
    assert ran == [(threading.main_thread(), [TASK.attempt])] * 2


def test_a_fetch_that_fails_before_the_task_waits_for_it_is_reported(
    made: Callable[..., Bench],
) -> None:
    bench = made(factory=lambda: bench.peers["uri-a"].left.wait(SECONDS))
    bench.peers["uri-a"].error = ValueError("the object is damaged")
    failed = bench.perform()
    assert isinstance(failed, events.TransferFailed)
    assert failed.error == "the object is damaged"


def test_a_task_that_is_taken_back_after_its_end_leaves_nothing(made: Callable[..., Bench]) -> None:
    bench = made()
    bench.perform()
    assert bench.store.whole(0, STATE)
    bench.trainer.cancel(TASK.attempt)
    bench.worker.settle()
    assert not bench.store.knows(0, STATE)
    peer = bench.bring_redone_state()
    peer.answer.set()
    assert bench.trainable(STATE) == [peer.fill] * 8


def test_a_task_that_is_taken_back_spares_the_state_that_came_instead(
    made: Callable[..., Bench],
) -> None:
    def redo() -> None:
        bench.trainer.cancel(TASK.attempt)
        bench.worker.settle()
        assert bench.bring_redone_state().asked.wait(SECONDS)

    bench = made(forward=redo)
    assert bench.perform() == "cancelled"
    assert not bench.store.whole(0, STATE)
    peer = bench.peers["uri-b"]
    peer.answer.set()
    assert peer.left.wait(SECONDS)
    assert bench.trainable(STATE) == [peer.fill] * 8


def test_attempts_that_were_taken_back_are_forgotten_when_they_are_done(
    made: Callable[..., Bench],
) -> None:
    bench = made(forward=lambda: bench.trainer.cancel(TASK.attempt))
    assert bench.perform() == "cancelled"
    bench.trainer.cancel(TASK.attempt)
    bench.trainer.cancel(TASK.attempt + 1)
    bench.worker.settle()
    assert bench.worker.reported.empty()
    assert not bench.store.knows(0, STATE)
    assert not bench.worker.state.visits


def test_stopping_ends_a_task_that_waits(made: Callable[..., Bench]) -> None:
    def stop_once_it_waits() -> None:
        assert bench.peers["uri-a"].asked.wait(SECONDS)
        bench.trainer.stop()

    bench = made()
    bench.peers["uri-a"].answer.clear()
    threading.Thread(target=stop_once_it_waits).start()
    with pytest.raises(queue.Empty):
        bench.perform()
    bench.peers["uri-a"].answer.set()


@pytest.mark.parametrize(
    "error", [SystemExit(1), GeneratorExit(), RuntimeError("no"), TransferError("mine")]
)
def test_what_user_code_raises_ends_the_task_alone(
    made: Callable[..., Bench], error: BaseException
) -> None:
    def build() -> None:
        raise error

    failed = made(factory=build).perform()
    assert isinstance(failed, events.TaskFailed | events.TransferFailed)


def test_what_changes_after_it_was_published_is_not_told_as_the_state_of_the_trial(
    made: Callable[..., Bench],
) -> None:
    """As by a backward hook that writes to a buffer of a shard whose update is over."""

    def write() -> None:
        bench.store.wait(0, STATE, 0).segments["trainable"][1][0] += 1

    bench = made(closed=write)
    failed = bench.perform()
    assert isinstance(failed, events.AuditFailed)
    assert "the bytes of shards [0] changed after they were published" in failed.difference
    bench.worker.settle()
    assert not bench.store.knows(0, STATE)


# ---------------------------------------------------------------------- kinds of failures


class Unreachable(TransferError):
    """Says more than its base."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TransferError("gone"), FailureKind.TRANSFER),
        (Unreachable("gone"), FailureKind.TRANSFER),
        (StepDiffers("at step 7"), FailureKind.DIFFERENCE),
        (NonFiniteLoss("nan"), FailureKind.NON_FINITE_LOSS),
        (ScratchFull("disk"), FailureKind.SCRATCH_FULL),
        (type("TransferError", (Exception,), {})("a user's own"), FailureKind.OTHER),
        (SystemExit(1), FailureKind.OTHER),
    ],
)
def test_an_exception_has_a_kind(error: BaseException, kind: FailureKind) -> None:
    assert FailureKind.of(error) is kind
