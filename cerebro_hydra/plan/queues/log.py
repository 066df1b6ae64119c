"""Logs what the devices of a worker do, from the events that its queues hear and what they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cerebro_hydra.plan.messages.actions import HOST, ActionKind
from cerebro_hydra.plan.messages.device_work import DeviceWork, Span, add_span, coarsened
from cerebro_hydra.plan.messages.events import DevicesWorked
from cerebro_hydra.plan.queues.events import ActionDone, VisitAdded, WorkerEvent
from cerebro_hydra.plan.queues.worker import WorkerState

MOST_SPANS = 16
"""Spans of tasks, and as many of moves, that a report has of a device."""

_DIGITS = 4


@dataclass(slots=True)
class _Place:
    computing: float = 0.0
    copying: float = 0.0
    promoted: int = 0
    spilled: int = 0
    peak: int = 0
    tasks: list[Span] = field(default_factory=list)
    moves: list[Span] = field(default_factory=list)


class DeviceLog:
    """Sums up the work of each device, and of DRAM, between two reports.

    It knows no clock: whoever drives the queues says when something happened.

    Args:
        state: the queues.
        trial_of: returns the trial of a visit.
    """

    def __init__(self, state: WorkerState, trial_of: Callable[[int], int]) -> None:
        self._state = state
        self._trial_of = trial_of
        self._begun: float | None = None
        self._places = {place: _Place() for place in (*state.queues, HOST)}

    def hear(self, now: float, events: Sequence[WorkerEvent]) -> None:
        """Note what has ended now; the time that is told of begins with the first visit.

        Tasks of one device that end at once are those of a unit, which it did one after the other.
        """
        computed = [e for e in events if isinstance(e, ActionDone) and e.action.kind.computes]
        later = {event.action.device: 0.0 for event in computed}
        for each in computed:
            later[each.action.device] += each.seconds
        for event in events:
            if self._begun is None and isinstance(event, VisitAdded):
                self._begun = now
            elif isinstance(event, ActionDone) and (device := event.action.device) is not None:
                end = now
                if event.action.kind.computes:
                    later[device] -= event.seconds
                    end -= later[device]
                self._note(end, event, self._places[device])

    def look(self) -> None:
        """Note how many bytes are in use, after the queues have decided."""
        for place, each in self._places.items():
            each.peak = max(each.peak, self._state.used(place))

    def report(self, incarnation: str, now: float) -> DevicesWorked:
        """Return what was done since the report before, and begin anew."""
        begun, self._begun = self._begun, now
        places, self._places = self._places, {place: _Place() for place in self._places}
        self.look()
        works = tuple(self._work(*place) for place in places.items())
        return DevicesWorked(incarnation, 0.0 if begun is None else now - begun, works)

    def _note(self, now: float, done: ActionDone, place: _Place) -> None:
        kind, begun = done.action.kind, now if self._begun is None else self._begun
        if kind.computes:
            place.computing += done.seconds
        else:
            place.copying += done.seconds
        if kind is ActionKind.LOAD:
            place.promoted += done.nbytes
        elif kind is ActionKind.SPILL:
            place.spilled += done.nbytes
        begin, end = max(now - begun - done.seconds, 0.0), now - begun
        if end <= 0:
            return  # it is told of only now, with the rest of its unit, and was over before
        work = ((self._trial_of(done.action.trial), done.seconds),)
        spans = place.tasks if kind.computes else place.moves
        add_span(spans, (begin, end, work), 8 * MOST_SPANS)

    def _work(self, number: int, place: _Place) -> DeviceWork:
        budget = self._state.budget(number)
        return DeviceWork(
            number,
            place.computing,
            place.copying,
            place.promoted,
            place.spilled,
            place.peak,
            None if math.isinf(budget) else int(budget),
            _shortened(place.tasks),
            _shortened(place.moves),
        )


def _shortened(spans: list[Span]) -> tuple[Span, ...]:
    return tuple(
        (
            round(begin, _DIGITS),
            round(end, _DIGITS),
            tuple((trial, round(seconds, _DIGITS)) for trial, seconds in work),
        )
        for begin, end, work in coarsened(spans, MOST_SPANS)
    )
