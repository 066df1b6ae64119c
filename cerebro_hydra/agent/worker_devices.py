"""Keeps the devices of a worker up, wherever they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from cerebro_hydra.agent.device_messages import Answer, Order
from cerebro_hydra.errors import SetupError

MOST_STARTS = 10
"""How often in a row a device may die before it is ready."""


class WorkerDevice(Protocol):
    """Takes orders for a device, here or in another process. Thread-safe."""

    def give(self, order: Order) -> None:
        """Take an order and return at once."""
        ...

    def kill(self) -> None:
        """End the process of the device, because it hangs."""
        ...

    def close(self) -> None:
        """End the device; nothing that was ordered needs to be done any more."""
        ...


OnAnswer = Callable[[WorkerDevice, Answer], object]
OnGone = Callable[[WorkerDevice], object]
DeviceStart = Callable[[OnAnswer, OnGone], WorkerDevice]
"""Starts a device, and is told what takes its answers and what hears of its death."""


class WorkerDevices:
    """Holds the present devices of a worker by their numbers; one thread uses it.

    Args:
        starts: each starts the device of its place.
    """

    def __init__(self, starts: Sequence[DeviceStart], on_answer: OnAnswer, on_gone: OnGone) -> None:
        self._starts = starts
        self._on_answer, self._on_gone = on_answer, on_gone
        self._devices: list[WorkerDevice] = []
        self._down = Counter[int]()  # the deaths of each number since it was ready

    def start(self) -> None:
        """Start them all."""
        self._devices = [start(self._on_answer, self._on_gone) for start in self._starts]

    def __getitem__(self, number: int) -> WorkerDevice:
        """Return a device."""
        return self._devices[number]

    def __contains__(self, device: WorkerDevice) -> bool:
        """Return whether it was not replaced."""
        return device in self._devices

    def tell(self, order: Order) -> None:
        """Give an order to all of them."""
        for device in self._devices:
            device.give(order)

    def replace(self, device: WorkerDevice) -> tuple[int, bool]:
        """Start a device that died again; return its number and whether it was ready before.

        Raises:
            SetupError: it has died too often before it was ready.
        """
        number = self._devices.index(device)
        was_up = number not in self._down
        self._down[number] += 1
        if self._down[number] == MOST_STARTS:
            raise SetupError(
                f"device {number} could not be started {MOST_STARTS} times in a row; see the log "
                "for what it said, and take another number of devices_per_worker"
            )
        self._devices[number] = self._starts[number](self._on_answer, self._on_gone)
        return number, was_up

    def ready(self, device: WorkerDevice) -> int | None:
        """Note that a device is ready; return its number if one of that number had died."""
        number = self._devices.index(device)
        if number not in self._down:
            return None
        del self._down[number]
        return number

    def close(self) -> None:
        """End them all."""
        for device in self._devices:
            device.close()
