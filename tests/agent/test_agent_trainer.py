"""What a task does when it is taken back, or what it needs can't be had."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cerebro_hydra.agent.audits import Audits
from cerebro_hydra.agent.device.device import Lane
from cerebro_hydra.agent.device.process import own_start
from cerebro_hydra.agent.device.task_watch import BatchSeconds, TaskWatch
from cerebro_hydra.agent.memory.fetch import FetchManager
from cerebro_hydra.agent.queue_trainer import QueueTrainer
from cerebro_hydra.agent.visits import RunPlanner
from cerebro_hydra.errors import TransferError
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.instructions import FetchShards, StartSubEpoch, StateSource
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.storage.digest import digest
from tests.agent.standins import SECONDS, Peer, StandInTrials, empty_store

VISIT = 3
TASK = StartSubEpoch(7, 0, VISIT, 1, 0, 0, "me", StateSource(VISIT - 1, "a"), {})


class Bench:
    """A worker with one device of its own, whose source is peer "a"; another state 3 is at "b"."""

    def __init__(self, **hooks: Callable[[], object]) -> None:
        self.shard_store = empty_store()
        self.peers = {"uri-a": Peer(1), "uri-b": Peer(9)}
        self.peers["uri-a"].answer.set()
        self.reported: list[events.Event] = []
        self.begun: list[int] = []
        folder: Any = None
        connect: Any = lambda uri: self.peers[uri].lent()  # noqa: E731
        self.fetch_manager = FetchManager(
            "me", self.shard_store, folder, connect, lambda trial, visit: None
        )
        self.lane = Lane("main")
        planner = RunPlanner(lambda split, partition: 5, None, resident=True)
        start = own_start(StandInTrials(**hooks), self.lane, True, os.abort, self.begun.append)
        known_seconds = BatchSeconds()
        self.state = WorkerState([None], None, planner.rule, double_buffering=False)
        self.trainer = QueueTrainer(
            "me",
            [start],
            self.state,
            planner,
            self.shard_store,
            self.fetch_manager,
            self._report,
            lambda record: None,
            lambda attempt: None,
            Audits(0.0),
            self._report,
            tempfile.gettempdir(),
            partial(TaskWatch, None, None, print, known_seconds),
            known_seconds,
        )
        self.shard_store.on_change = self.trainer.look_again
        spec: Any = SimpleNamespace(
            trial=0, shards=[None], batch_size=5, accumulate=1, recompute=None, schedule="sharp"
        )
        self.trainer.learn(spec)
        self.trainer.start()

    def _report(self, event: Any) -> None:
        if not isinstance(event, events.SubEpochEnding):
            self.reported.append(event)
            self.lane.close()

    def perform(self) -> None:
        """Carry a task out on this thread until it was reported."""
        self.trainer.accept(TASK.attempt)
        self.trainer.perform(TASK, "uri-a")
        overdue = threading.Timer(SECONDS, os.abort)
        overdue.start()
        self.lane.run()
        overdue.cancel()

    def settle(self) -> None:
        """Wait until the worker has done what it was told."""
        done = threading.Event()
        self.trainer._loop.put(done.set)
        assert done.wait(SECONDS)

    def bring_redone_state(self) -> Peer:
        """What the coordinator does after a redo: the same visit was made again elsewhere."""
        self.trainer.prefetch(FetchShards(0, 0, "me", StateSource(VISIT, "b")), "uri-b")
        return self.peers["uri-b"]

    @property
    def outcome(self) -> events.Event:
        return self.reported[-1]


@pytest.fixture
def made() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**hooks: Callable[[], object]) -> Bench:
        benches.append(Bench(**hooks))
        return benches[-1]

    yield make
    for bench in benches:
        bench.trainer.close()


def test_a_task_is_trained_and_published(made: Callable[..., Bench]) -> None:
    bench = made()
    bench.perform()
    assert isinstance(bench.outcome, events.SubEpochDone)
    assert bench.shard_store.wait(0, VISIT, 0).segments["trainable"][1][0] == 2


def test_a_task_is_told_of_before_the_trials_code_runs(made: Callable[..., Bench]) -> None:
    bench = made(build=lambda: bench.begun.append(-1))
    bench.perform()
    assert bench.begun == [TASK.attempt, -1]


def test_the_state_before_is_kept_as_it_was(made: Callable[..., Bench]) -> None:
    bench = made()
    bench.perform()
    before, after = (bench.shard_store.wait(0, visit, 0) for visit in (VISIT - 1, VISIT))
    assert before.segments["trainable"][1].tolist() == [1] * 8
    for state in (before, after):
        named, buffer = state.segments["trainable"]
        assert digest(buffer) == named


def test_a_fetch_that_fails_before_the_task_waits_for_it_is_reported(
    made: Callable[..., Bench],
) -> None:
    bench = made(build=lambda: bench.peers["uri-a"].left.wait(SECONDS))
    bench.peers["uri-a"].error = ValueError("the object is damaged")
    bench.perform()
    assert isinstance(bench.outcome, events.TransferFailed)
    assert bench.outcome.error == "the object is damaged"


def test_a_task_that_is_taken_back_after_its_end_leaves_nothing(made: Callable[..., Bench]) -> None:
    bench = made()
    bench.perform()
    assert bench.shard_store.whole(0, VISIT)
    bench.trainer.cancel(TASK.attempt)
    bench.settle()
    assert not bench.shard_store.knows(0, VISIT)
    peer = bench.bring_redone_state()
    peer.answer.set()
    assert bench.shard_store.wait(0, VISIT, 0).segments["trainable"][1][0] == peer.fill


def test_a_task_that_is_taken_back_spares_the_state_that_came_instead(
    made: Callable[..., Bench],
) -> None:
    def redo() -> None:
        bench.trainer.cancel(TASK.attempt)
        bench.settle()
        peer = bench.bring_redone_state()
        assert peer.asked.wait(SECONDS)
        bench.lane.close()

    bench = made(train=redo)
    bench.perform()
    assert not bench.shard_store.whole(0, VISIT)
    peer = bench.peers["uri-b"]
    peer.answer.set()
    assert peer.left.wait(SECONDS)
    assert bench.shard_store.wait(0, VISIT, 0).segments["trainable"][1][0] == peer.fill
    assert bench.reported == []


def test_stopping_ends_a_task_that_waits(made: Callable[..., Bench]) -> None:
    bench = made(build=lambda: threading.Timer(0.1, bench.trainer.stop).start())
    bench.peers["uri-a"].answer.clear()
    bench.perform()
    assert bench.reported == []


def test_a_trials_code_runs_on_the_thread_that_the_agent_gives_to_it(
    made: Callable[..., Bench],
) -> None:
    threads = []
    note = lambda: threads.append(threading.current_thread())  # noqa: E731
    bench = made(build=note, train=note)
    bench.perform()
    assert threads == [threading.main_thread()] * 2


@pytest.mark.parametrize("error", [SystemExit(1), RuntimeError("no"), TransferError("mine")])
def test_what_user_code_raises_ends_the_task_alone(
    made: Callable[..., Bench], error: BaseException
) -> None:
    def build() -> None:
        raise error

    bench = made(build=build)
    bench.perform()
    assert len(bench.reported) == 1
