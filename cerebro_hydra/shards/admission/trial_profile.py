"""Describes a trial to the queues of workers: bytes of its shards, and what its tasks need."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from cerebro_hydra.documents import decode
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.registry import is_flushed, is_pipelined
from cerebro_hydra.plan.schedules.trial_plan import TrialPlan
from cerebro_hydra.plan.sizing.pipeline import ALONE, Pipeline
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.cut.torch_cond import is_of_cond, leave_cond, plain_branches
from cerebro_hydra.shards.engine.layout import ShardBytes, TrialLayout
from cerebro_hydra.storage.run_document import TrialSpec

Needs = tuple[ShardSpec, ...]
"""What the tasks of each shard need; the bytes of its state are not among them."""


@dataclass(frozen=True, slots=True)
class CrossingBytes:
    """Says what a microbatch leaves for other devices where every device keeps its activations.

    Args:
        batch: the bytes of the batch, and of what is read while another shard than its own runs.
        values: of each value the shard that makes it, the last one that it comes to, its bytes.
        gradients: of each gradient the shard whose backward makes it, the last one that it leaves,
            its bytes.
    """

    batch: int
    values: tuple[tuple[int, int, int], ...]
    gradients: tuple[tuple[int, int, int], ...]

    def left(self, crossings: Collection[int], shards: int) -> tuple[int, ...]:
        """Return the bytes that tasks of each shard leave, if these begin other devices' ranges.

        What crosses several times is stored once.
        """
        left = [self.batch] + [0] * (shards - 1)
        for made, last, nbytes in self.values:
            if crossed := [k for k in crossings if made < k <= last]:
                left[min(crossed) - 1] += nbytes
        for made, last, nbytes in self.gradients:
            if crossed := [k for k in crossings if last <= k <= made]:
                left[max(crossed)] += nbytes
        return tuple(left)


UNWATCHED = 1 << 62
"""More bytes than a batch has, in place of those of the batch that was measured."""


@dataclass(frozen=True, slots=True)
class TaskProfile:
    """Holds what the tasks of a trial need for its largest batch, as they were measured.

    Args:
        evaluation: of the forwards of an evaluation.
        keep: of training that keeps activations; None if no device could have them.
        recompute: of training that computes them again; None if that was not asked for, or the
            model can't be run so.
        shared: the parameters that are read while another shard than theirs runs.
        batch: the bytes of that batch, as the model takes it.
        moving: the bytes that tasks of each shard leave for others in a microbatch that goes from
            device to device; None where it can't.
        evaluated: the same of a microbatch of an evaluation.
        crossing: what a microbatch leaves where activations are kept; None if nobody measured it.
    """

    evaluation: Needs
    keep: Needs | None
    recompute: Needs | None
    shared: tuple[str, ...]
    batch: int
    moving: tuple[int, ...] | None = None
    evaluated: tuple[int, ...] | None = None
    crossing: CrossingBytes | None = None

    def training(self, recompute: bool) -> Needs:
        """Return the needs of training; those of the other way where this one was not measured."""
        asked, other = self.keep, self.recompute
        if recompute:
            asked, other = other, asked
        found = other if asked is None else asked
        assert found is not None, "training was measured in one way at least"
        return found

    def joined(self, parts: Sequence[range]) -> TaskProfile:
        """Return what tasks of these ranges of shards need, each as one shard, about.

        The last shard's backward follows its forward at once, so that it computes nothing again.
        """
        by_modules = self.moving is None

        def needs(units: Needs | None, fused: Needs | None = None) -> Needs | None:
            if units is None:
                return None
            ends: list[float | None] = [None] * len(parts)
            if fused is not None:
                ends[-1] = sum(fused[k].backward for k in parts[-1])
            return tuple(
                ShardSpec.joined(units[part.start : part.stop], by_modules, backward)
                for part, backward in zip(parts, ends, strict=True)
            )

        evaluation = needs(self.evaluation)
        assert evaluation is not None
        last = [part[-1] for part in parts]
        return replace(
            self,
            evaluation=evaluation,
            keep=needs(self.keep),
            recompute=needs(self.recompute, self.keep),
            moving=None if self.moving is None else tuple(self.moving[k] for k in last),
            evaluated=None if self.evaluated is None else tuple(self.evaluated[k] for k in last),
        )

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # lists for tuples
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TaskProfile:
        found: TaskProfile = decode(cls, dict(document), "what the tasks of a trial need")
        return found


def watchable(measure: Callable[[], TaskProfile]) -> TaskProfile:
    """Return what is measured; of a model with torch.cond, the most that any branch needs.

    Batches are not watched later on whose model has one, because it can't run so.
    """
    try:
        return measure()
    except Exception as error:
        if not is_of_cond(error):
            raise
        leave_cond()
    with plain_branches():
        found = [measure()]
    for taken in (True, False):
        with suppress(Exception), plain_branches(taken):  # one may not take what the other one can
            found.append(measure())
    return replace(functools.reduce(_most, found), batch=UNWATCHED, moving=None, evaluated=None,
                   crossing=None)  # fmt: skip


def _most(one: TaskProfile, other: TaskProfile) -> TaskProfile:
    """Return needs in which both profiles have room."""

    def needs(a: Needs | None, b: Needs | None) -> Needs | None:
        if a is None or b is None:
            return None
        return tuple(itertools.starmap(_more, zip(a, b, strict=True)))

    evaluation = needs(one.evaluation, other.evaluation)
    assert evaluation is not None
    return replace(
        one,
        evaluation=evaluation,
        keep=needs(one.keep, other.keep),
        recompute=needs(one.recompute, other.recompute),
        shared=tuple(sorted({*one.shared, *other.shared})),
    )


def _more(a: ShardSpec, b: ShardSpec) -> ShardSpec:
    names = ("activations", "boundary", "forward", "backward", "update")
    return replace(a, **{name: max(getattr(a, name), getattr(b, name)) for name in names})


def asked_recompute(recipe: Recipe) -> bool | None:
    """Return whether activations are to be computed again; None leaves it to the budget."""
    return recipe.recompute if isinstance(recipe.recompute, bool) else None


def _joined(units: Sequence[ShardBytes]) -> ShardBytes:
    """Return the bytes of the shard that neighbours make together."""
    return ShardBytes(
        sum(unit.frozen for unit in units),
        sum(unit.trainable for unit in units),
        sum(unit.gradients for unit in units),
        any(unit.forward_writes for unit in units),
        sum(unit.optimizer for unit in units),
        any(unit.averages for unit in units),
    )


@dataclass(frozen=True, slots=True)
class TrialProfile:
    """Describes a trial to the queues, in whichever process it was built.

    Args:
        shards: the bytes of each shard.
        tied: the groups of shards that share a parameter.
        barrier: whether all gradients come before any update.
        tasks: what tasks need beside the shards; None if nobody has measured that.
        build_seconds: what the user's factory took.
        uncut: whether the plain trainer trains it, as one whose training step is the user's own.
        at_home: whether optimizer state stays in DRAM; see `VisitSpec`.
    """

    shards: tuple[ShardBytes, ...]
    tied: tuple[tuple[int, ...], ...]
    barrier: bool
    tasks: TaskProfile | None = None
    build_seconds: float = 0.0
    uncut: bool = False
    at_home: bool = False

    @classmethod
    def of(
        cls, recipe: Recipe, cut_model: CutModel, layout: TrialLayout, tasks: TaskProfile | None
    ) -> TrialProfile:
        """Return the profile of a trial that was built."""
        return cls(
            tuple(map(ShardBytes.of, layout.shards)),
            tuple(cut_model.tied_groups),
            recipe.barrier,
            tasks,
            uncut=recipe.training_step is not None,
            at_home=recipe.optimizer_on == "host",
        )

    def recomputes(
        self,
        asked: bool | None,
        budget: int | None,
        window: int,
        pipeline: Pipeline = ALONE,
    ) -> bool:
        """Return whether a backward computes its forward again on devices with this budget."""
        if asked is not None:
            return asked
        if self.tasks is not None and None in (self.tasks.keep, self.tasks.recompute):
            return self.tasks.keep is None  # the other way is impossible
        kept = self.training(0, window, window, False, pipeline)
        return budget is not None and kept.device_need > budget

    def joined(self, cuts: Sequence[int]) -> TrialProfile:
        """Return about the profile of a coarser cut.

        Args:
            cuts: the present shards at which its shards but the first begin.
        """
        parts = [range(*pair) for pair in itertools.pairwise((0, *cuts, len(self.shards)))]
        shard_of = {unit: k for k, part in enumerate(parts) for unit in part}
        tied = (tuple(dict.fromkeys(shard_of[unit] for unit in group)) for group in self.tied)
        return replace(
            self,
            shards=tuple(_joined([self.shards[k] for k in part]) for part in parts),
            tied=tuple(group for group in tied if len(group) > 1),
            tasks=None if self.tasks is None else self.tasks.joined(parts),
        )

    def way(
        self,
        spec: TrialSpec,
        devices: int,
        budget: int | None,
        host: int | None = None,
        sparing: bool = False,
    ) -> tuple[bool, Pipeline]:
        """Return whether a trial's activations are computed again, and how it goes over devices.

        Its plan says so, if there is one that the worker can follow; else its own settings.

        Args:
            devices, budget, host: how many devices the worker has, the bytes of the smallest of
                them, and those of its DRAM; None means no limit.
            sparing: whether the trial has run out of memory while activations were kept.
        """
        if (plan := spec.plan) is not None and not sparing and plan.devices <= devices:
            planned = Pipeline(plan.schedule, plan.devices, budget)
            if self._fits(plan, planned, devices, spec.accumulate, host):
                return plan.recompute, planned
        own = Pipeline(spec.schedule, devices, budget, spec.staleness, spec.stages)
        return self.recomputes(spec.recompute, budget, spec.accumulate, own) or sparing, own

    def _fits(
        self, plan: TrialPlan, pipeline: Pipeline, devices: int, window: int, host: int | None
    ) -> bool:
        budgets = (math.inf if pipeline.budget is None else pipeline.budget,) * devices
        dram = math.inf if host is None else host
        visits = (
            self.training(0, window, window, plan.recompute, pipeline),
            self.evaluation(0, devices, pipeline),
        )
        return not any(visit.lacking(budgets, dram) for visit in visits)

    def kept_gradients(self, shard: int, graph: TaskGraph) -> int:
        """Return the bytes of a shard's gradients if they outlive a unit, else 0."""
        kept = graph.training and (graph.window > 1 or graph.barrier or bool(graph.tied))
        return self.shards[shard].gradients if kept else 0

    def versions(self, shard: int, graph: TaskGraph) -> int:
        """Return the bytes of a shard's older weights, which tasks read."""
        return graph.staleness[shard] * self.shards[shard].gradients if graph.staleness else 0

    def training(
        self,
        visit: int,
        microbatches: int,
        window: int,
        recompute: bool,
        pipeline: Pipeline = ALONE,
    ) -> VisitSpec:
        """Return the visit of a sub-epoch, whose microbatches may move among devices.

        They stay on one device where nobody knows what they would leave for another one. Tasks that
        read older weights are for so many devices at most that none waits for itself.
        """
        devices, schedule = pipeline.devices, pipeline.schedule
        graph = TaskGraph(
            len(self.shards), microbatches, window, self.barrier, self.tied,
            staleness=pipeline.staleness, stage_sizes=pipeline.stages,
        )  # fmt: skip
        if not is_flushed(schedule):
            devices = min(devices, graph.most_devices)
        kept = [self.kept_gradients(number, graph) for number in range(graph.shards)]
        if self.tasks is None:  # the least that tasks need are gradients that nobody keeps
            least = [s.gradients - own for s, own in zip(self.shards, kept, strict=True)]
            needs: Needs = tuple(ShardSpec(0, activations=each) for each in least)
        else:
            needs = self.tasks.training(recompute)
        shards = tuple(
            replace(
                need,
                state=shard.frozen + shard.trainable + own + self.versions(number, graph),
                forward_writes=shard.forward_writes,
                gradients=own,
                optimizer=shard.optimizer,
            )
            for number, (shard, need, own) in enumerate(zip(self.shards, needs, kept, strict=True))
        )
        moving = None if self.tasks is None else self.tasks.moving
        if 1 in (devices, graph.shards) or moving is None:
            moving = None
        elif not recompute and schedule == "sequential":
            moving = None  # autograd's graphs stay where they are
        if moving is None:
            return VisitSpec(
                visit, graph, shards, by_modules=True, recompute=recompute, at_home=self.at_home
            )
        # A task has no more of what the microbatch holds on its device.
        held = sum(shard.boundary for shard in shards) if recompute else 0
        shards = tuple(
            replace(shard, activations=held + shard.activations, boundary=left)
            for shard, left in zip(shards, moving, strict=True)
        )
        found = VisitSpec(
            visit, graph, shards, recompute=recompute, schedule=schedule, devices=devices,
            at_home=self.at_home,
        )  # fmt: skip
        found = pipeline.staged(found, [shard.gradients for shard in self.shards])
        crossing = None if self.tasks is None else self.tasks.crossing
        if crossing is None or found.crossings is None:
            return found
        left = crossing.left(found.crossings, graph.shards)
        shards = tuple(
            replace(shard, boundary=nbytes)
            for shard, nbytes in zip(found.shards, left, strict=True)
        )
        return replace(found, shards=shards)

    def pipeline(self, recipe: Recipe, devices: int, budget: int | None) -> Pipeline:
        """Return how the trial is spread over devices of which the smallest has this budget.

        Raises:
            ConfigurationError: see `Pipeline.settled`.
        """
        found = Pipeline(recipe.schedule, devices, budget, (), (), recipe.vertical_sync)
        # Stages are chosen by bytes of one version of the weights, as a flushed schedule has it.
        one = found if is_flushed(recipe.schedule) else replace(found, schedule="1f1b")
        window, asked = recipe.accumulate, asked_recompute(recipe)
        recompute = self.recomputes(asked, budget, window, one)
        visit = self.training(0, window, window, recompute, one)
        return found.settled(recipe.stages, visit, [shard.gradients for shard in self.shards])

    def evaluation(self, visit: int, microbatches: int, pipeline: Pipeline = ALONE) -> VisitSpec:
        """Return the visit of an evaluation, which goes over devices as training does."""
        graph = TaskGraph(
            len(self.shards), microbatches, training=False, stage_sizes=pipeline.stages
        )
        needs = (ShardSpec(0),) * len(self.shards) if self.tasks is None else self.tasks.evaluation
        shards = tuple(
            replace(
                need,
                state=shard.frozen + shard.trainable,
                optimizer=0 if shard.averages else shard.optimizer,
            )
            for shard, need in zip(self.shards, needs, strict=True)
        )
        left = None if self.tasks is None else self.tasks.evaluated
        fewest = min(pipeline.devices, graph.most_stages, microbatches)
        if self.tasks is None or left is None or fewest == 1 or not is_pipelined(pipeline.schedule):
            return VisitSpec(visit, graph, shards, by_modules=True)
        held = sum(shard.boundary for shard in shards)
        trained = self.tasks.training(recompute=self.tasks.keep is None)
        shards = tuple(
            replace(shard, activations=held + shard.activations, boundary=nbytes)
            for shard, nbytes in zip(shards, left, strict=True)
        )
        shards = tuple(
            replace(shard, forward=own.forward, backward=0.0)
            for shard, own in zip(shards, trained, strict=True)
        )
        devices, schedule = pipeline.devices, pipeline.schedule
        found = VisitSpec(visit, graph, shards, schedule=schedule, devices=devices)
        return pipeline.staged(found, [0] * graph.shards)
