"""The queue of a device: the unit that it runs and the one that it is being made ready for."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.queues.ledger import BlockKey
from cerebro_hydra.plan.queues.run_progress import RunProgress, Unit


@dataclass(slots=True)
class DeviceQueue:
    """Holds what a device does and will do next.

    ``staying`` has the runs whose microbatch stays on the device until it is through.
    """

    number: int
    budget: float
    alive: bool = True
    running: Unit | None = None
    unanswered: deque[Action] = field(default_factory=deque)  # of the running unit
    reserved: Unit | None = None
    staying: list[RunProgress] = field(default_factory=list)

    @classmethod
    def of(cls, number: int, budget: int | None) -> DeviceQueue:
        """Return the queue of a device without work; None means a budget without limit."""
        return cls(number, math.inf if budget is None else budget)

    @property
    def idle(self) -> bool:
        """Return whether the device has nothing to do and nothing reserved."""
        return self.alive and self.running is None and self.reserved is None

    def is_ending(self, run: RunProgress) -> bool:
        """Return whether what stays of the run ends with the running unit, and no more follows."""
        running = self.running
        if running is None or running.run != run.spec.run or not running.ends_microbatch:
            return False
        following = run.units_on(self.number)[1:]
        return not (run.is_ahead_of(running) or any(unit.starts_microbatch for unit in following))

    def pinned(self, but: RunProgress) -> int:
        """Return the bytes that microbatches of other runs keep from whoever comes next."""
        others = (run for run in self.staying if run is not but and not self.is_ending(run))
        return sum(run.share_on(self.number).pinned for run in others)

    def has_begun(self, run: RunProgress) -> bool:
        """Return whether what stays of the run has bytes beside its shards by now."""
        number = run.spec.run
        running = self.running if self.running and self.running.run == number else None
        first = self.reserved if self.reserved and self.reserved.run == number else None
        if first is None:
            return running is not None or not run.begins_window_on(self.number)
        return not first.starts_microbatch or (running is not None and running.ends_microbatch)

    def has(self, key: BlockKey) -> bool:
        """Return whether the block is in use or reserved."""
        return any(unit is not None and unit.uses(key) for unit in (self.running, self.reserved))

    def has_unit_of(self, run: RunProgress) -> bool:
        """Return whether a unit of the run is in the queue."""
        number = run.spec.run
        return any(unit and unit.run == number for unit in (self.running, self.reserved))
