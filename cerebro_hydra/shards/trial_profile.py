"""Tells what the queues of a worker must know of a trial: bytes of its shards, what ties them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cerebro_hydra.plan.graph import TaskGraph
from cerebro_hydra.plan.run_progress import RunSpec, ShardSpec
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.gradient_layout import GradientLayout
from cerebro_hydra.shards.layout import ShardLayout, TrialLayout
from cerebro_hydra.shards.task_profile import Needs, TaskProfile


@dataclass(frozen=True, slots=True)
class ShardBytes:
    """Holds the bytes of a shard: both segments, and the gradients of what trains."""

    frozen: int
    trainable: int
    gradients: int
    forward_writes: bool

    @classmethod
    def of(cls, layout: ShardLayout) -> ShardBytes:
        """Return those of a layout."""
        trained = layout.trainable.entries
        return cls(
            layout.frozen.nbytes,
            layout.trainable.nbytes,
            GradientLayout.of(layout).nbytes,
            any(entry.name.startswith("buffer:") for entry in trained),
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
    """

    shards: tuple[ShardBytes, ...]
    tied: tuple[tuple[int, ...], ...]
    barrier: bool
    tasks: TaskProfile | None = None
    build_seconds: float = 0.0

    @classmethod
    def of(
        cls, recipe: Recipe, cut_model: CutModel, layout: TrialLayout, tasks: TaskProfile | None
    ) -> TrialProfile:
        """Return the profile of a trial that was built."""
        return cls(
            tuple(map(ShardBytes.of, layout.shards)),
            tuple(cut_model.tied_groups),
            recipe.clip_grad_norm is not None,
            tasks,
        )

    def recomputes(self, asked: bool | None, budget: int | None, window: int) -> bool:
        """Return whether a backward computes its forward again on devices with this budget."""
        if asked is not None:
            return asked
        if self.tasks is not None and None in (self.tasks.keep, self.tasks.recompute):
            return self.tasks.keep is None  # the other way is impossible
        kept = self.training(0, window, window, recompute=False)
        return budget is not None and kept.device_need > budget

    def kept_gradients(self, shard: int, graph: TaskGraph) -> int:
        """Return the bytes of a shard's gradients if they outlive a unit, else 0."""
        kept = graph.training and (graph.window > 1 or graph.barrier or bool(graph.tied))
        return self.shards[shard].gradients if kept else 0

    def training(
        self, run: int, microbatches: int, window: int, recompute: bool, devices: int = 1
    ) -> RunSpec:
        """Return the run of a sub-epoch, whose microbatches may move among so many devices."""
        graph = TaskGraph(len(self.shards), microbatches, window, self.barrier, self.tied)
        kept = [self.kept_gradients(number, graph) for number in range(graph.shards)]
        if self.tasks is None:  # the least that tasks need are gradients that nobody keeps
            least = [s.gradients - own for s, own in zip(self.shards, kept, strict=True)]
            needs: Needs = tuple(ShardSpec(0, activations=each) for each in least)
        else:
            needs = self.tasks.training(recompute)
        shards = tuple(
            replace(
                need,
                state=shard.frozen + shard.trainable + own,
                forward_writes=shard.forward_writes,
            )
            for shard, need, own in zip(self.shards, needs, kept, strict=True)
        )
        moving = None if self.tasks is None else self.tasks.moving
        if 1 in (devices, graph.shards) or moving is None or not recompute:
            return RunSpec(run, graph, shards, by_modules=True, recompute=recompute)
        held = sum(shard.boundary for shard in shards)  # a task has no more of it on its device
        shards = tuple(
            replace(shard, activations=held + shard.activations, boundary=left)
            for shard, left in zip(shards, moving, strict=True)
        )
        return RunSpec(run, graph, shards, recompute=True)

    def evaluation(self, run: int, microbatches: int) -> RunSpec:
        """Return the run of an evaluation."""
        graph = TaskGraph(len(self.shards), microbatches, training=False)
        needs = (ShardSpec(0),) * len(self.shards) if self.tasks is None else self.tasks.evaluation
        shards = tuple(
            replace(need, state=shard.frozen + shard.trainable)
            for shard, need in zip(self.shards, needs, strict=True)
        )
        return RunSpec(run, graph, shards, by_modules=True)
