"""Sends how far training is, now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PROGRESS_SECONDS = 0.5


class Progress:
    """Sends messages of progress for the coordinator; one thread uses it.

    Args:
        send: takes a message.
    """

    def __init__(self, send: Callable[[dict[str, Any]], object]) -> None:
        self._send = send
        self._next = time.monotonic() + PROGRESS_SECONDS

    def is_due(self) -> bool:
        """Return whether a while has gone by since it was due before."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + PROGRESS_SECONDS
        return True

    def send(self, progress: dict[str, Any]) -> None:
        """Send how far a sub-epoch is."""
        self._send({"progress": progress})
