"""The engine runs one trial's shards: it interprets the actions that a schedule lists."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss
from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.plan.schedules.sequential import sequential
from cerebro_hydra.plan.validate import validate
from cerebro_hydra.recipe import (
    BatchTensors,
    Evaluation,
    RandomKey,
    Recipe,
    RunningEvaluation,
    Window,
)
from cerebro_hydra.shards.clipping import clip_coefficient, grad_norms, scale_grads
from cerebro_hydra.shards.cursor import make_cursor, restore_cursor
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.layout import Segments, TrialLayout
from cerebro_hydra.shards.optimizer_clone import clone_optimizer
from cerebro_hydra.shards.state import ShardState
from cerebro_hydra.shards.tasks import Microbatch, ShardTasks

Cursor = dict[str, Any]
Need = Callable[[int], tuple[Segments, Cursor | None]]
Publish = Callable[[int, Segments, Cursor], object]
Mode = Literal["keep", "recompute"]

_TRIAL = 0  # an engine runs one trial, so the trial of its actions is always this one


class UnfitShape(ConfigurationError):
    """A batch has a shape that the cut model can't take, though the uncut model may."""


@dataclass(frozen=True)
class TrainTotals:
    """Holds a sub-epoch's totals: its loss summed over rows, its rows, and its optimizer steps."""

    loss_sum: float
    rows: int
    steps: int


class Engine:
    """Trains and evaluates one trial in the shards of its cut model.

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
        self._owner = {t.name: t.owner for t in (*cut_model.params, *cut_model.buffers)}
        self._shapes_seen: set[tuple[torch.Size, ...]] = set()

    def train(
        self,
        windows: Iterable[Window],
        start_step: int,
        need: Need,
        publish: Publish,
        on_step: Callable[[int, float], object] | None = None,
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
            on_step: is called with each step and its mean loss.
            epoch_metrics: the metrics of the epoch before, if this sub-epoch begins an epoch other
                than the first. LR schedulers may step on them.

        Raises:
            NonFiniteLoss: a batch's loss is NaN or infinite. Nothing was published.
            UnfitShape: a batch has a shape that the cut model can't take.
        """
        run = _SubEpoch(self._cut_model, self._layout, self._recipe, self._steps_per_epoch,
                        self._keep, need, publish, epoch_metrics)  # fmt: skip
        loss_sum, rows, step = 0.0, 0, start_step
        try:
            for window, is_last in _with_last(windows):
                batches = self._microbatches(window, step)
                run.window(self._actions(len(window), is_last), batches, step)
                sums = [b.loss * batch.rows for b, batch in zip(batches, window, strict=True)]
                for each in sums:
                    loss_sum += each
                window_rows = sum(batch.rows for batch in window)
                rows += window_rows
                if on_step is not None:
                    on_step(step, sum(sums) / window_rows)
                step += 1
        finally:
            run.let_go()
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
        recipe, cut_model = self._recipe, self._cut_model
        shards: dict[int, ShardState] = {}
        scratch: dict[str, Tensor] = {}
        evaluation = RunningEvaluation(recipe)
        for batch in batches:
            features, targets = recipe.collated(batch.features, batch.labels, None)
            inputs = recipe.inputs(features, targets)
            self._check_shapes(inputs)
            with torch.no_grad(), recipe.precision():
                for k, graph in enumerate(cut_model.eval):
                    if k not in shards:
                        segments, _ = need(k)
                        shards[k] = ShardState(self._layout.shards[k], **segments)
                        for name in graph.mutates:
                            scratch[name] = shards[self._owner[name]].buffers[name].clone()
                outputs = self._forward(shards, scratch, inputs)
                if on_outputs is not None:
                    on_outputs(outputs)
                loss = recipe.compute_loss(outputs, targets).item()
                evaluation.add(loss, outputs, targets, batch.rows)
        return evaluation.result()

    def _forward(
        self, shards: Mapping[int, ShardState], scratch: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
    ) -> Any:  # fmt: skip
        values: dict[str, Any] = {}
        out: Sequence[Any] = ()
        for graph in self._cut_model.eval:
            tensors = [shards[self._owner[n]].evaluated[n] for n in graph.params]
            tensors += [scratch.get(n, shards[self._owner[n]].buffers[n]) for n in graph.buffers]
            live = [values[n] for n in graph.live_in]
            out = graph.run(*tensors, *live, *(inputs[i] for i in graph.inputs))
            values = dict(zip(graph.live_out, out, strict=False))
        return self._cut_model.outputs(out, False)

    def _microbatches(self, window: Window, step: int) -> list[Microbatch]:
        total = sum(batch.rows for batch in window)
        microbatches = []
        for number, batch in enumerate(window):
            key = RandomKey(self._trial_seed, step, number)
            weight = batch.rows / total if len(window) > 1 else None
            made = Microbatch.collated(self._recipe, (batch.features, batch.labels), key, weight)
            self._check_shapes(made.inputs)
            microbatches.append(made)
        return microbatches

    def _check_shapes(self, inputs: Sequence[Tensor]) -> None:
        """Refuse shapes that break an assumption of an exported graph; each is checked once."""
        if self._recipe.collate is None:
            return  # prepared columns have one shape
        shapes = tuple(x.shape for x in inputs)
        if shapes in self._shapes_seen:
            return
        for guards in self._cut_model.guards:
            if (condition := guards.violated(inputs)) is not None:
                raise UnfitShape(
                    f"collate gave a batch of shapes {[tuple(s) for s in shapes]}, which the cut "
                    f"model can't take: {condition}; give such batches another shape, or shards=1"
                )
        self._shapes_seen.add(shapes)

    def _actions(self, microbatches: int, send: bool) -> list[Action]:
        if (microbatches, send) not in self._schedules:
            shards = self._cut_model.num_shards
            tied = self._cut_model.tied_groups
            barrier = self._recipe.clip_grad_norm is not None
            actions = sequential(_TRIAL, shards, microbatches, barrier, send, tied)
            validate(actions, shards=shards, microbatches=microbatches, barrier=barrier, tied=tied)
            self._schedules[microbatches, send] = actions
        return self._schedules[microbatches, send]


