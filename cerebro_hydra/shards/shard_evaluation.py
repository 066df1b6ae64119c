"""An evaluation of one trial whose tasks are taken one by one, from outside."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import ExitStack
from functools import partial

from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.recipe import BatchTensors, Evaluation, Recipe
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.evaluated_shards import EvaluatedShards
from cerebro_hydra.shards.layout import Segments, TrialLayout
from cerebro_hydra.shards.memory_watch import MemoryLimit
from cerebro_hydra.shards.microbatch_maker import MicrobatchMaker
from cerebro_hydra.shards.paused_run import PausedRun


class ShardEvaluation:
    """Evaluates one trial in the process of a device, one F of a shard at a time.

    It is driven as a `ShardRun` is, and only reads the shards' memory.

    Args:
        batches: the validation rows of a partition.
        shared, limit: see `ShardRun`.
    """

    def __init__(
        self,
        cut_model: CutModel,
        layout: TrialLayout,
        recipe: Recipe,
        trial_seed: int,
        batches: Iterable[BatchTensors],
        shared: Collection[str] = (),
        limit: MemoryLimit | None = None,
    ) -> None:
        maker = MicrobatchMaker(cut_model, recipe, trial_seed)
        shared = cut_model.shared.union(shared)
        self._shards = EvaluatedShards(cut_model, layout, recipe, maker, shared, limit)
        self._batches = enumerate(batches)
        self._paused = PausedRun(recipe.device)
        self._stack = ExitStack()
        self._stack.enter_context(self._shards.evaluating())
        self._number = -1  # of the batch under way
        self._next: tuple[str, int] | None = None  # its next task

    def load(self, k: int, segments: Segments) -> None:
        """Let shard k be in this memory until it is unloaded."""
        if k in self._shards:
            raise ValueError(f"shard {k} is loaded already; unload it before")
        self._shards.receive(k, segments)

    def unload(self, k: int) -> None:
        """Refer to shard k's memory no more.

        Raises:
            ConfigurationError: the forward keeps a view of a parameter.
        """
        self._shards.release(k, needed=self._next is not None and self._next[1] > k)

    def perform(self, task: Action) -> None:
        """Do F of a shard that is loaded.

        Raises:
            ValueError: the task can't come now, or its shard is not loaded.
            NonFiniteLoss: the loss is NaN or infinite.
        """
        k, number = task.shard, task.microbatch
        if task.kind is not ActionKind.F or number is None or k not in self._shards:
            raise ValueError(f"{task} can't be done; load its shard before")
        if k == 0:
            while self._number < number:
                self._number, batch = next(self._batches)
            self._shards.begin_batch()
            self._next = self._paused.begin(partial(self._shards.run, batch))
        if self._next != ("F", k) or number != self._number:
            raise ValueError(f"{task} can't come now; the batch is before {self._next}")
        self._next = self._paused.advance()
        if self._next is None:
            self._shards.end_batch()

    @property
    def result(self) -> Evaluation:
        """Return what the batches that were measured here have given."""
        return self._shards.result()

    def close(self) -> None:
        """End the evaluation, wherever it stands."""
        self._paused.close()
        self._stack.close()
