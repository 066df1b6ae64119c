"""The queue of a device: the units that it was given, and the one that it is made ready for."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.queues.visit import Unit, Visit, placed


@dataclass(slots=True)
class DeviceQueue:
    """Holds what a device does and will do next.

    Args:
        given: the units that the device does in this order; it is doing the first one.
        activations: the bytes that each of them has for itself.
        unanswered: their tasks that are not done.
        reserved: the unit that comes after these.
        staying: the visits whose microbatch stays on the device until it is through.
        changes: counts what has changed that decisions about the device's memory follow from.
        advanced: the count when the reserved unit was last brought closer.
        demoted: the count when changed blocks were last written back.
        clock: the moment at which the last of its tasks ended, as far as what tasks took tells.
    """

    number: int
    budget: float
    alive: bool = True
    given: deque[Unit] = field(default_factory=deque)
    activations: deque[int] = field(default_factory=deque)
    unanswered: deque[Action] = field(default_factory=deque)
    reserved: Unit | None = None
    staying: list[Visit] = field(default_factory=list)
    changes: int = 0
    advanced: int = -1
    demoted: int = -1
    clock: float = 0.0
    _begun: float = 0.0  # by the same clock, when the first unit began
    _given_of: Counter[int] = field(default_factory=Counter)  # units, by their visits
    _seconds: float = 0.0  # of what was given

    @classmethod
    def of(cls, number: int, budget: int | None) -> DeviceQueue:
        """Return the queue of a device without work; None means a budget without limit."""
        return cls(number, math.inf if budget is None else budget)

    @property
    def idle(self) -> bool:
        """Return whether the device has nothing to do and nothing reserved."""
        return self.alive and not self.given and self.reserved is None

    @property
    def seconds(self) -> float:
        """Return what all units that it was given are expected to take."""
        return self._seconds if self.given else 0.0

    @property
    def seconds_ahead(self) -> float:
        """Return what those behind the first one are expected to take."""
        return self._seconds - self.given[0].seconds if len(self.given) > 1 else 0.0

    @property
    def units(self) -> list[Unit]:
        """Return what it was given, and what is reserved."""
        return [*self.given] if self.reserved is None else [*self.given, self.reserved]

    def ends(self, now: float) -> list[tuple[int, float]]:
        """Return the visits of its units, and when each unit is expected to end, not before now."""
        at = self._begun if self.given else now
        found = []
        for unit in self.units:
            at = max(now, at + unit.seconds)
            found.append((unit.visit, at))
        return found

    def give(self, unit: Unit, activations: int, now: float) -> tuple[Action, ...]:
        """Give it a unit, and return the tasks."""
        if not self.given:
            self.clock = self._begun = now
        self._seconds = self.seconds + unit.seconds
        self.given.append(unit)
        self.activations.append(activations)
        self._given_of[unit.visit] += 1
        tasks = placed(unit, self.number)
        self.unanswered.extend(tasks)
        return tasks

    def end_first(self) -> None:
        """Note that it has done the first unit."""
        unit = self.given.popleft()
        self.activations.popleft()
        self._seconds -= unit.seconds
        self._begun = self.clock
        self._given_of -= Counter([unit.visit])  # one without units has no entry

    def clear(self) -> None:
        """Note that it does nothing any more."""
        for visit in self.staying:
            visit.staying.remove(self.number)
        for held in (self.given, self.activations, self.unanswered, self._given_of, self.staying):
            held.clear()
        self.reserved = None

    def validate(self) -> None:
        """Check what is counted against what is there.

        Raises:
            AssertionError: something differs.
        """
        given = [task for unit in self.given for task in placed(unit, self.number)]
        left = [*self.unanswered]
        assert self.alive or not self.units, f"device {self.number} is dead"
        assert left == given[len(given) - len(left) :], f"device {self.number} has to do {left}"
        assert not self.given or len(given) - len(left) < len(self.given[0].tasks)
        assert self._given_of == Counter(unit.visit for unit in self.given)
        assert len(self.activations) == len(self.given)
        assert math.isclose(self.seconds, sum(unit.seconds for unit in self.given), abs_tol=1e-6)

    def last_of(self, visit: Visit) -> Unit | None:
        """Return the last unit of a visit that the device was given."""
        number = visit.spec.visit
        if number not in self._given_of:
            return None
        return next(unit for unit in reversed(self.given) if unit.visit == number)

    def is_ending(self, visit: Visit) -> bool:
        """Return whether what stays of the visit ends with the last unit of it that was given."""
        last, following = self.last_of(visit), self.reserved
        if last is None or not last.ends_microbatch or visit.is_ahead_of(last):
            return False
        if following is None or following.visit != visit.spec.visit:
            return True
        return not following.starts_microbatch

    def pinned(self, but: Visit) -> int:
        """Return the bytes that microbatches of other visits keep from whoever comes next."""
        others = (visit for visit in self.staying if visit is not but and not self.is_ending(visit))
        return sum(visit.share_on(self.number).pinned for visit in others)

    def has_begun(self, visit: Visit) -> bool:
        """Return whether what stays of the visit has bytes beside its shards by now."""
        if self.last_of(visit) is not None:
            return True
        following = self.reserved
        if following is not None and following.visit == visit.spec.visit:
            return not following.starts_microbatch
        return not visit.begins_window_on(self.number)

    def has_unit_of(self, visit: int) -> bool:
        """Return whether a unit of the visit is in the queue."""
        reserved = self.reserved is not None and self.reserved.visit == visit
        return reserved or visit in self._given_of
