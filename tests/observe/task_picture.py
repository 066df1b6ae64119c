"""Draws what each device computed when, task by task, as an SVG picture.

The tasks are those of a timeline of ``plan/simulate/worker.py``, in which the queues of a worker
run on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from cerebro_hydra.plan.messages.actions import ActionKind
from cerebro_hydra.plan.simulate.worker import DoneAction

# Of the palette of Okabe and Ito, as in the report; colour-blind people tell the colours apart.
_COLOURS = {ActionKind.F: "#56b4e9", ActionKind.B: "#e69f00"}
_UPDATE, _IDLE, _INK = "#009e73", "#f1f2f4", "#3c3f46"

_SECOND = 9.0
"""Pixels of a second, so that pictures of one scale can be laid below one another."""
_LANE, _GAP, _LEFT, _TOP = 20, 4, 64, 6
_DIGIT = 6.0


def task_picture(done: Sequence[DoneAction], devices: int) -> str:
    """Return a picture with a lane for each device, and the seconds below them.

    Blue are forwards and orange are backwards, with the numbers of their microbatches where there
    is room; a green line is an update. Tasks of a device's second and further ranges of shards are
    paler.

    Args:
        done: actions with their devices; those that compute are drawn.
        devices: the number of lanes.
    """
    tasks = sorted((each for each in done if each.action.kind.computes), key=lambda e: e.begin)
    end = max((each.end for each in tasks), default=0.0)
    width, height = _LEFT + end * _SECOND + 8, _TOP + devices * (_LANE + _GAP) + 18
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="sans-serif" font-size="10">',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]
    for device in range(devices):
        top = _TOP + device * (_LANE + _GAP)
        middle = top + _LANE / 2 + 3.5
        lines.append(f'<text x="4" y="{middle:g}" fill="{_INK}">device {device}</text>')
        lines.append(_box(0.0, end, top, _IDLE))
        mine = [each for each in tasks if each.action.device == device]
        ranges = _ranges(sorted({each.action.shard for each in mine}))
        for each in (one for one in mine if one.action.kind is not ActionKind.U):
            lines += _pass(each, top, paler=ranges[each.action.shard] > 0)
        lines += [_update(one.end, top) for one in mine if one.action.kind is ActionKind.U]
    lines += _scale(end, height)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _pass(each: DoneAction, top: float, paler: bool) -> list[str]:
    """Return a forward or backward, with its microbatch where there is room for the number."""
    box = _box(each.begin, each.end, top, _COLOURS[each.action.kind], 0.5 if paler else 1.0)
    if (each.end - each.begin) * _SECOND < _DIGIT * len(str(each.action.microbatch)):
        return [box]
    x, y = _LEFT + (each.begin + each.end) / 2 * _SECOND, top + _LANE / 2 + 3.5
    place = f'x="{x:g}" y="{y:g}" text-anchor="middle" fill="{_INK}"'
    return [box, f"<text {place}>{each.action.microbatch}</text>"]


def _update(moment: float, top: float) -> str:
    x = _LEFT + moment * _SECOND
    ends = f'x1="{x:g}" y1="{top:g}" x2="{x:g}" y2="{top + _LANE:g}"'
    return f'<line {ends} stroke="{_UPDATE}" stroke-width="2"/>'


def _box(begin: float, end: float, top: float, colour: str, opacity: float = 1.0) -> str:
    x, width = _LEFT + begin * _SECOND, (end - begin) * _SECOND
    place = f'x="{x:g}" y="{top:g}" width="{width:g}" height="{_LANE}"'
    pale = "" if opacity == 1 else f' fill-opacity="{opacity:g}"'
    return f'<rect {place} fill="{colour}"{pale} stroke="white" stroke-width="0.5"/>'


def _scale(end: float, height: float) -> list[str]:
    step = 10 if end > 20 else 5
    return [
        f'<text x="{_LEFT + second * _SECOND:g}" y="{height - 5:g}" text-anchor="middle" '
        f'fill="{_INK}">{second}</text>'
        for second in range(0, int(end) + 1, step)
    ]


def _ranges(shards: Sequence[int]) -> dict[int, int]:
    """Return for each shard of a device in which of its contiguous ranges it is."""
    runs = groupby(enumerate(shards), key=lambda pair: pair[1] - pair[0])
    return {shard: number for number, (_, run) in enumerate(runs) for _, shard in run}
