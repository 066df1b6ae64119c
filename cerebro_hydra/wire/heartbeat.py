"""Heartbeats of two ends of a connection, by which each finds that the other one is silent."""

from __future__ import annotations

from dataclasses import dataclass, field

HEARTBEAT_SECONDS = 0.5
"""Seconds between two heartbeats, which each end sends."""

SILENCE_SECONDS = 10.0
"""Seconds without a byte from the other end after which it is given up: it hangs, or is cut off."""


@dataclass(slots=True)
class Heartbeat:
    """Counts the beats of this end since the other one showed life.

    Beats are counted, not seconds: a pause of this process is no silence of the other end.

    Args:
        seconds: between two beats.
        silence: seconds after which the other end is given up.
    """

    seconds: float = HEARTBEAT_SECONDS
    silence: float = SILENCE_SECONDS
    _missed: int = field(default=0, init=False)

    def hear(self) -> None:
        """Note a sign of life; any byte is one."""
        self._missed = 0

    def beat(self) -> bool:
        """Count a beat; return False, and count none, if the other end was silent for too long."""
        if self._missed * self.seconds >= self.silence:
            return False
        self._missed += 1
        return True
