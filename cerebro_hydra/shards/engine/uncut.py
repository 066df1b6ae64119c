"""Trains a trial uncut: the plain trainer goes on from the segments of its shards, and in them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from cerebro_hydra.errors import NonFiniteLoss
from cerebro_hydra.recipe import PlainTrainer, Recipe, Window
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.engine.bound_model import BoundModel, bound_model
from cerebro_hydra.shards.engine.differences import first_difference
from cerebro_hydra.shards.engine.engine import (
    Cursor,
    Engine,
    Need,
    OnStep,
    Publish,
    TrainTotals,
    with_last,
)
from cerebro_hydra.shards.engine.layout import (
    HostSegments,
    Segments,
    TrialLayout,
    in_place,
    on_host,
)
from cerebro_hydra.shards.engine.optimizer import clone_optimizer
from cerebro_hydra.shards.engine.state import ShardState, make_cursor, restore_cursor


@contextmanager
def uncut_training(
    recipe: Recipe,
    layout: TrialLayout,
    shards: Sequence[Segments],
    cursor: Cursor | None,
    trial_seed: int,
    steps_per_epoch: int,
    first_step: int,
    epoch_metrics: Mapping[str, float] | None = None,
) -> Iterator[UncutTraining]:
    """Bind a recipe's model to all shards of a state for a while, and let it be trained plainly.

    Args:
        recipe: its model's own tensors and its optimizer are as before afterwards.
        shards: the segments of every shard; the trainable ones are written to.
        cursor: that of any shard, None for state 0.
        epoch_metrics: what the epoch before measured, if this state ends it.
    """
    twin = copy.copy(recipe)
    same = {id(parameter): parameter for parameter in recipe.model.parameters()}
    twin.optimizer = clone_optimizer(recipe.optimizer, same)
    with bound_model(recipe.model) as bound:
        states = [bound.bind(*each) for each in zip(layout.shards, shards, strict=True)]
        trainer = PlainTrainer(twin, trial_seed, steps_per_epoch, first_step)
        if cursor is not None:
            restore_cursor(cursor, twin.optimizer, trainer.scheduler, recipe.lr_schedule)
        if epoch_metrics is not None:
            recipe.lr_schedule.begin_epoch(trainer.scheduler, epoch_metrics)
        try:
            yield UncutTraining(trainer, bound, states)
        finally:
            twin.optimizer.state.clear()  # it and its scheduler refer to one another
            twin.optimizer.param_groups.clear()


class UncutTraining:
    """Keeps the segments of a trial's shards up to date while the plain trainer trains it."""

    def __init__(
        self, trainer: PlainTrainer, bound: BoundModel, states: Sequence[ShardState]
    ) -> None:
        self.trainer = trainer
        self._bound = bound
        self._states = states
        recipe, ema = trainer.recipe, trainer.ema
        self._averages = {} if ema is None else dict(ema.module.named_parameters())
        recipe.optimizer.state.clear()
        for state in states:
            state.load_optimizer(recipe.optimizer)
            for name, average in state.ema.items():
                self._averages[name].data.copy_(average)

    def step(self, window: Window) -> list[float]:
        """Take one optimizer step, and return the mean loss of each batch of its window."""
        losses = self.trainer.step(window)
        self._bound.collect_written()
        for state in self._states:
            state.keep_optimizer(self.trainer.recipe.optimizer)
            for name, average in state.ema.items():
                average.copy_(self._averages[name].detach())
        return losses

    def cursor(self) -> Cursor:
        """Return the cursor with which any shard goes on."""
        trainer = self.trainer
        return make_cursor(trainer.steps, trainer.recipe.optimizer, trainer.scheduler)

    def check_unwritten(self) -> None:
        """Check that training wrote to nothing that does not hop; see `BoundModel`."""
        self._bound.check_unwritten()


class UncutEngine(Engine):
    """Trains and evaluates a trial as one model; its state lies in the shards of its cut."""

    def __init__(
        self,
        cut_model: CutModel,
        layout: TrialLayout,
        recipe: Recipe,
        trial_seed: int,
        steps_per_epoch: int,
    ) -> None:
        super().__init__(
            replace(cut_model, graphs=None), layout, recipe, trial_seed, steps_per_epoch
        )

    def train(
        self,
        windows: Iterable[Window],
        start_step: int,
        need: Need,
        publish: Publish,
        on_step: OnStep | None = None,
        epoch_metrics: Mapping[str, float] | None = None,
    ) -> TrainTotals:
        """Train over a sub-epoch, once all shards are there; publish them all after its last step.

        See `Engine.train`.
        """
        numbers = range(self._cut_model.num_shards)
        given, (cursor, *others) = zip(*map(need, numbers), strict=True)
        if any(other != cursor for other in others):
            raise ValueError(f"the shards of one state have different cursors: {cursor}, {others}")
        loss_sum, rows, step = 0.0, 0, start_step
        segments = [in_place(each) for each in given]
        memory = [on_host(each) for each in segments]
        with uncut_training(
            self._recipe, self._layout, memory, cursor, self._trial_seed,
            self._steps_per_epoch, start_step, epoch_metrics,
        ) as training:  # fmt: skip
            for window, is_last in with_last(windows):
                losses = training.step(window)
                sums = [loss * batch.rows for loss, batch in zip(losses, window, strict=True)]
                for each in sums:
                    loss_sum += each
                window_rows = sum(batch.rows for batch in window)
                rows += window_rows
                if is_last:
                    for k in numbers:
                        publish(k, segments[k], training.cursor())
                if on_step is not None:
                    on_step(step, sum(sums) / window_rows, training.cursor)
                step += 1
            training.check_unwritten()
        return TrainTotals(loss_sum, rows, step - start_step)


class PlainStep:
    """Takes one step of an uncut model from copies of a trial's segments, beside the engine's step.

    Args:
        recipe: one that the factory has just built, so that it shares nothing with the engine's.
        shards: copies of the segments of every shard before the step, which are written to.
        cursor: the cursor of that state.
        window: copies of the batches of the step.
        step: the number of the step.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: TrialLayout,
        shards: Sequence[HostSegments],
        cursor: Cursor,
        window: Window,
        trial_seed: int,
        steps_per_epoch: int,
        step: int,
    ) -> None:
        self._layout = layout
        self._window = window
        self.number = step
        self._stack = ExitStack()
        copies = [on_host(each) for each in shards]
        self._training = self._stack.enter_context(
            uncut_training(recipe, layout, copies, cursor, trial_seed, steps_per_epoch, step)
        )

    def difference(self, loss: float, shards: Sequence[HostSegments]) -> str | None:
        """Take the step; return what differs from the engine's loss and state, None if no bit does.

        Args:
            loss: the mean loss of the engine's step.
            shards: the engine's segments after it.
        """
        try:
            losses = self._training.trainer.step(self._window)
        except NonFiniteLoss as error:
            return f"the loss is {loss!r}, but uncut: {error}"
        rows = [batch.rows for batch in self._window]
        mean = sum(each * n for each, n in zip(losses, rows, strict=True)) / sum(rows)
        if loss != mean:
            return f"the loss is {loss!r}, not {mean!r}"
        return first_difference(self._layout, shards, self._training.trainer.tensors())

    def close(self) -> None:
        """Refer to no segment any more."""
        self._stack.close()
