"""Takes one step of a trial with its model's own forward, while one shard at a time is in memory.

An audit compares it with the step that the engine took, where a second copy of the whole state does
not fit. For a cut by graph it compares the graphs with the user's modules. A cut by modules runs
the same code, so there it compares what lies around it: whether recomputing equals keeping, state
that left memory and came back, what shards share or alias, the order of updates and of the barrier
before clipping, and a model that was built anew with one that has trained.

The step is the first of a sub-epoch: the state before it stays until the sub-epoch is committed, so
that nobody has to copy it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cerebro_hydra.agent.scratch_file import ScratchFile
from cerebro_hydra.agent.segment_store import SegmentStore
from cerebro_hydra.agent.shard_store import HeldShard
from cerebro_hydra.plan.actions import ActionKind
from cerebro_hydra.plan.schedules.sequential import sequential
from cerebro_hydra.recipe import Recipe, Window
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.gradient_layout import GradientLayout
from cerebro_hydra.shards.layout import Bytes, ShardLayout, TrialLayout, memory_of, on_host
from cerebro_hydra.shards.shard_run import ShardRun
from cerebro_hydra.shards.step_result import StepResult, tensor_digests


def memory_of_step(layout: TrialLayout) -> int:
    """Return the most bytes of memory that the step needs for states of shards."""
    return max(
        shard.frozen.nbytes + _size(shard) + shard.trainable.nbytes for shard in layout.shards
    )


def _size(shard: ShardLayout) -> int:
    return shard.trainable.nbytes + GradientLayout.of(shard).nbytes


def step_by_shard(
    recipe: Recipe,
    cut_model: CutModel,
    layout: TrialLayout,
    trial_seed: int,
    steps_per_epoch: int,
    step: int,
    window: Window,
    epoch_metrics: Mapping[str, float] | None,
    look: Callable[[int], HeldShard],
    segments: SegmentStore,
) -> StepResult:
    """Take the first step of a sub-epoch, and return what it gives.

    Args:
        recipe: one that the factory has just built, so that it shares nothing with the engine's.
        step: the number of the step.
        epoch_metrics: see `Engine.train`.
        look: returns a shard of the state before.
        segments: has the bytes of that state, and gives memory and scratch files.

    Raises:
        NonFiniteLoss: the loss is NaN or infinite.
    """
    run = ShardRun(
        cut_model.eager(recipe.model), layout, recipe, trial_seed, steps_per_epoch, True, step,
        [window], epoch_metrics,
    )  # fmt: skip
    tasks = sequential(
        0, cut_model.num_shards, len(window), recipe.clip_grad_norm is not None,
        tied=cut_model.tied_groups,
    )  # fmt: skip
    result, place = StepResult(), _Place(run, layout, look, segments)
    try:
        for task in tasks:
            place.bring(task.shard)
            run.perform(task)
            if task.kind is ActionKind.U:
                result.shards[task.shard] = tensor_digests(
                    layout.shards[task.shard], memory_of(place.trainable)
                )
        place.leave()
        run.close()
    finally:
        run.cancel()
    result.loss = run.totals.loss_sum / run.totals.rows
    return result


class _Place:
    """Is the memory that has one shard at a time, while the others lie in scratch files."""

    def __init__(
        self,
        run: ShardRun,
        layout: TrialLayout,
        look: Callable[[int], HeldShard],
        segments: SegmentStore,
    ) -> None:
        self._run = run
        self._layout = layout
        self._look = look
        self._segments = segments
        self._here: tuple[int, Bytes] | None = None
        self._files: dict[int, ScratchFile] = {}
        self._cursors: dict[int, dict[str, Any] | None] = {}

    @property
    def trainable(self) -> Bytes:
        """Return the trainable segment of the shard that is here."""
        assert self._here is not None
        shard, memory = self._here
        return memory[: self._layout.shards[shard].trainable.nbytes]

    def bring(self, shard: int) -> None:
        """Let a shard be here, and no other one."""
        if self._here is not None and self._here[0] == shard:
            return
        self.leave()
        held = self._look(shard)
        memory = self._segments.allocate(_size(self._layout.shards[shard]))
        self._here = shard, memory
        gradients = memory[self.trainable.nbytes :]
        if (file := self._files.pop(shard, None)) is not None:
            file.read_into(memory)
        else:
            self.trainable[:] = self._segments.read(held.names["trainable"])
            gradients[:] = 0
            self._cursors[shard] = dict(held.cursor) or None
        frozen = self._segments.read(held.names["frozen"])
        self._run.load(
            shard,
            on_host({"frozen": frozen, "trainable": self.trainable}),
            self._cursors[shard],
            memory_of(gradients),
        )

    def leave(self) -> None:
        """Let the shard that is here go, with what has changed of it."""
        if self._here is not None:
            shard, memory = self._here
            self._here = None
            self._run.unload(shard)
            self._cursors[shard] = self._run.cursor(shard)
            self._files[shard] = self._segments.to_file(memory)
