"""The engine trains and evaluates one trial in memory of this process, where shards come once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.recipe import BatchTensors, Evaluation, Window
from cerebro_hydra.shards.engine.evaluation import EvaluatedShards
from cerebro_hydra.shards.engine.layout import HostSegments, TrialRuntime, in_place, on_host
from cerebro_hydra.shards.engine.microbatch import Execution, SubEpochInput
from cerebro_hydra.shards.engine.sub_epoch import Cursor
from cerebro_hydra.shards.engine.uncut import uncut_training
from cerebro_hydra.shards.engine.visit_run import TrainTotals, VisitRun, with_last

Need = Callable[[int], tuple[HostSegments, Cursor | None]]
Publish = Callable[[int, HostSegments, Cursor], object]
OnStep = Callable[[int, float], object]
"""Is called with a step and its mean loss."""
Mode = Literal["keep", "recompute"]

_TRIAL = 0  # an engine runs one trial, so the trial of its actions is always this one


class Engine:
    """Trains and evaluates one trial in the shards of its cut model, in memory of the host.

    Args:
        trial: who trains.
        mode: "keep" keeps autograd's graphs from F to B, and "recompute" makes them again in B;
            the bits are the same.
    """

    def __init__(self, trial: TrialRuntime, mode: Mode = "keep") -> None:
        if mode not in ("keep", "recompute"):
            raise ValueError(f"mode is {mode!r}; choose 'keep' or 'recompute'")
        self._trial = trial
        self._recompute = mode == "recompute"

    def train(
        self,
        windows: Iterable[Window],
        start_step: int,
        need: Need,
        publish: Publish,
        on_step: OnStep | None = None,
        epoch_metrics: Mapping[str, float] | None = None,
    ) -> TrainTotals:
        """Train over a sub-epoch.

        Args:
            windows: the batches of each optimizer step.
            start_step: the number of optimizer steps that the trial has done before.
            need: returns shard k's segments and cursor, None for state 0, right before its first
                task. It may block until they have arrived. The engine writes to the trainable
                segment and only reads the frozen one.
            publish: takes shard k's segments and cursor right after its last update. From then on
                the engine does not touch them.
            on_step: is called after each step.
            epoch_metrics: the metrics of the epoch before, if this sub-epoch begins an epoch other
                than the first. LR schedulers may step on them.

        Raises:
            NonFiniteLoss: a batch's loss is NaN or infinite. Nothing was published.
            UnfitShape: a batch has a shape that the cut model can't take.
            StepDiffers: another shard used a parameter after its update.
        """
        if self._trial.recipe.training_step is not None:
            return self._train_uncut(windows, start_step, need, publish, on_step, epoch_metrics)
        ours, theirs = itertools.tee(windows)
        given = SubEpochInput(start_step, theirs, epoch_metrics)
        execution = Execution(recompute=self._recompute, resident=True)
        visit = VisitRun(self._trial, given, execution)
        segments: dict[int, HostSegments] = {}
        actions: Iterator[Action] = iter(())

        def following() -> Action | None:
            """Return the next task, once its shard is here; publish what comes before it."""
            for action in actions:
                k = action.shard
                if action.kind is ActionKind.SEND:
                    publish(k, segments[k], visit.cursor(k))
                    continue
                if k not in segments:
                    given, cursor = need(k)
                    segments[k] = in_place(given)
                    visit.load(k, on_host(segments[k]), cursor)
                return action
            return None

        def then(_: Action) -> Action:
            task = following()
            assert task is not None, "a microbatch ends with a task"
            return task

        try:
            for number, (window, is_last) in enumerate(with_last(ours)):
                first = number * self._trial.recipe.accumulate
                actions = iter(self._actions(first, len(window), is_last))
                while (task := following()) is not None:
                    visit.perform(task, then=then)
                if on_step is not None:
                    on_step(start_step + number, visit.mean_loss(first, len(window)))
        except BaseException:
            visit.cancel()
            raise
        visit.close()
        return visit.totals

    def _train_uncut(
        self,
        windows: Iterable[Window],
        start_step: int,
        need: Need,
        publish: Publish,
        on_step: OnStep | None,
        epoch_metrics: Mapping[str, float] | None,
    ) -> TrainTotals:
        """Let the user's own step train the one shard that such a trial has."""
        given, cursor = need(0)
        segments = in_place(given)
        loss_sum, rows, step = 0.0, 0, start_step
        with uncut_training(
            self._trial, [on_host(segments)], cursor, start_step, epoch_metrics
        ) as uncut:
            for step, (batch,) in enumerate(windows, start_step + 1):
                (loss,) = uncut.step([batch])
                loss_sum, rows = loss_sum + loss * batch.rows, rows + batch.rows
                if on_step is not None:
                    on_step(step - 1, loss)
            uncut.check_unwritten()
            cursor = uncut.cursor()
        publish(0, segments, cursor)
        return TrainTotals(loss_sum, rows, step - start_step)

    def evaluate(
        self,
        batches: Iterable[BatchTensors],
        need: Need,
        on_outputs: Callable[[Any], object] | None = None,
    ) -> Evaluation:
        """Evaluate on one partition's validation rows, only reading the segments.

        Args:
            batches: the validation rows.
            need: returns shard k's segments and cursor right before its first forward.
            on_outputs: is called with the model's outputs for each batch.

        Raises:
            NonFiniteLoss: a batch's loss is NaN or infinite.
        """
        shards = EvaluatedShards(self._trial, on_outputs=on_outputs)

        def reach(_: object, k: int) -> None:
            if k not in shards:
                shards.receive(k, on_host(in_place(need(k)[0])))

        with shards.evaluating():
            for batch in batches:
                shards.run(batch, reach)
        return shards.result()

    def _actions(self, first: int, microbatches: int, send: bool) -> list[Action]:
        recipe, tied = self._trial.recipe, self._trial.cut_model.tied_groups
        barrier, window = recipe.barrier, recipe.accumulate
        graph = TaskGraph(self._trial.num_shards, first + microbatches, window, barrier, tied)
        return graph.tasks(_TRIAL, first // window, send)
