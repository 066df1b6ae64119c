"""Trains a trial uncut on a device that has all of its shards at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cerebro_hydra.agent.device_messages import Done
from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.recipe import Recipe, Window
from cerebro_hydra.shards.layout import Segments, TrialLayout
from cerebro_hydra.shards.uncut import uncut_training


class PlainRun:
    """Takes each step with the plain trainer, when the last microbatch's first backward comes.

    All shards are loaded then, because the run keeps them from F to B. Its other tasks do nothing.

    Args:
        windows: the batches of each optimizer step.
        start_step: the number of optimizer steps that the trial has done before.
        epoch_metrics: see `Engine.train`.
    """

    stays = True

    def __init__(
        self,
        recipe: Recipe,
        layout: TrialLayout,
        trial_seed: int,
        steps_per_epoch: int,
        start_step: int,
        windows: Iterator[Window],
        epoch_metrics: Mapping[str, float] | None,
    ) -> None:
        self._recipe = recipe
        self._layout = layout
        self._trial_seed = trial_seed
        self._steps_per_epoch = steps_per_epoch
        self._start_step = start_step
        self._windows = enumerate(windows)
        self._at: tuple[int, Window] = (-1, ())
        self._epoch_metrics = epoch_metrics
        self._slots: dict[int, Segments] = {}
        self._cursors: dict[int, dict[str, Any] | None] = {}

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        """Take a shard, which lies in the slots."""
        self._slots[shard] = slots
        self._cursors[shard] = None if cursor is None else dict(cursor)

    def unload(self, shard: int) -> tuple[Mapping[str, Any] | None, bool]:
        """Let go of a shard."""
        del self._slots[shard]
        return self._cursors[shard], False

    def perform(self, task: Action) -> Done:
        """Take a step if the task is the first backward of its last microbatch."""
        number = task.microbatch or 0
        place, window = divmod(number, self._recipe.accumulate)[::-1]
        while self._at[0] < window:
            self._at = next(self._windows)
        last_of_all = place == len(self._at[1]) - 1 and task.shard == len(self._layout.shards) - 1
        if task.kind is not ActionKind.B or not last_of_all:
            return Done(task)
        losses = self._step(self._start_step + window, self._at[1])
        first = number - place
        of_batches = zip(losses, self._at[1], strict=True)
        return Done(
            task, losses={first + n: (loss, b.rows) for n, (loss, b) in enumerate(of_batches)}
        )

    def _step(self, step: int, window: Window) -> list[float]:
        numbers = range(len(self._layout.shards))
        metrics = self._epoch_metrics if step == self._start_step else None
        torch.set_num_threads(torch.get_num_threads())  # OpenMP keeps their number per thread
        with uncut_training(
            self._recipe, self._layout, [self._slots[k] for k in numbers], self._cursors[0],
            self._trial_seed, self._steps_per_epoch, step, metrics,
        ) as training:  # fmt: skip
            losses = training.step(window)
            training.check_unwritten()
            cursor = training.cursor()
        self._cursors = dict.fromkeys(numbers, cursor)
        return losses

    def close(self) -> None:
        """End the run; nothing is left to be done."""

    def cancel(self) -> None:
        """End the run where it stands."""
        self._slots.clear()
