"""A device dies while the host still moves shards of its run: whatever is late changes no byte."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cerebro_hydra.agent.memory.segment_store import SegmentStore
from cerebro_hydra.agent.memory.shard_store import Shard, ShardHome, ShardStore, State
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.events import RunRestarted
from cerebro_hydra.testing.queue_worker import evaluate
from tests.agent.byte_runs import ByteTrials
from tests.agent.queues.queue_bench import QueueBench, bench
from tests.agent.queues.test_agent_queue_trainer import SIZES, assert_trained, begin, end
from tests.agent.standins import SECONDS

BYTES = sum(size + size // 2 for size in SIZES)  # of a state
HOST_THREADS = 4


@contextmanager
def busy_host(made: QueueBench) -> Iterator[None]:
    """Keep the threads that move shards within the host busy."""
    over = threading.Event()
    for _ in range(HOST_THREADS):
        made.trainer._host._threads.submit(over.wait)
    try:
        yield
    finally:
        over.set()


def given(made: QueueBench, kind: ActionKind, device: int | None) -> int:
    """Return how often the queues gave an action of a kind."""
    actions = [each for each in made.state.given if isinstance(each, Action)]
    return sum((each.kind, each.device) == (kind, device) for each in actions)


def restarted(made: QueueBench) -> bool:
    return any(isinstance(each, RunRestarted) for each in made.state.given)


def result_of_a_loss(made: QueueBench, asked: threading.Event, over: threading.Event) -> Any:
    """Let the device die while the host is in the middle of its work; return what came of it."""
    assert asked.wait(SECONDS)
    made.devices[-1].close()
    made.state.wait_until(lambda: restarted(made))
    over.set()
    return made.result()


def test_a_write_back_that_waits_while_its_device_dies_is_no_error() -> None:
    trials = ByteTrials(SIZES, seconds=0.01)
    with bench(trials, len(SIZES), [4500], recompute=True) as made:
        begin(made, trials, 1)
        made.state.wait_for_tasks(20)
        with busy_host(made):
            spills = given(made, ActionKind.SPILL, 0)
            made.state.wait_until(lambda: given(made, ActionKind.SPILL, 0) > spills)
            made.devices[-1].close()
            made.state.wait_until(lambda: restarted(made))
        end(made, trials, 1)


def test_a_shard_that_is_published_while_its_run_begins_anew_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials = ByteTrials(SIZES, seconds=0.02)
    asked, over = threading.Event(), threading.Event()
    published, put, states = ShardHome.published, ShardStore.put, list[State]()

    def late(home: ShardHome) -> object:
        asked.set()
        assert over.wait(SECONDS)
        return published(home)

    def noted(store: ShardStore, state: State, number: int, shard: Shard) -> None:
        states.append(state)
        put(store, state, number, shard)

    monkeypatch.setattr(ShardHome, "published", late)
    monkeypatch.setattr(ShardStore, "put", noted)
    with bench(trials, len(SIZES), [None], recompute=True) as made:
        begin(made, trials, 1)
        result = result_of_a_loss(made, asked, over)
        assert_trained(made, trials, 0, result, trials.initial(0))
        assert result.nbytes == BYTES
        assert len(set(map(id, states))) == 3, "the state before, one that is void, and its like"


def test_a_device_that_dies_while_there_is_no_memory_for_its_changes_ends_no_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials = ByteTrials(SIZES)
    with bench(trials, len(SIZES), [4500], recompute=True) as made:
        asked, over = threading.Event(), threading.Event()
        allocate = SegmentStore.allocate

        def lacking(segments: SegmentStore, nbytes: int) -> object:
            if made.state.tasks:
                asked.set()
                assert over.wait(SECONDS)
                raise MemoryError("there is no room")
            return allocate(segments, nbytes)

        monkeypatch.setattr(SegmentStore, "allocate", lacking)
        begin(made, trials, 1)
        result = result_of_a_loss(made, asked, over)
        assert isinstance(result, events.TaskFailed)
        assert "there is no room" in result.error
        monkeypatch.undo()
        begin(made, trials, 2)
        results = [made.result() for _ in range(2)]
        assert all(isinstance(each, events.SubEpochDone) for each in results), results


def test_a_run_that_is_over_ends_its_devices_whatever_its_loop_does() -> None:
    trials = ByteTrials(SIZES, hanging=frozenset({0}))
    with bench(trials, len(SIZES), [4500, 4500]) as made:
        begin(made, trials, 1)
        made.state.wait_for_tasks(1)
        busy = threading.Event()
        made.trainer._loop.put(lambda: busy.wait(SECONDS))
        pids = [os.pidfd_open(device.pid) for device in made.devices]
        made.trainer.stop()
        ended = [select.select([pid], [], [], SECONDS / 2)[0] == [pid] for pid in pids]
        busy.set()
        assert ended == [True, True]
        for pid in pids:
            os.close(pid)


def test_code_that_ends_the_process_at_the_end_of_an_evaluation_ends_its_trial_alone() -> None:
    trials = ByteTrials(SIZES, always_lethal={1: "closed"})
    with bench(trials, len(SIZES), [4500, 4500]) as made:
        for trial in range(2):
            made.put(trial, 0, trials.initial(trial))
            made.perform(evaluate(trial, trial, 0))
        results = {result.attempt: result for result in (made.result(), made.result())}
    assert isinstance(results[0], events.EvaluationDone)
    assert isinstance(results[1], events.TaskFailed)
    assert "ended the process of a device 3 times" in results[1].error
