"""What is put in at once is done at once, and in order."""

from __future__ import annotations

import queue
import threading
from functools import partial
from typing import Any

from cerebro_hydra.agent.inbox import Inbox
from tests.agent.standins import SECONDS


def test_calls_are_gathered_while_the_thread_is_busy_but_not_across_other_work() -> None:
    inbox = Inbox(lambda: None)
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    busy = threading.Event()
    hear = inbox.gathered(done.put)
    inbox.put(partial(busy.wait, SECONDS))
    for number in (1, 2):
        hear(number, "answer")
    inbox.put(partial(done.put, "other work"))
    hear(3, "answer")
    working = threading.Thread(target=lambda: [work() for work in inbox])
    working.start()
    busy.set()
    found = [done.get(timeout=SECONDS) for _ in range(3)]
    assert found == [[(1, "answer"), (2, "answer")], "other work", [(3, "answer")]]
    hear(4, "answer")
    assert done.get(timeout=SECONDS) == [(4, "answer")]
    inbox.close()
    working.join(SECONDS)
    assert not working.is_alive()


def test_a_tick_comes_while_nothing_is_put_in_and_nothing_after_the_end() -> None:
    ticks: queue.SimpleQueue[None] = queue.SimpleQueue()
    inbox = Inbox(lambda: ticks.put(None))
    working = threading.Thread(target=lambda: [work() for work in inbox])
    working.start()
    for _ in range(3):
        ticks.get(timeout=SECONDS)
    inbox.close()
    working.join(SECONDS)
    assert not working.is_alive()
