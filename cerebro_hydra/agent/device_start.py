"""Says how the shell of a worker gets its devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cerebro_hydra.agent.device_messages import Answer, Order


class WorkerDevice(Protocol):
    """Takes orders for a device, here or in another process. Thread-safe."""

    def give(self, order: Order) -> None:
        """Take an order and return at once."""
        ...

    def close(self) -> None:
        """End the device; nothing that was ordered needs to be done any more."""
        ...


DeviceStart = Callable[
    [Callable[[WorkerDevice, Answer], object], Callable[[WorkerDevice], object]], WorkerDevice
]
"""Starts a device, and is told what takes its answers and what hears of its death."""
