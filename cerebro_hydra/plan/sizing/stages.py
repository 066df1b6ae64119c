"""Groups the units of a model into stages, one for each device of a pipeline.

A stage is a contiguous range of units on one device; devices may be of unequal speed, links of
unequal bandwidth. What a stage gives the next one goes over a link, and its gradient comes back;
a link is busy meanwhile like a device. With t of each device and link for a microbatch, m of them
take at most sum(t) + (m - 1) * max(t) seconds, and GPipe takes just that where backwards are as
many times forwards on each device. `balanced_stages` finds the least of it: the objective of
synchronous pipelines (Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for
Distributed Deep Learning", OSDI 2022, section 5). Where nothing is flushed, m is all microbatches
of a sub-epoch, and max(t) is what counts: `fastest_stages` finds the least of that by the dynamic
programme of PipeDream (Narayanan et al., SOSP 2019, section 3.1), without replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations
from math import inf

MOST_REORDERED = 6
"""Of so many devices every order is tried; more are taken in the order in which they are given."""

Fits = Callable[[range, int, int], bool]
"""Whether a device holds these units as the stage of this number: units, stage, device."""


@dataclass(frozen=True, slots=True)
class UnitCost:
    """Describes a unit: what no stage parts.

    Args:
        seconds: of forward and backward of one microbatch on a device of speed 1.
        boundary: bytes of one microbatch's input and of its gradient.
        weights: bytes of the parameters.
        beside: bytes of gradients and optimizer state, which have one version.
        activations: bytes that a forward of one microbatch leaves for its backward.
    """

    seconds: float
    boundary: int = 0
    weights: int = 0
    beside: int = 0
    activations: int = 0


@dataclass(frozen=True, slots=True)
class PipelineDevices:
    """Describes the devices of a worker.

    Args:
        speeds: how many times as fast each device is as that which units were measured on.
        links: bytes per second from each device to each other one; none are infinitely fast.
    """

    speeds: tuple[float, ...]
    links: tuple[tuple[float, ...], ...] = ()

    def bandwidth(self, sender: int, receiver: int) -> float:
        """Return the bytes per second of a link."""
        return self.links[sender][receiver] if self.links else inf


@dataclass(frozen=True, slots=True)
class Stages:
    """Tells which units are a stage, and which device has it.

    Args:
        units: the range of each stage.
        devices: the device of each stage.
        busy: seconds of each stage for a microbatch.
        sending: seconds of the link into each stage for a microbatch; 0 for the first.
    """

    units: tuple[range, ...]
    devices: tuple[int, ...]
    busy: tuple[float, ...]
    sending: tuple[float, ...]

    @property
    def slowest(self) -> float:
        """Return the seconds for a microbatch of the slowest device or link."""
        return max(*self.busy, *self.sending)

    def seconds(self, microbatches: int) -> float:
        """Return what so many microbatches take at most from the first forward on."""
        return sum(self.busy) + sum(self.sending) + (microbatches - 1) * self.slowest


def fastest_stages(
    units: Sequence[UnitCost], devices: PipelineDevices, fits: Fits | None = None
) -> Stages:
    """Return the stages, one for each device, whose slowest device or link is fastest.

    Raises:
        ValueError: there are fewer units than devices, or no stages fit.
    """
    found = [line.fastest() for line in _lines(units, devices, fits)]
    return _best(found, lambda stages: stages.slowest)


def balanced_stages(
    units: Sequence[UnitCost],
    devices: PipelineDevices,
    microbatches: int,
    fits: Fits | None = None,
) -> Stages:
    """Return the stages, one for each device, with which a window takes the least time.

    For each time that the slowest device or link could have, a dynamic programme finds the stages
    of least sum that are nowhere slower.

    Raises:
        ValueError: there are fewer units than devices, or no stages fit.
    """
    found = [line.balanced(microbatches) for line in _lines(units, devices, fits)]
    return _best(found, lambda stages: stages.seconds(microbatches))


def versions_held(schedule: str, place: int, stages: int, updates: int, sync: bool = False) -> int:
    """Return the most versions of its weights that a stage has, over so many updates.

    Args:
        place: the stage, which counts from 0.
        sync: whether PipeDream has vertical sync.
    """
    most = {"pipedream": stages if sync else stages - place, "2bw": 2}.get(schedule, 1)
    return min(most, updates)


def stashes_held(schedule: str, place: int, stages: int, window: int, microbatches: int) -> int:
    """Return the most microbatches that a stage has between forward and backward at once.

    It is right for one range of units on each device, so not for "interleaved".
    """
    if schedule == "sequential":
        return 1
    if schedule == "gpipe":
        return min(window, microbatches)
    behind = stages - place
    return min(behind, window, microbatches) if schedule == "1f1b" else min(behind, microbatches)


def stage_bytes(
    units: Sequence[UnitCost], versions: int, stashes: int, recompute: bool, first: bool
) -> int:
    """Return the most bytes that a stage has on its device.

    Args:
        versions: of its weights.
        stashes: microbatches between forward and backward.
        recompute: whether they leave the input of the stage alone, of which a backward computes
            the activations again.
        first: whether it is the first stage, whose input is the batch and counts elsewhere.
    """
    state = sum(versions * unit.weights + unit.beside for unit in units)
    activations = sum(unit.activations for unit in units)
    if not recompute:
        return state + stashes * activations
    inputs = 0 if first else units[0].boundary // 2  # without its gradient
    return state + stashes * inputs + activations


class _Line:
    """Finds the stages of devices in one order."""

    def __init__(
        self,
        units: Sequence[UnitCost],
        devices: PipelineDevices,
        order: tuple[int, ...],
        fits: Fits | None,
    ) -> None:
        self._units, self._order, self._fits = units, order, fits
        self._speeds = [devices.speeds[each] for each in order]
        self._links = [inf, *(devices.bandwidth(a, b) for a, b in pairwise(order))]
        self._ends = [0.0, *accumulate(unit.seconds for unit in units)]

    def fastest(self) -> Stages | None:
        """Return the stages whose slowest device or link is fastest; None if none fit."""
        return self._stages(max, inf)

    def balanced(self, microbatches: int) -> Stages | None:
        """Return the stages of least time for a window; None if none fit."""
        fastest, shortest = self.fastest(), self._stages(lambda a, b: a + b, inf)
        if fastest is None or shortest is None:
            return None
        least = sum(shortest.busy) + sum(shortest.sending)
        best = shortest
        for slowest in sorted(self._times()):
            if least + (microbatches - 1) * slowest >= best.seconds(microbatches):
                break  # nothing that is slower can be better
            if slowest >= fastest.slowest:
                found = self._stages(lambda a, b: a + b, slowest)
                if found is not None and found.seconds(microbatches) < best.seconds(microbatches):
                    best = found
        return best

    def _stages(self, add: Callable[[float, float], float], slowest: float) -> Stages | None:
        """Return the stages of least cost, which `add` makes of their times; none is slower."""
        count, last = len(self._units), len(self._order) - 1
        # cost[end] is the least cost of the stages so far with units[:end]; begins has the last's
        cost = [0.0] + [inf] * count
        begins: list[list[int]] = []
        for place in range(last + 1):
            better, begin_of = [inf] * (count + 1), [0] * (count + 1)
            for end in range(place + 1, count - (last - place) + 1):
                for begin in range(place, end):
                    if cost[begin] == inf:
                        continue
                    busy, sending = self._busy(place, begin, end), self._sending(place, begin)
                    if max(busy, sending) > slowest or not self._holds(place, begin, end):
                        continue
                    total = add(add(cost[begin], busy), sending)
                    if total < better[end]:
                        better[end], begin_of[end] = total, begin
            cost = better
            begins.append(begin_of)
        if cost[count] == inf:
            return None
        ranges: list[range] = []
        end = count
        for begin_of in reversed(begins):
            ranges.insert(0, range(begin_of[end], end))
            end = begin_of[end]
        return Stages(
            tuple(ranges),
            self._order,
            tuple(self._busy(q, each.start, each.stop) for q, each in enumerate(ranges)),
            tuple(self._sending(q, each.start) for q, each in enumerate(ranges)),
        )

    def _times(self) -> set[float]:
        """Return every time that a device or link could have for a microbatch."""
        count = len(self._units)
        found = set[float]()
        for place in range(len(self._order)):
            for begin in range(place, count):
                found.add(self._sending(place, begin))
                found |= {self._busy(place, begin, end) for end in range(begin + 1, count + 1)}
        return found

    def _busy(self, place: int, begin: int, end: int) -> float:
        return (self._ends[end] - self._ends[begin]) / self._speeds[place]

    def _sending(self, place: int, begin: int) -> float:
        return self._units[begin].boundary / self._links[place]

    def _holds(self, place: int, begin: int, end: int) -> bool:
        return self._fits is None or self._fits(range(begin, end), place, self._order[place])


def _lines(
    units: Sequence[UnitCost], devices: PipelineDevices, fits: Fits | None
) -> Iterator[_Line]:
    if len(units) < len(devices.speeds):
        raise ValueError(
            f"{len(units)} units can't be stages of {len(devices.speeds)} devices; cut the model "
            "finer, or take fewer devices"
        )
    return (_Line(units, devices, order, fits) for order in _orders(devices, fits is not None))


def _orders(devices: PipelineDevices, told_apart: bool) -> Iterator[tuple[int, ...]]:
    """Yield the orders of devices that are tried, one of those that are alike."""
    numbers = tuple(range(len(devices.speeds)))
    if len(numbers) > MOST_REORDERED:
        yield numbers
        return
    seen = set[tuple[object, ...]]()
    for order in permutations(numbers):
        links = tuple(devices.bandwidth(a, b) for a, b in pairwise(order))
        alike = tuple(devices.speeds[each] for each in order), links, order if told_apart else ()
        if alike not in seen:
            seen.add(alike)
            yield order


def _best(found: Sequence[Stages | None], cost: Callable[[Stages], float]) -> Stages:
    stages = [each for each in found if each is not None]
    if not stages:
        raise ValueError("no stages fit the devices; cut the model finer, or take more devices")
    return min(stages, key=cost)
