"""The engine runs one trial's shards: it interprets the actions that a schedule lists."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.validate import validate
from cerebro_hydra.recipe import (
    BatchTensors,
    Evaluation,
    Recipe,
    Window,
)
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.engine.evaluation import EvaluatedShards
from cerebro_hydra.shards.engine.graph_tasks import GraphTasks
from cerebro_hydra.shards.engine.layout import HostSegments, TrialLayout, in_place, on_host
from cerebro_hydra.shards.engine.microbatch import Microbatch, MicrobatchMaker
from cerebro_hydra.shards.engine.module_tasks import ModuleTasks
from cerebro_hydra.shards.engine.sub_epoch import Cursor, SubEpoch

Need = Callable[[int], tuple[HostSegments, Cursor | None]]
Publish = Callable[[int, HostSegments, Cursor], object]
OnStep = Callable[[int, float, Callable[[], Cursor]], object]
"""Is called with a step, its mean loss, and what makes the cursor with which training goes on."""
Mode = Literal["keep", "recompute"]

_TRIAL = 0  # an engine runs one trial, so the trial of its actions is always this one


@dataclass(frozen=True)
class TrainTotals:
    """Holds a sub-epoch's totals: its loss summed over rows, its rows, and its optimizer steps."""

    loss_sum: float
    rows: int
    steps: int


class Engine:
    """Trains and evaluates one trial in the shards of its cut model, in memory of the host.

    Args:
        cut_model: trials of equal structure may share one, one trial at a time per thread.
        layout: where each tensor lies in the trial's segments.
        recipe: the trial; its model and optimizer are read but never changed.
        trial_seed: random numbers depend on it, the step, the microbatch and the unit.
        steps_per_epoch: is given to LR schedulers that take it.
        mode: "keep" keeps autograd's graphs from F to B, and "recompute" makes them again in B;
            the bits are the same.
    """

    def __init__(
        self,
        cut_model: CutModel,
        layout: TrialLayout,
        recipe: Recipe,
        trial_seed: int,
        steps_per_epoch: int,
        mode: Mode = "keep",
    ) -> None:
        if mode not in ("keep", "recompute"):
            raise ValueError(f"mode is {mode!r}; choose 'keep' or 'recompute'")
        self._cut_model = cut_model
        self._layout = layout
        self._recipe = recipe
        self._trial_seed = trial_seed
        self._steps_per_epoch = steps_per_epoch
        self._keep = mode == "keep"
        self._schedules: dict[tuple[int, bool], list[Action]] = {}
        self._maker = MicrobatchMaker(cut_model, recipe, trial_seed)

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
            on_step: is called after each step. The segments then hold the state after it.
            epoch_metrics: the metrics of the epoch before, if this sub-epoch begins an epoch other
                than the first. LR schedulers may step on them.

        Raises:
            NonFiniteLoss: a batch's loss is NaN or infinite. Nothing was published.
            UnfitShape: a batch has a shape that the cut model can't take.
            StepDiffers: another shard used a parameter after its update.
        """
        sub_epoch = SubEpoch(
            self._cut_model, self._layout, self._recipe, self._steps_per_epoch, start_step,
            epoch_metrics,
        )  # fmt: skip
        loss_sum, rows, step = 0.0, 0, start_step
        with sub_epoch.tasks(self._keep) as tasks:
            visit = _Visit(sub_epoch, need, publish)
            for window, is_last in with_last(windows):
                batches = [self._maker.make(window, n, step) for n in range(len(window))]
                sub_epoch.begin_window(step)
                visit.carry_out(self._actions(len(window), is_last), tasks, batches)
                sub_epoch.end_window()
                sums = [b.loss * batch.rows for b, batch in zip(batches, window, strict=True)]
                for each in sums:
                    loss_sum += each
                window_rows = sum(batch.rows for batch in window)
                rows += window_rows
                if on_step is not None:
                    on_step(step, sum(sums) / window_rows, sub_epoch.cursor)
                step += 1
            sub_epoch.check_unwritten()
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
        shards = EvaluatedShards(
            self._cut_model, self._layout, self._recipe, self._maker, on_outputs=on_outputs
        )

        def reach(_: object, k: int) -> None:
            if k not in shards:
                shards.receive(k, on_host(in_place(need(k)[0])))

        with shards.evaluating():
            for batch in batches:
                shards.run(batch, reach)
        return shards.result()

    def _actions(self, microbatches: int, send: bool) -> list[Action]:
        if (microbatches, send) not in self._schedules:
            shards = self._cut_model.num_shards
            tied = self._cut_model.tied_groups
            barrier = self._recipe.clip_grad_norm is not None
            graph = TaskGraph(shards, microbatches, microbatches, barrier, tied)
            actions = graph.tasks(_TRIAL, 0, send)
            validate(actions, shards=shards, microbatches=microbatches, barrier=barrier, tied=tied)
            self._schedules[microbatches, send] = actions
        return self._schedules[microbatches, send]


class _Visit:
    """Carries out a schedule's actions in a sub-epoch whose shards come once and stay."""

    def __init__(self, sub_epoch: SubEpoch, need: Need, publish: Publish) -> None:
        self._sub_epoch = sub_epoch
        self._need = need
        self._publish = publish
        self._segments: dict[int, HostSegments] = {}

    def carry_out(
        self,
        actions: Sequence[Action],
        tasks: GraphTasks | ModuleTasks,
        batches: Sequence[Microbatch],
    ) -> None:
        """Carry out the actions of one optimizer step."""
        pending = iter(actions)
        for number, batch in enumerate(batches):
            tasks.run(batch, partial(self._reach, pending, number))
        for action in pending:
            self._move(action)

    def _reach(
        self, pending: Iterator[Action], microbatch: int, kind: Literal["F", "B"], k: int
    ) -> None:
        """Carry out the actions that come before F or B of a shard."""
        for action in pending:
            if action.kind in (ActionKind.F, ActionKind.B):
                if (action.kind, action.shard, action.microbatch) != (kind, k, microbatch):
                    raise AssertionError(f"the schedule lists {action} before {kind} of shard {k}")
                break
            self._move(action)
        if k not in self._sub_epoch:
            segments, cursor = self._need(k)
            self._segments[k] = in_place(segments)
            self._sub_epoch.receive(k, on_host(self._segments[k]), cursor)
            self._sub_epoch.check_step(k)

    def _move(self, action: Action) -> None:
        k = action.shard
        match action.kind:
            case ActionKind.U:
                self._sub_epoch.update(k)
            case ActionKind.SEND:
                self._publish(k, self._segments[k], self._sub_epoch.cursor(k))
            case _:
                raise AssertionError(f"{action} moves a shard, but this schedule moves none")


def with_last(windows: Iterable[Window]) -> Iterable[tuple[Window, bool]]:
    """Yield each window and whether it is the last, looking ahead by one."""
    end = object()
    for window, following in itertools.pairwise(itertools.chain(windows, [end])):
        yield window, following is end  # type: ignore[misc]
