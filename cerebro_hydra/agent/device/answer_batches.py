"""Sends what a device answers, several answers in one message where they come fast."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cerebro_hydra.agent.device.messages import Answer

BATCH_SECONDS = 0.002
"""The time between two messages that have nothing but what may wait."""


class AnswerBatches:
    """Sends answers in the order in which they are given. Thread-safe.

    Args:
        send: sends some of them; called by one thread at a time.
    """

    def __init__(self, send: Callable[[list[Answer]], object]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._waiting: list[Answer] = []
        self._some = threading.Event()

    def start(self) -> None:
        """Begin to send what may wait."""
        threading.Thread(target=self._run, name="device-answers", daemon=True).start()

    def answer(self, answer: Answer) -> None:
        """Send an answer now, with all that waits."""
        with self._lock:
            self._waiting.append(answer)
            self._send_all()

    def answer_soon(self, answer: Answer) -> None:
        """Let an answer be sent in a moment, by another thread."""
        with self._lock:
            self._waiting.append(answer)
        self._some.set()

    def flush(self) -> None:
        """Send what waits now."""
        if self._waiting:
            with self._lock:
                self._send_all()

    def _send_all(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._send(waiting)

    def _run(self) -> None:
        while True:
            self._some.wait()
            self._some.clear()
            self.flush()
            time.sleep(BATCH_SECONDS)
