"""Trains a trial uncut: the plain trainer goes on from the segments of its shards, and in them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer

from cerebro_hydra.recipe import PlainTrainer, Window
from cerebro_hydra.recipe.optimizer_list import let_go
from cerebro_hydra.shards.engine.bound_model import BoundModel, bound_model
from cerebro_hydra.shards.engine.layout import Segments, TrialRuntime
from cerebro_hydra.shards.engine.optimizer import check_groups, clone_optimizer
from cerebro_hydra.shards.engine.state import (
    ShardState,
    beside_state_dict,
    check_in_state_dict,
    make_cursor,
    restore_cursor,
)
from cerebro_hydra.shards.engine.sub_epoch import Cursor


@contextmanager
def uncut_training(
    trial: TrialRuntime,
    shards: Sequence[Segments],
    cursor: Cursor | None,
    first_step: int,
    epoch_metrics: Mapping[str, float] | None = None,
) -> Iterator[UncutTraining]:
    """Bind a recipe's model to all shards of a state for a while, and let it be trained plainly.

    Args:
        trial: its model's own tensors and its optimizer are as before afterwards.
        shards: the segments of every shard; the trainable ones are written to.
        cursor: that of any shard, None for state 0.
        epoch_metrics: what the epoch before measured, if this state ends it.
    """
    recipe = trial.recipe
    twin = copy.copy(recipe)
    same = {id(parameter): parameter for parameter in recipe.model.parameters()}
    twin.optimizer = clone_optimizer(recipe.optimizer, same)
    with bound_model(recipe.model) as bound:
        states = [bound.bind(*each) for each in zip(trial.layout.shards, shards, strict=True)]
        scaler = None if cursor is None else cursor.get("scaler")
        trainer = PlainTrainer(twin, trial.seed, trial.steps_per_epoch, first_step, scaler)
        if cursor is not None:
            restore_cursor(
                cursor, twin.optimizer, trainer.scheduler, trainer.scaling, recipe.lr_schedule
            )
        if epoch_metrics is not None:
            recipe.lr_schedule.begin_epoch(trainer.scheduler, epoch_metrics)
        try:
            yield UncutTraining(trainer, recipe.optimizer, bound, states)
        finally:
            let_go(twin.optimizer)


class UncutTraining:
    """Keeps the segments of a trial's shards up to date while the plain trainer trains it."""

    def __init__(
        self,
        trainer: PlainTrainer,
        built: Optimizer,
        bound: BoundModel,
        states: Sequence[ShardState],
    ) -> None:
        self.trainer = trainer
        self._built = built
        self._beside = beside_state_dict(trainer.scheduler)
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
        self._bound.begin_step()
        losses = self.trainer.step(window)
        self._bound.collect_written(optimizer=self.trainer.recipe.optimizer)
        self._bound.end_step()
        for state in self._states:
            for name, average in state.ema.items():
                average.copy_(self._averages[name].detach())
        return losses

    def cursor(self) -> Cursor:
        """Return the cursor with which any shard goes on."""
        trainer = self.trainer
        return make_cursor(
            trainer.steps, trainer.recipe.optimizer, trainer.scheduler, trainer.scaling
        )

    def check_unwritten(self) -> None:
        """Check that training wrote to nothing that does not hop; see `BoundModel`."""
        check_groups(self.trainer.recipe.optimizer, self._built)
        check_in_state_dict(self.trainer.scheduler, self._beside)
        self._bound.check_unwritten()
