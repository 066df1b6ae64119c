"""Devices whose tasks are waits work side by side, and count the steps that they took."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.queue_worker import DelayMemory, DelayTrials, train
from cerebro_hydra.plan.messages import events
from tests.agent.queues.queue_bench import QueueBench, bench, spec_of

ROWS, BATCH, DEVICES, FORWARD, NBYTES = 12, 4, 4, 0.03, 100_000


def sub_epochs(made: QueueBench, state: int) -> float:
    """Train every trial from one visit to the next, and return the seconds."""
    begun = time.monotonic()
    for trial in range(DEVICES):
        made.perform(train(10 * state + trial, trial, state))
    for _ in range(DEVICES):
        assert isinstance(made.result(), events.SubEpochDone)
    return time.monotonic() - begun


def test_four_devices_train_four_trials_at_the_same_time() -> None:
    numbers = range(DEVICES)
    trials = DelayTrials(3, dict.fromkeys(numbers, NBYTES), dict.fromkeys(numbers, FORWARD))
    tasks = ROWS // BATCH * trials.shards
    alone = tasks * FORWARD * (1 + trials.backward)
    budgets = [2 * NBYTES] * DEVICES
    spec = spec_of(trials.shards, batch_size=BATCH)
    with bench(trials, budgets, spec=spec, rows=ROWS) as made:
        for trial in range(DEVICES):
            made.put(trial, 0, trials.initial(trial))
        sub_epochs(made, state=1)  # devices start meanwhile
        seconds = sub_epochs(made, state=2)
        states = [made.get(trial, 2, trials.shards) for trial in range(DEVICES)]
    for state in states:
        assert [shard["trainable"][0] for shard in state] == [2 * ROWS // BATCH] * trials.shards
    assert alone <= seconds < DEVICES * alone


def test_moves_take_as_long_as_their_bytes_ask_for() -> None:
    memory = DelayMemory(rate=NBYTES / FORWARD)
    slabs = {"trainable": np.full(NBYTES, 7, np.uint8)}
    begun = time.perf_counter()
    slots = memory.promote(slabs, gradients=0)
    promoted = time.perf_counter()
    slots["trainable"][:] = 8
    memory.demote(slots, slabs)
    demoted = time.perf_counter()
    assert promoted - begun >= FORWARD
    assert demoted - promoted >= FORWARD
    assert (slabs["trainable"] == 8).all()
