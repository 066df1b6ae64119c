"""What a task does when it is taken back, or what it needs can't be had."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from cerebro_hydra.agent.device.task_watch import TaskWatch
from cerebro_hydra.agent.memory.fetch import FetchManager
from cerebro_hydra.agent.trainer import Trainer
from cerebro_hydra.errors import TransferError
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.instructions import FetchShards, StartSubEpoch, StateSource
from cerebro_hydra.storage.digest import digest
from tests.agent.standins import SECONDS, Peer, StandInBuilder, empty_store

VISIT = 3
TASK = StartSubEpoch(7, 0, VISIT, 1, 0, 0, "me", StateSource(VISIT - 1, "a"), {})


class Bench:
    """A trainer whose source is peer "a"; another state 3 is at peer "b"."""

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
        builder: Any = StandInBuilder(**hooks)
        self.trainer = Trainer(
            "me",
            builder,
            self.shard_store,
            self.fetch_manager,
            self.reported.append,
            lambda record: None,
            self.begun.append,
            TaskWatch(None, None, print, print),
        )

    def perform(self) -> None:
        self.trainer.accept(TASK.attempt)
        main = threading.Thread(target=self.trainer.perform, args=(TASK, "uri-a"), daemon=True)
        main.start()
        main.join(SECONDS)
        assert not main.is_alive(), "the task did not end"

    def bring_redone_state(self) -> Peer:
        """What the coordinator does after a redo: the same visit was made again elsewhere."""
        self.trainer.prefetch(FetchShards(0, 0, "me", StateSource(VISIT, "b")), "uri-b")
        return self.peers["uri-b"]

    @property
    def outcome(self) -> events.Event:
        return self.reported[-1]


def test_a_task_is_trained_and_published() -> None:
    bench = Bench()
    bench.perform()
    assert isinstance(bench.outcome, events.SubEpochDone)
    assert bench.shard_store.wait(0, VISIT, 0).segments["trainable"][1][0] == 2


def test_a_task_is_told_of_before_the_trials_code_runs() -> None:
    bench = Bench(build=lambda: bench.begun.append(-1))
    bench.perform()
    assert bench.begun == [TASK.attempt, -1]


def test_the_state_before_is_kept_as_it_was() -> None:
    bench = Bench()
    bench.perform()
    before, after = (bench.shard_store.wait(0, visit, 0) for visit in (VISIT - 1, VISIT))
    assert before.segments["trainable"][1].tolist() == [1] * 8
    for state in (before, after):
        named, buffer = state.segments["trainable"]
        assert digest(buffer) == named


def test_a_fetch_that_fails_before_the_task_waits_for_it_is_reported() -> None:
    bench = Bench(build=lambda: bench.peers["uri-a"].left.wait(SECONDS))
    bench.peers["uri-a"].error = ValueError("the object is damaged")
    bench.perform()
    assert isinstance(bench.outcome, events.TransferFailed)
    assert bench.outcome.error == "the object is damaged"


def test_a_task_that_is_taken_back_after_its_end_leaves_nothing() -> None:
    bench = Bench()
    bench.perform()
    assert bench.shard_store.whole(0, VISIT)
    bench.trainer.cancel(TASK.attempt)
    assert not bench.shard_store.knows(0, VISIT)
    peer = bench.bring_redone_state()
    peer.answer.set()
    assert bench.shard_store.wait(0, VISIT, 0).segments["trainable"][1][0] == peer.fill


def test_a_task_that_is_taken_back_spares_the_state_that_came_instead() -> None:
    def redo() -> None:
        bench.trainer.cancel(TASK.attempt)
        peer = bench.bring_redone_state()
        assert peer.asked.wait(SECONDS)

    bench = Bench(train=redo)
    bench.perform()
    assert not bench.shard_store.whole(0, VISIT)
    peer = bench.peers["uri-b"]
    peer.answer.set()
    assert peer.left.wait(SECONDS)
    assert bench.shard_store.wait(0, VISIT, 0).segments["trainable"][1][0] == peer.fill


def test_stopping_ends_a_task_that_waits() -> None:
    bench = Bench(build=lambda: threading.Timer(0.1, bench.trainer.stop).start())
    bench.peers["uri-a"].answer.clear()
    bench.perform()
    assert bench.reported == []


@pytest.mark.parametrize("error", [SystemExit(1), RuntimeError("no"), TransferError("mine")])
def test_what_user_code_raises_ends_the_task_alone(error: BaseException) -> None:
    def build() -> None:
        raise error

    bench = Bench(build=build)
    bench.trainer.perform(TASK, "uri-a")
    assert len(bench.reported) == 1
