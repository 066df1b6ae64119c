"""The chooser says which unit a device gets next: one that can end there, by the backend's rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from cerebro_hydra.plan.queues.device_queue import DeviceQueue
from cerebro_hydra.plan.queues.ledger import Ledger
from cerebro_hydra.plan.queues.outlook import MOST_MOVING, MOST_UNITS, Chain, Outlook
from cerebro_hydra.plan.queues.pick import Candidate, Rule, unforeseen
from cerebro_hydra.plan.queues.visit import Unit, Visit


class Chooser:
    """Reserves units for devices."""

    def __init__(
        self,
        ledger: Ledger,
        visits: Mapping[int, Visit],
        queues: Mapping[int, DeviceQueue],
        rule: Rule,
    ) -> None:
        self._ledger = ledger
        self._visits = visits
        self._queues = queues
        self._rule = rule
        self.visits_expected = True
        """Whether other visits may follow those that are here; who waits may hold them back."""
        self.load_seconds = 0.0
        """What a device needed for a load, on average over the last ones."""
        self._homes: dict[int, int] | None = None  # bytes by visit, see `kept_in_dram`
        self._homes_bytes = 0

    def reserve(self, queue: DeviceQueue, visits: Iterable[Visit], now: float) -> int | None:
        """Reserve the unit that the rule picks of some visits, or of those that audit others.

        Return the number of its visit.

        Args:
            now: the moment, by the clocks of the devices.
        """
        units: dict[int, Unit] = {}
        candidates = []
        for visit in visits:
            tasks = visit.list_on(queue.number)
            if tasks is None or (tasks.units and tasks.device != queue.number):
                continue
            unit = visit.next_unit(tasks)
            if unit is None or self.is_lacking(unit) or not self._can_take(queue, visit, unit):
                continue
            number = visit.spec.visit
            units[number] = unit
            own, since = bool(tasks.units), visit.waiting_since
            candidates.append(Candidate(number, visit.arrival, visit.remaining, since, own))
        if not candidates:
            return None
        if audits := [each for each in candidates if self._visits[each.visit].spec.audits]:
            picked = self._rule(audits, unforeseen)
        else:
            picked = self._rule(candidates, lambda: self._outlook(queue, units, now))
        if picked is None:
            return None
        visit, unit = self._visits[picked.visit], units[picked.visit]
        visit.take(unit, queue.number)
        queue.reserved = unit
        if visit.spec.stays and unit.starts_microbatch:
            for place in self._places(queue, visit):
                if visit not in place.staying:
                    place.staying.append(visit)
                    visit.staying.add(place.number)
                    self.forget_homes()
        return picked.visit

    def _outlook(
        self, queue: DeviceQueue, candidates: Mapping[int, Unit], now: float
    ) -> Outlook | None:
        """Return what a device can expect; None while that is open, or a schedule says the places.

        It is open while much is left or moves, or visits may follow.

        Args:
            candidates: the next units of the visits that the device may take from, by their number.
        """
        if self.visits_expected or any(
            visit.has_places or visit.is_coming for visit in self._visits.values()
        ):
            return None
        left = MOST_UNITS
        parts: dict[int, tuple[float, ...]] = {}
        for visit in self._visits.values():
            found = visit.parts_left(left)
            if found is None:
                return None
            left -= len(found)
            if visit.status == "open":
                parts[visit.spec.visit] = found
        if self._moves_much(parts):
            return None
        ready = dict.fromkeys(parts, now)
        free = {}
        for number, device in self._queues.items():
            if device.alive:
                ends = device.ends(now)
                free[number] = ends[-1][1] if ends else now
                ready |= {visit: moment for visit, moment in ends if visit in parts}
        asked_again = free[queue.number]
        if not queue.given:
            asked_again = min((at for at in free.values() if at > now), default=math.inf)
        for number, (first, *others) in [each for each in parts.items() if each[1]]:
            if number not in candidates:
                for place in self._visits[number].bound_to:
                    free[place] = ready[number] = max(free[place], ready[number]) + first
                    parts[number] = tuple(others)
        return Outlook(
            [*free].index(queue.number),
            tuple(free.values()),
            {number: Chain(ready[number], parts[number]) for number in parts},
            asked_again if asked_again < math.inf else None,
        )

    def _moves_much(self, parts: Mapping[int, Sequence[float]]) -> bool:
        """Return whether loads take a good part of the time that is left, by visit in parts."""
        specs = {number: self._visits[number].spec for number in parts}
        loads = sum(
            len(found) * (len(specs[number].shards) if specs[number].stays else 1)
            for number, found in parts.items()
        )
        return loads * self.load_seconds > MOST_MOVING * sum(map(sum, parts.values()))

    def loaded(self, seconds: float) -> None:
        """Note how long a load took."""
        self.load_seconds = (self.load_seconds + seconds) / 2

    def forget_homes(self) -> None:
        """Note that other visits stay on devices now."""
        self._homes = None

    def is_lacking(self, unit: Unit | None) -> bool:
        """Return whether there is no unit, or a shard of it has not come."""
        if unit is None:
            return True
        blocks = map(self._ledger.get, unit.keys)
        return any(block is None or block.home == "receiving" for block in blocks)

    def _can_take(self, queue: DeviceQueue, visit: Visit, unit: Unit) -> bool:
        """Return whether the unit can come to the device and end there, whatever else goes on."""
        spec = visit.spec
        if visit.staying and queue.number not in visit.staying and not visit.has_places:
            return False
        number = unit.keys[0].number
        nbytes, host_nbytes = spec.on_device(number), spec.shards[number].state
        nbytes += spec.shards[number].activations
        if spec.stays and (unit.starts_microbatch or visit in queue.staying):
            nbytes, host_nbytes = visit.share_on(queue.number).need, spec.host_state_bytes
            if unit.starts_microbatch and not self._may_stay(queue, visit):
                return False
        host = host_nbytes + self.kept_in_dram(but=visit) + self._ledger.host_pinned
        return host <= self._ledger.host_budget and nbytes <= queue.budget - queue.pinned(but=visit)

    def _may_stay(self, queue: DeviceQueue, visit: Visit) -> bool:
        """Return whether a microbatch, or a pipelined window, may begin to stay on its devices.

        It takes all of them at once, and each must have nothing reserved for another visit then,
        and no other visit that goes on staying. That is why visits never wait for one another in a
        circle: a unit is reserved only if it fits beside all that stays by then, so it waits for a
        visit that began to stay later, and that one for a unit which was reserved still later. The
        last of such a chain waits for nobody.
        """
        return all(
            place.alive
            and place.reserved is None
            and all(each is visit or place.is_ending(each) for each in place.staying)
            for place in self._places(queue, visit)
            if visit not in place.staying or place.is_ending(visit)
        )

    def _places(self, queue: DeviceQueue, visit: Visit) -> list[DeviceQueue]:
        """Return the devices on which a visit stays that begins to on this one."""
        return [self._queues[k] for k in visit.devices_left] if visit.has_places else [queue]

    def kept_in_dram(self, but: Visit) -> int:
        """Return the bytes of DRAM that microbatches keep as the homes of what is on a device."""
        if self._homes is None:
            staying = (visit for queue in self._queues.values() for visit in queue.staying)
            keeping = {each.spec.visit: each.spec for each in staying if each.spec.keeps_all}
            self._homes = {number: spec.state_bytes for number, spec in keeping.items()}
            self._homes_bytes = sum(self._homes.values())
        return self._homes_bytes - self._homes.get(but.spec.visit, 0)
