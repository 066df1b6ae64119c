"""Tells in bounded space what a device did: which trials it worked for when, bytes, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cerebro_hydra.documents import Count, within
from cerebro_hydra.plan.messages.actions import HOST

Seconds = Annotated[float, within(0)]

Span = tuple[Seconds, Seconds, tuple[tuple[Count, Seconds], ...]]
"""A begin, an end, and the seconds of work in between, by trial; the rest of the time is idle."""

_GRAIN = 2**-10
"""The seconds that two spans may fill together to be joined first."""


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Tells what a device did in a while.

    The seconds of ``tasks`` and ``moves`` count from when that began. For ``HOST`` it tells of
    DRAM: what was read from disk is ``promoted``, what was written there is ``spilled``. ``peak``
    is the most bytes that were in use at once.
    """

    device: Annotated[int, within(HOST)]
    computing: Seconds
    copying: Seconds
    promoted: Count
    spilled: Count
    peak: Count
    budget: Count | None
    tasks: tuple[Span, ...] = ()
    moves: tuple[Span, ...] = ()


def coarsened(spans: Sequence[Span], most: int) -> list[Span]:
    """Return at most so many spans: tasks of one trial are joined, and whatever is short.

    Both ends and the seconds of each trial stay; what is lost is where exactly it was idle.
    """
    found, grain = list(spans), _GRAIN
    while len(found) > most:
        found, grain = _joined(found, grain), 2 * grain
    return found


def add_span(spans: list[Span], span: Span, most: int) -> None:
    """Add a span to those before it, which stay at most so many.

    Moves that ran side by side become one span; a moment by which two clocks differ is cut off.
    """
    begin, end, work = span
    if spans and begin < (busy := spans[-1][1]):
        if busy - begin > (end - begin) / 2:
            spans[-1] = _join(spans[-1], span)
            return
        begin = busy
    spans.append((begin, end, work))
    if len(spans) > most:
        spans[:] = coarsened(spans, most // 2)


def _joined(spans: Sequence[Span], grain: float) -> list[Span]:
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last is not None and (span[1] - last[0] <= grain or _goes_on(last, span, grain)):
            found[-1] = _join(last, span)
        else:
            found.append(span)
    return found


def _goes_on(last: Span, span: Span, grain: float) -> bool:
    """Return whether the device went on with the one trial that it had worked for."""
    alone = len(last[2]) == len(span[2]) == 1 and last[2][0][0] == span[2][0][0]
    return alone and span[0] - last[1] <= grain


def _join(first: Span, second: Span) -> Span:
    seconds = dict(first[2])
    for trial, more in second[2]:
        seconds[trial] = seconds.get(trial, 0.0) + more
    return first[0], max(first[1], second[1]), tuple(seconds.items())