class _SubEpoch:
    """Carries out one call of `train`: it holds the shards and does each action to them."""

    def __init__(
        self, cut_model: CutModel, layout: TrialLayout, recipe: Recipe, steps_per_epoch: int,
        keep: bool, need: Need, publish: Publish, epoch_metrics: Mapping[str, float] | None,
    ) -> None:  # fmt: skip
        self._layout = layout
        self._recipe = recipe
        self._steps_per_epoch = steps_per_epoch
        self._need = need
        self._publish = publish
        self._epoch_metrics = epoch_metrics
        self._order = [p.name for p in cut_model.params]
        self._states: dict[int, ShardState] = {}
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, Any]] = {}
        self._tasks = ShardTasks(cut_model, self._states, recipe.precision, keep)
        self._coefficient: Tensor | None = None
        self._original = {n: id(p) for n, p in recipe.model.named_parameters()}

    def window(self, actions: Sequence[Action], batches: Sequence[Microbatch], step: int) -> None:
        """Carry out the actions of one optimizer step."""
        self._coefficient = None
        for action in actions:
            k, microbatch = action.shard, action.microbatch
            if k not in self._states:
                self._receive(k, step)
            match action.kind:
                case ActionKind.F:
                    batch = batches[microbatch or 0]
                    self._tasks.forward(k, batch)
                    if k == len(self._layout.shards) - 1 and not math.isfinite(batch.loss):
                        raise NonFiniteLoss(
                            f"the loss is {batch.loss} at step {step}, batch {microbatch} of its "
                            "window; try a lower learning rate or clip_grad_norm"
                        )
                case ActionKind.B:
                    self._tasks.backward(k, batches[microbatch or 0])
                case ActionKind.U:
                    self._update(k, step)
                case ActionKind.SEND:
                    self._send(k, step + 1)
                case _:
                    raise AssertionError(f"{action} moves a shard, but this schedule moves none")

    def let_go(self) -> None:
        """Refer to no segment any more: an optimizer and its scheduler refer to one another."""
        for optimizer, _ in self._optimizers.values():
            optimizer.state.clear()
            optimizer.param_groups.clear()
        self._states.clear()

    def _receive(self, k: int, step: int) -> None:
        segments, cursor = self._need(k)
        state = ShardState(self._layout.shards[k], **segments)
        mine = {self._original[name]: p for name, p in state.params.items()}
        optimizer = clone_optimizer(self._recipe.optimizer, mine)
        scheduler = self._recipe.lr_schedule.make(optimizer, self._steps_per_epoch)
        if cursor is not None:
            if cursor["step"] != step:
                raise ValueError(f"shard {k} is at step {cursor['step']}, training at step {step}")
            restore_cursor(cursor, optimizer, scheduler)
        if self._epoch_metrics is not None:
            self._recipe.lr_schedule.begin_epoch(scheduler, self._epoch_metrics)
        state.load_optimizer(optimizer)
        self._states[k] = state
        self._optimizers[k] = (optimizer, scheduler)

    def _update(self, k: int, step: int) -> None:
        state = self._states[k]
        limit = self._recipe.clip_grad_norm
        if limit is not None:
            if self._coefficient is None:  # the first update after the barrier
                norms: dict[str, Tensor] = {}
                for each in self._states.values():
                    norms |= grad_norms(each.params)
                self._coefficient = clip_coefficient(norms, self._order, limit)
            scale_grads(state.params, self._coefficient)
        if self._recipe.clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_(state.params.values(), self._recipe.clip_grad_value)
        optimizer, scheduler = self._optimizers[k]
        optimizer.step()
        state.keep_optimizer(optimizer)
        self._recipe.lr_schedule.after_step(scheduler)
        if self._recipe.ema is not None:
            state.average(self._recipe.ema, first=step == 0)
        for parameter in state.params.values():
            parameter.grad = None

    def _send(self, k: int, next_step: int) -> None:
        optimizer, scheduler = self._optimizers[k]
        cursor = make_cursor(next_step, optimizer, scheduler)
        self._publish(k, self._states[k].segments, cursor)


def _with_last(windows: Iterable[Window]) -> Iterable[tuple[Window, bool]]:
    """Yield each window and whether it is the last, looking ahead by one."""
    end = object()
    for window, following in itertools.pairwise(itertools.chain(windows, [end])):
        yield window, following is end  # type: ignore[misc]
