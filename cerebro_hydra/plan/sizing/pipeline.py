"""Chooses the stages of a trial's pipeline by the measured seconds and bytes of its shards.

A stage is a contiguous range of shards on one device of a worker. Devices of a worker are alike,
and every task copies what it gives to DRAM wherever the next one runs, so that no link decides. A
synchronous schedule takes the stages of `balanced_stages`, one that flushes nothing those of
`fastest_stages`, in both cases such that no device spills if there are such stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.queues.pick import DEFAULT_PICK, PICKS
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.schedules.registry import is_flushed, is_pipelined, with_versions
from cerebro_hydra.plan.simulate.worker import WorkerSimulation
from cerebro_hydra.plan.sizing.stages import (
    Fits,
    PipelineDevices,
    UnitCost,
    balanced_stages,
    fastest_stages,
    stage_bytes,
    stashes_held,
    versions_held,
)

AUTO = "auto"

HAND_OVER_SECONDS = 0.002
"""From the end of a task to the begin of one on another device that waits for it
(`benchmarks/pipeline/delay.py`): an answer, a decision, an order, and two processes that wake."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Says how a trial is spread over the devices of a worker.

    Args:
        schedule: a name of `SCHEDULES`.
        devices: how many the worker has.
        budget: the bytes of the smallest of them; None means no limit.
        staleness: see `TaskGraph`.
        stages: how many shards each stage has. None is named where measured times decide, by which
            no bit is other.
        vertical_sync: see `Recipe`; only `chosen` looks at it.
    """

    schedule: str = "sequential"
    devices: int = 1
    budget: int | None = None
    staleness: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    vertical_sync: bool = False

    def settled(
        self, asked: str | int | Sequence[int], visit: VisitSpec, weights: Sequence[int]
    ) -> Pipeline:
        """Return the pipeline with all that results depend on, or that was asked for.

        It stays so for the whole trial, on however many devices that goes on.

        Args:
            asked: "auto", a number of stages, or how many shards each of them has.
            visit, weights: see `chosen`.

        Raises:
            ConfigurationError: there are no such stages, or the schedule can't have what the trial
                demands of it.
        """
        if not is_pipelined(self.schedule) or (asked == AUTO and is_flushed(self.schedule)):
            return self
        shards = visit.graph.shards
        if isinstance(asked, str | int):
            number = asked if isinstance(asked, int) else min(self.devices, shards)
            if number > shards:
                raise ConfigurationError(
                    f"stages is {number}, and the model is cut into {shards} shards; take at most "
                    f"{shards} stages, or a model with more blocks"
                )
            sizes = self.chosen(visit, weights, number)
        else:
            sizes = tuple(asked)
            if sum(sizes) != shards:
                raise ConfigurationError(
                    f"stages is {list(sizes)}, which are {sum(sizes)} shards, and the model is cut "
                    f"into {shards}; let the numbers add up to {shards}"
                )
        graph = replace(visit.graph, stage_sizes=sizes)
        graph = with_versions(graph, self.schedule, len(sizes), self.vertical_sync)
        staleness = graph.staleness if any(graph.staleness) else ()
        return replace(self, stages=sizes, staleness=staleness)

    def staged(self, visit: VisitSpec, weights: Sequence[int]) -> VisitSpec:
        """Return the visit with the stages that take the least time, unless they are settled.

        Args:
            weights: the bytes of a version of each shard's weights.
        """
        number = min(visit.devices, visit.graph.shards)
        if self.schedule == "interleaved" and visit.graph.training:
            number *= visit.graph.shards // number
        settled = self.stages or self.staleness or not visit.is_pipelined
        if settled or number in (1, visit.graph.shards):
            return visit
        sizes = self.chosen(visit, weights, number)
        return replace(visit, graph=replace(visit.graph, stage_sizes=sizes))

    def chosen(self, visit: VisitSpec, weights: Sequence[int], number: int) -> tuple[int, ...]:
        """Return how many shards each of so many stages has, where that takes the least time.

        Args:
            visit: of the trial, whose shards have the bytes of one version of their weights.
            weights: the bytes of a version of each shard's weights.
        """
        window = visit.graph.window
        graph = replace(visit.graph, microbatches=window, stage_sizes=())
        visit = replace(visit, visit=0, graph=graph, source=None)
        return _chosen(self, visit, tuple(weights), number)


ALONE = Pipeline()
"""One device does one task after the other."""


@lru_cache(maxsize=1024)
def _chosen(
    pipeline: Pipeline, visit: VisitSpec, weights: tuple[int, ...], number: int
) -> tuple[int, ...]:
    window = visit.graph.window
    units = [
        UnitCost(
            shard.forward + shard.backward + shard.update / window,
            weights=nbytes,
            beside=max(0, shard.state - nbytes),
            activations=shard.activations,
        )
        for shard, nbytes in zip(visit.device_shards, weights, strict=True)
    ]
    devices = PipelineDevices((1.0,) * number)
    attempts: list[Fits | None] = [None]
    if pipeline.budget is not None and number <= pipeline.devices:
        attempts.insert(0, _holds(pipeline, visit, units, number, pipeline.budget))
    for fits in attempts:
        with suppress(ValueError):  # no stages fit
            if is_flushed(pipeline.schedule):
                found = balanced_stages(units, devices, window, fits)
            else:
                found = fastest_stages(units, devices, fits)
            return tuple(map(len, found.units))
    raise AssertionError(f"{len(units)} shards are at least {number} stages")


def _holds(
    pipeline: Pipeline, visit: VisitSpec, units: Sequence[UnitCost], number: int, budget: int
) -> Fits:
    """Return what tells whether a device holds a stage with its tasks, so that it spills nothing.

    The bytes are those of `VisitSpec.shares`.
    """
    schedule, window, last = pipeline.schedule, visit.graph.window, number - 1
    updates = number + 1  # enough for the most versions and stashes that there can be

    def holds(stage: range, place: int, _: int) -> bool:
        versions = versions_held(schedule, place, number, updates, pipeline.vertical_sync)
        held = [units[k] for k in stage]
        if not visit.keeps_all:
            state = stage_bytes([replace(unit, activations=0) for unit in held], versions, 0, True,
                                True)  # fmt: skip
            return state + max(unit.activations for unit in held) <= budget
        stashes = stashes_held(schedule, place, number, window, window * updates)
        transient = 0 if place == last else units[-1].activations
        kept = stage_bytes(held, versions, stashes, False, place == 0)
        return kept + stashes * visit.boundary_bytes + transient <= budget

    return holds


def step_seconds(visit: VisitSpec) -> float:
    """Return the predicted seconds of a window of the visit on devices that hold its stages.

    Queues decide on a virtual clock, in which tasks take what was measured, moves take nothing, and
    a device hears of another one's task after `HAND_OVER_SECONDS`. Of a schedule that does not
    flush it is a window in the midst of many.
    """

    def seconds(action: Action) -> float:
        shard = visit.shards[action.shard]
        return shard.seconds(action.kind) if action.kind.computes else 0.0

    def makespan(windows: int) -> float:
        graph = replace(visit.graph, microbatches=windows * visit.graph.window)
        alone, plenty = replace(visit, visit=0, graph=graph, source=None), (None,) * visit.devices
        rule = PICKS[DEFAULT_PICK]
        simulation = WorkerSimulation(
            [alone], plenty, None, rule, seconds, hand_over=HAND_OVER_SECONDS
        )
        return simulation.run().makespan

    if is_flushed(visit.schedule):
        return makespan(1)
    filled = 2 * visit.devices
    return (makespan(2 * filled) - makespan(filled)) / filled


def stage_seconds(visit: VisitSpec) -> list[float]:
    """Return what a microbatch takes in each stage, with its part of the update."""
    spent = _shard_seconds(visit)
    return [sum(spent[k] for k in stage) for stage in _stages(visit)]


def _shard_seconds(visit: VisitSpec) -> list[float]:
    window = visit.graph.window
    return [each.forward + each.backward + each.update / window for each in visit.shards]


def _stages(visit: VisitSpec) -> list[range]:
    number = min(visit.devices, visit.graph.most_stages)
    if visit.schedule == "interleaved":
        number *= visit.graph.most_stages // number
    return visit.graph.stages(number)


def stages_text(visit: VisitSpec) -> str:
    """Return which shards make which stage, why each begins where it does, and the time of a step.

    Args:
        visit: of a sub-epoch, in a pipeline.
    """
    stages, taken = _stages(visit), stage_seconds(visit)
    total, window = sum(taken), visit.graph.window
    devices = min(visit.devices, len(stages))
    own = len(visit.graph.stage_sizes)
    joined = f": neighbours of the trial's {own} share a device" if own > len(stages) else ""
    lines = [f"  {len(stages)} stages for schedule {visit.schedule!r} on {devices} devices{joined}"]
    for place, (stage, seconds) in enumerate(zip(stages, taken, strict=True)):
        first, last = stage.start, stage.stop - 1
        which = f"shard {first}" if first == last else f"shards {first} to {last}"
        why = _why(visit, stages, place) if place else ""
        lines.append(
            f"    stage {place} on device {place % devices}: {which}, {_ms(seconds)} of a batch's "
            f"{_ms(total)}{why}"
        )
    step = step_seconds(visit)
    lines.append(
        f"    a step of {window} batch{'es' * (window > 1)} takes {_ms(step)} by these times, and "
        f"{_ms(window * total)} on one device"
    )
    return "\n".join(lines)


def _why(visit: VisitSpec, stages: Sequence[range], place: int) -> str:
    """Return what the two stages would take if the boundary before a stage lay elsewhere."""
    shards, taken = _shard_seconds(visit), stage_seconds(visit)
    before, here = taken[place - 1], taken[place]
    first, elsewhere = stages[place].start, {}
    if len(stages[place - 1]) > 1:
        elsewhere["earlier"] = max(before - shards[first - 1], here + shards[first - 1])
    if len(stages[place]) > 1:
        elsewhere["later"] = max(before + shards[first], here - shards[first])
    slower = max(before, here)
    if not elsewhere:
        return " (each of the two stages at this boundary has one shard)"
    told = " and ".join(f"{_ms(seconds)} a shard {where}" for where, seconds in elsewhere.items())
    better = min(elsewhere.values()) < slower
    other = "; another stage is slower" if slower < max(taken) else "; memory, or stages=, decides"
    return (
        f" (the slower stage at this boundary takes {_ms(slower)}; it would be {told}"
        f"{other if better else ''})"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
