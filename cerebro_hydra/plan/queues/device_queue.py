"""The queue of a device: the unit that it runs and the one that it is being made ready for."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.queues.visit import Unit, Visit


@dataclass(slots=True)
class DeviceQueue:
    """Holds what a device does and will do next.

    Args:
        staying: the visits whose microbatch stays on the device until it is through.
        changes: counts what has changed that decisions about the device's memory follow from.
        advanced: the count when the reserved unit was last brought closer.
        demoted: the count when changed blocks were last written back.
    """

    number: int
    budget: float
    alive: bool = True
    running: Unit | None = None
    unanswered: deque[Action] = field(default_factory=deque)  # of the running unit
    reserved: Unit | None = None
    staying: list[Visit] = field(default_factory=list)
    changes: int = 0
    advanced: int = -1
    demoted: int = -1

    @classmethod
    def of(cls, number: int, budget: int | None) -> DeviceQueue:
        """Return the queue of a device without work; None means a budget without limit."""
        return cls(number, math.inf if budget is None else budget)

    @property
    def idle(self) -> bool:
        """Return whether the device has nothing to do and nothing reserved."""
        return self.alive and self.running is None and self.reserved is None

    def is_ending(self, visit: Visit) -> bool:
        """Return whether what stays of the visit ends with the running unit and no more follow."""
        running = self.running
        if running is None or running.visit != visit.spec.visit or not running.ends_microbatch:
            return False
        following = visit.units_on(self.number)[1:]
        return not (visit.is_ahead_of(running) or any(unit.starts_microbatch for unit in following))

    def pinned(self, but: Visit) -> int:
        """Return the bytes that microbatches of other visits keep from whoever comes next."""
        others = (visit for visit in self.staying if visit is not but and not self.is_ending(visit))
        return sum(visit.share_on(self.number).pinned for visit in others)

    def has_begun(self, visit: Visit) -> bool:
        """Return whether what stays of the visit has bytes beside its shards by now."""
        number = visit.spec.visit
        running = self.running if self.running and self.running.visit == number else None
        first = self.reserved if self.reserved and self.reserved.visit == number else None
        if first is None:
            return running is not None or not visit.begins_window_on(self.number)
        return not first.starts_microbatch or (running is not None and running.ends_microbatch)

    def has_unit_of(self, visit: int) -> bool:
        """Return whether a unit of the visit is in the queue."""
        running, reserved = self.running, self.reserved
        return (running is not None and running.visit == visit) or (
            reserved is not None and reserved.visit == visit
        )
