"""Tells what the queues of a worker must know of a trial: bytes of its shards, what ties them."""

from __future__ import annotations

from dataclasses import dataclass

from cerebro_hydra.plan.graph import TaskGraph
from cerebro_hydra.plan.run_progress import RunSpec, ShardSpec
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.gradient_layout import GradientLayout
from cerebro_hydra.shards.layout import ShardLayout, TrialLayout


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
    """Describes a trial to the queues, in whichever process it was built."""

    shards: tuple[ShardBytes, ...]
    tied: tuple[tuple[int, ...], ...]
    barrier: bool
    build_seconds: float = 0.0
    """What the user's factory took."""

    @classmethod
    def of(cls, recipe: Recipe, cut_model: CutModel, layout: TrialLayout) -> TrialProfile:
        """Return the profile of a trial that was built."""
        return cls(
            tuple(map(ShardBytes.of, layout.shards)),
            tuple(cut_model.tied_groups),
            recipe.clip_grad_norm is not None,
        )

    @property
    def state_bytes(self) -> int:
        """Return the bytes that training needs on a device which holds all shards."""
        return sum(shard.frozen + shard.trainable + shard.gradients for shard in self.shards)

    def recomputes(self, asked: bool | None, budget: int | None) -> bool:
        """Return whether a backward computes its forward again on devices with this budget."""
        if asked is not None:
            return asked
        return budget is not None and self.state_bytes > budget

    def kept_gradients(self, shard: int, graph: TaskGraph) -> int:
        """Return the bytes of a shard's gradients if they outlive a unit, else 0."""
        kept = graph.training and (graph.window > 1 or graph.barrier or bool(graph.tied))
        return self.shards[shard].gradients if kept else 0

    def training(self, run: int, microbatches: int, window: int, recompute: bool) -> RunSpec:
        """Return the run of a sub-epoch."""
        graph = TaskGraph(len(self.shards), microbatches, window, self.barrier, self.tied)
        shards = tuple(
            ShardSpec(
                state=shard.frozen + shard.trainable + self.kept_gradients(number, graph),
                activations=shard.gradients,
                forward_writes=shard.forward_writes,
            )
            for number, shard in enumerate(self.shards)
        )
        return RunSpec(run, graph, shards, by_modules=True, recompute=recompute)

    def evaluation(self, run: int, microbatches: int) -> RunSpec:
        """Return the run of an evaluation."""
        graph = TaskGraph(len(self.shards), microbatches, training=False)
        shards = tuple(ShardSpec(state=s.frozen + s.trainable) for s in self.shards)
        return RunSpec(run, graph, shards, by_modules=True)
