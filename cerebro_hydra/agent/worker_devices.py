"""Keeps the devices of a worker up, wherever they run."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from cerebro_hydra.agent.device_messages import (
    Answer,
    Close,
    Closed,
    Compute,
    Computed,
    Failed,
    Open,
    Opened,
    Order,
    Profile,
    Profiled,
)
from cerebro_hydra.errors import SetupError
from cerebro_hydra.hopper.loss_limits import LossLimits

MOST_STARTS = 10  # of a device that dies each time before it is ready
MOST_DEATHS = 3  # of devices that run the same code, until that is the cause
DEADLY = (
    f"its code ended the process of a device {MOST_DEATHS} times, or held Python's lock until that "
    "was killed"
)

_log = logging.getLogger(__name__)

CodeOrder = Profile | Open | Compute | Close
"""An order that runs code of a trial."""


class WorkerDevice(Protocol):
    """Takes orders for a device, here or in another process. Thread-safe."""

    @property
    def limits(self) -> LossLimits | None:
        """Return for how long its process may be silent; None if that is this one."""
        ...

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


class Death(NamedTuple):
    """Tells of a device that has died.

    Args:
        number: of the device.
        was_up: whether it was ready.
        order: what it was doing; None if it ran no code of a trial.
    """

    number: int
    was_up: bool
    order: CodeOrder | None


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
        self._unanswered: list[deque[CodeOrder]] = []
        self._patience: list[float] = []  # the seconds in which each has to show life

    def start(self) -> None:
        """Start them all."""
        self._devices = [start(self._on_answer, self._on_gone) for start in self._starts]
        self._unanswered = [deque() for _ in self._starts]
        self._patience = [_patience_with_start(device) for device in self._devices]

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

    def ask(self, device: WorkerDevice, order: CodeOrder) -> None:
        """Give a device an order that runs code of a trial; it answers all of them in turn."""
        self._unanswered[self._devices.index(device)].append(order)
        device.give(order)

    def hear(self, device: WorkerDevice, answer: Answer) -> CodeOrder | None:
        """Note that a device lives; return what it answers: what it was asked first, or nothing."""
        number = self._devices.index(device)
        if device.limits is not None:
            self._patience[number] = device.limits.silence_seconds
        if isinstance(answer, Profiled | Opened | Computed | Closed) or (
            isinstance(answer, Failed) and answer.run is None
        ):
            return self._unanswered[number].popleft()
        return None

    def age(self, seconds: float) -> None:
        """Let time pass, and end the devices whose processes have been silent for too long."""
        for number, device in enumerate(self._devices):
            self._patience[number] -= seconds
            if self._patience[number] < 0:
                self._patience[number] = math.inf
                _log.warning("device %d shows no life; it is killed and started again", number)
                device.kill()

    def replace(self, device: WorkerDevice) -> Death:
        """Start a device that died again.

        Raises:
            SetupError: it died too often before it was ready.
        """
        number = self._devices.index(device)
        was_up = number not in self._down
        self._down[number] += 1
        if self._down[number] == MOST_STARTS:
            raise SetupError(
                f"device {number} could not be started {MOST_STARTS} times in a row; see the log "
                "for what it said, and take another number of devices_per_worker"
            )
        asked = self._unanswered[number]
        death = Death(number, was_up, asked[0] if asked else None)
        asked.clear()
        self._devices[number] = self._starts[number](self._on_answer, self._on_gone)
        self._patience[number] = _patience_with_start(self._devices[number])
        return death

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


def _patience_with_start(device: WorkerDevice) -> float:
    return math.inf if device.limits is None else device.limits.join_timeout
