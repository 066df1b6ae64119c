"""Holds the devices of a worker: what each was asked, when it was heard, and who replaces it."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import NamedTuple, Protocol

from cerebro_hydra.agent.device.endings import no_life
from cerebro_hydra.agent.device.messages import (
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
from cerebro_hydra.hopper.protocol.agent_spec import LossLimits
from cerebro_hydra.plan.messages.actions import Action

_log = logging.getLogger(__name__)

MOST_STARTS = 10  # of a device that dies each time before it is ready

CodeOrder = Profile | Open | Compute | Close
"""An order that runs code of a trial."""


class WorkerDevice(Protocol):
    """Takes orders for a device, here or in another process. Thread-safe."""

    @property
    def limits(self) -> LossLimits | None:
        """Return for how long its process may be silent; None if that is this one."""
        ...

    @property
    def thread(self) -> int | None:
        """Return the thread of this process that computes; None if that is another process."""
        ...

    def give(self, order: Order) -> None:
        """Take an order and return at once."""
        ...

    @property
    def ending(self) -> str:
        """Return how its process has ended."""
        ...

    def kill(self, why: str) -> None:
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
        beside: the devices that were running code of the same visit.
    """

    number: int
    was_up: bool
    order: CodeOrder | None
    beside: Set[WorkerDevice]


class WorkerDevices:
    """Holds the present devices of a worker by their numbers; one thread uses it.

    Args:
        starts: each starts the device of its place.

    Attributes:
        gate: holds their units back for a while.
    """

    def __init__(self, starts: Sequence[DeviceStart], on_answer: OnAnswer, on_gone: OnGone) -> None:
        self.gate = UnitGate()
        self._starts = starts
        self._on_answer, self._on_gone = on_answer, on_gone
        self._devices: list[WorkerDevice] = []
        self._down = Counter[int]()  # the deaths of each number since it was ready
        self._unanswered: list[deque[CodeOrder]] = []
        self._patience: list[float] = []  # the seconds in which each has to show life
        self._heard: dict[WorkerDevice, float] = {}  # the moment when each has shown it last

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

    def ask(self, device: WorkerDevice, order: CodeOrder) -> bool:
        """Give a device an order that runs code of a trial; it answers all of them in turn.

        Return whether that is its only unit.
        """
        is_first = self.unit(device) is None
        self._unanswered[self._devices.index(device)].append(order)
        device.give(order)
        return is_first and isinstance(order, Compute)

    def present(
        self, heard: Sequence[tuple[WorkerDevice, Answer]]
    ) -> Iterator[tuple[WorkerDevice, Answer, float]]:
        """Yield answers but those of devices that have died, with the moment when each was given.

        The units of a device were done one after the other, the last of them just now.
        """
        now, later = time.monotonic(), defaultdict[WorkerDevice, float](float)
        seconds = [each.seconds if isinstance(each, Computed) else 0.0 for _, each in heard]
        for (device, _), each in zip(heard, seconds, strict=True):
            later[device] += each
        for (device, answer), each in zip(heard, seconds, strict=True):
            later[device] -= each
            if device in self:
                yield device, answer, now - later[device]

    def unit(self, device: WorkerDevice) -> Compute | None:
        """Return the unit that a device does, or will do next."""
        asked = self._unanswered[self._devices.index(device)]
        return next((order for order in asked if isinstance(order, Compute)), None)

    def hear(self, device: WorkerDevice, answer: Answer) -> CodeOrder | None:
        """Note that a device lives; return what it answers: what it was asked first, or nothing."""
        number = self._devices.index(device)
        if device.limits is not None:
            self._patience[number] = device.limits.silence_seconds
            self._heard[device] = time.monotonic()
        if isinstance(answer, Profiled | Opened | Computed | Closed) or (
            isinstance(answer, Failed) and answer.visit is None
        ):
            asked = self._unanswered[number]
            if not isinstance(answer, Profiled | Failed):
                return _taken(asked, lambda order: not isinstance(order, Profile))
            return _taken(asked, lambda order: isinstance(order, Profile))
        return None

    def silence(self, devices: Iterable[WorkerDevice]) -> float:
        """Return for how long the most silent of these has shown no life; 0 if it is no process."""
        now = time.monotonic()
        return max((now - self._heard.get(device, now) for device in devices), default=0.0)

    def age(self, seconds: float) -> None:
        """Let time pass, and end the devices whose processes have been silent for too long."""
        for number, device in enumerate(self._devices):
            self._patience[number] -= seconds
            if self._patience[number] < 0:
                self._patience[number] = math.inf
                assert device.limits is not None, "a device of this process has all the time"
                _log.warning("device %d shows no life; it is killed and started again", number)
                device.kill(no_life(device.limits.silence_seconds))

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
        order = asked[0] if asked else None
        death = Death(number, was_up, order, self._beside(device, order))
        asked.clear()
        self.gate.lose(number)
        self._heard.pop(device, None)
        self._devices[number] = self._starts[number](self._on_answer, self._on_gone)
        self._patience[number] = _patience_with_start(self._devices[number])
        return death

    def _beside(self, device: WorkerDevice, order: CodeOrder | None) -> Set[WorkerDevice]:
        """Return the other devices that were asked to run code of the same visit."""
        if order is None or isinstance(order, Profile):
            return set()
        pairs = zip(self._devices, self._unanswered, strict=True)
        return {
            each
            for each, asked in pairs
            if each is not device
            and any(not isinstance(one, Profile) and one.visit == order.visit for one in asked)
        }

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


def _taken(asked: deque[CodeOrder], fits: Callable[[CodeOrder], bool]) -> CodeOrder:
    """Take out the first order that fits: one may be answered after those of a call under way."""
    at = next(n for n, order in enumerate(asked) if fits(order))
    order = asked[at]
    del asked[at]
    return order


def _patience_with_start(device: WorkerDevice) -> float:
    return math.inf if device.limits is None else device.limits.join_timeout


Unit = tuple[Action, ...]


class UnitGate:
    """Holds units back while other threads do what must be done before; one thread uses it.

    It may be shut for a visit, or for all of them (None), and more than once. A unit that is held
    back holds back those that come after it on its device.
    """

    def __init__(self) -> None:
        self._shut = Counter[int | None]()
        self._held: list[Unit] = []

    def holds(self, unit: Unit) -> bool:
        """Return whether a unit may not begin yet; it is kept then."""
        first = unit[0]
        is_behind = any(each[0].device == first.device for each in self._held)
        if holds := bool(is_behind or self._shut[None] or self._shut[first.trial]):
            self._held.append(unit)
        return holds

    def shut(self, visit: int | None) -> None:
        """Hold units back until it is opened as often."""
        self._shut[visit] += 1

    def open(self, visit: int | None) -> list[Unit]:
        """Return the units that may begin now, in their order."""
        self._shut -= Counter([visit])  # a visit that is not shut any more has no entry
        return self._free()

    def remove(self, visit: int) -> list[Unit]:
        """Hold nothing back for a visit any more; return the units that may begin now."""
        del self._shut[visit]
        return self._free()

    def lose(self, device: int) -> None:
        """Forget the units of a device that has died."""
        self._held = [unit for unit in self._held if unit[0].device != device]

    def _free(self) -> list[Unit]:
        held, self._held = self._held, []
        return [unit for unit in held if not self.holds(unit)]
