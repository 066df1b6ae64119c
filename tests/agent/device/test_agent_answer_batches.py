"""What a device answers comes in order, and some of it together."""

from __future__ import annotations

import queue
import threading

from cerebro_hydra.agent.device.answer_batches import AnswerBatches
from cerebro_hydra.agent.device.messages import Alive, Answer, Opened, Ready
from tests.agent.standins import SECONDS


def test_what_may_wait_is_sent_before_what_may_not() -> None:
    sent: list[list[Answer]] = []
    answers = AnswerBatches(sent.append)
    answers.answer_soon(Opened(1))
    answers.answer_soon(Opened(2))
    assert sent == []
    answers.answer(Ready())
    answers.flush()
    assert sent == [[Opened(1), Opened(2), Ready()]]
    answers.answer_soon(Opened(3))
    answers.flush()
    assert sent[1:] == [[Opened(3)]]


def test_what_may_wait_is_sent_by_itself_and_together_while_the_pipe_is_taken() -> None:
    sent: queue.SimpleQueue[list[Answer]] = queue.SimpleQueue()
    free = threading.Event()

    def send(answers: list[Answer]) -> None:
        sent.put(answers)
        assert free.wait(SECONDS)

    answers = AnswerBatches(send)
    answers.start()
    answers.answer_soon(Alive())
    assert sent.get(timeout=SECONDS) == [Alive()]
    numbers = range(50)
    giver = threading.Thread(target=lambda: [answers.answer_soon(Opened(n)) for n in numbers])
    giver.start()
    free.set()
    giver.join()
    told: list[Answer] = []
    while len(told) < len(numbers):
        told += sent.get(timeout=SECONDS)
    assert told == [Opened(n) for n in numbers]
