"""Says how long two ends of a connection wait for each other."""

from __future__ import annotations

HEARTBEAT_SECONDS = 0.5
"""Seconds between two heartbeats, which each end sends."""

SILENCE_SECONDS = 10.0
"""Seconds without a byte from the other end after which it is given up: it hangs, or is cut off."""

GOODBYE_SECONDS = 5.0
"""Seconds, at most, that a peer has to hang up after a goodbye."""
