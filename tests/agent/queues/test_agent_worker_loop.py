"""What the loop of a worker is given at once is done at once, and in order."""

from __future__ import annotations

import queue
import threading
from functools import partial
from typing import Any

from cerebro_hydra.agent.worker_loop import WorkerLoop
from cerebro_hydra.plan.queues.log import DeviceLog
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.pick import oldest_first
from tests.agent.standins import SECONDS


def test_calls_are_gathered_while_the_loop_is_busy_but_not_across_other_work() -> None:
    state = WorkerState([None], None, oldest_first)
    nothing: Any = lambda *args: None  # noqa: E731
    errors: list[Exception] = []
    log = DeviceLog(state, lambda visit: visit)
    loop = WorkerLoop(state, threading.Lock(), log, nothing, errors.append, nothing)
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    busy = threading.Event()
    hear = loop.gathered(done.put)
    loop.put(partial(busy.wait, SECONDS))
    for number in (1, 2):
        hear(number, "answer")
    loop.put(partial(done.put, "other work"))
    hear(3, "answer")
    loop.start()
    busy.set()
    found = [done.get(timeout=SECONDS) for _ in range(3)]
    assert found == [[(1, "answer"), (2, "answer")], "other work", [(3, "answer")]]
    hear(4, "answer")
    assert done.get(timeout=SECONDS) == [(4, "answer")]
    loop.stop()
    loop.join()
    assert not errors
