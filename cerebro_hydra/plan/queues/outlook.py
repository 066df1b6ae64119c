"""An outlook tells how soon all visits could end, by which of them a free device takes next.

Near the end the longest remaining time alone is a poor guide: of four nearly equal visits on three
devices it keeps all equally long, until the last unit of one has a device to itself and others
idle. So an outlook lists the units that are left and rolls out a future for each choice, in which
all later ones go by the longest remaining time: a rollout of that rule (Bertsekas, Tsitsiklis and
Wu, "Rollout Algorithms for Combinatorial Optimization", 1997, section 2). It is no worse than the
rule itself as far as units take what is expected and moves take no time.

It is bounded: an outlook has at most ``MOST_UNITS`` units, and ``MOST_FUTURES`` are rolled out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_UNITS = 24
"""How many units of all visits may be left where somebody looks ahead."""

MOST_FUTURES = 8
"""How many choices are compared."""

MOST_MOVING = 0.05
"""How much of a mean unit the moves before it may take where somebody looks ahead."""

WORTH = 0.05
"""By which share of what is left a choice must end sooner than the first guess.

What units take, and which of them memory will let begin, is known no better.
"""


@dataclass(frozen=True, slots=True)
class Chain:
    """Holds what is left of a visit.

    Args:
        ready: when its next unit could begin.
        units: the seconds of its units that no device has, none of which can be interrupted.
    """

    ready: float
    units: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """Knows the units that are left. All times are seconds on one clock.

    Args:
        device: the place in ``free_at`` of the device that chooses.
        free_at: when each device is free.
        chains: of each visit.
        asked_again: when it chooses again if it takes nothing now; None if it must take something.
    """

    device: int
    free_at: tuple[float, ...]
    chains: Mapping[int, Chain]
    asked_again: float | None = None

    @property
    def bound(self) -> float:
        """Return the time before which no future ends, by longest visit and work per device."""
        chains = self.chains.values()
        longest = max((c.ready + sum(c.units) for c in chains), default=0.0)
        work = sum(sum(chain.units) for chain in chains)
        return max(longest, (sum(self.free_at) + work) / len(self.free_at))

    def best(self, visits: Sequence[int]) -> int | None:
        """Return the visit whose next unit is best taken now; None if the device had better wait.

        Args:
            visits: those that can be taken, the first guess first; it is kept where it is as good.
        """
        bound = self.bound
        best: int | None = visits[0]
        soonest = self.end_with(best)
        soonest -= WORTH * (soonest - self.free_at[self.device])
        waits = [None] if self.asked_again is not None else []
        for choice in [*visits[1 : MOST_FUTURES - len(waits)], *waits]:
            if soonest <= bound:
                break
            end = self.end_with(choice)
            if end < soonest:
                best, soonest = choice, end
        return best

    def end_with(self, choice: int | None) -> float:
        """Return when all ends if the device takes a visit's next unit, or none for now."""
        free = [*self.free_at]
        chains = [*self.chains.values()]
        ready = [chain.ready for chain in chains]
        left = [[*reversed(chain.units)] for chain in chains]
        remaining = [sum(chain.units) for chain in chains]
        end = max(at + seconds for at, seconds in zip(ready, remaining, strict=True))

        def take(number: int, device: int) -> None:
            nonlocal end
            seconds = left[number].pop()
            remaining[number] -= seconds
            until = max(free[device], ready[number]) + seconds
            free[device] = ready[number] = until
            end = max(end, until + remaining[number])

        if choice is not None:
            take([*self.chains].index(choice), self.device)
        elif self.asked_again is not None:
            free[self.device] = max(free[self.device], self.asked_again)
        while any(left):
            device = min(range(len(free)), key=free.__getitem__)
            now = free[device]
            longest, soon = -1, math.inf
            for number, units in enumerate(left):
                if not units:
                    continue
                if ready[number] > now:
                    soon = min(soon, ready[number])
                elif longest < 0 or remaining[number] > remaining[longest]:
                    longest = number
            if longest < 0:
                free[device] = soon
            else:
                take(longest, device)
        return end
