"""Control between the driver and its agents: one connection each, JSON both ways."""

from __future__ import annotations

from cerebro_hydra.wire.control_client import ControlClient
from cerebro_hydra.wire.control_server import ControlServer

__all__ = ["ControlClient", "ControlServer"]
