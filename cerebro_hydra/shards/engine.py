"""The engine runs one trial's shards: it interprets the actions that a schedule lists."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from cerebro_hydra.errors import ConfigurationError, StepDiffers
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
from cerebro_hydra.shards.bound_model import BoundModel, bound_model
from cerebro_hydra.shards.clipping import clip_coefficient, grad_norms, scale_grads
from cerebro_hydra.shards.cursor import make_cursor, restore_cursor
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.graph_tasks import GraphPredictor, GraphTasks
from cerebro_hydra.shards.layout import Segments, TrialLayout
from cerebro_hydra.shards.microbatch import Microbatch
from cerebro_hydra.shards.module_tasks import ModuleTasks, predict_by_modules
from cerebro_hydra.shards.optimizer_clone import clone_optimizer
from cerebro_hydra.shards.state import ShardState

Cursor = dict[str, Any]
Need = Callable[[int], tuple[Segments, Cursor | None]]
Publish = Callable[[int, Segments, Cursor], object]
OnStep = Callable[[int, float, Callable[[], Cursor]], object]
"""Is called with a step, its mean loss, and what makes the cursor with which training goes on."""
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
        self._shapes_seen: set[tuple[torch.Size, ...]] = set()

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
        run = _SubEpoch(self._cut_model, self._layout, self._recipe, self._steps_per_epoch,
                        need, publish, epoch_metrics)  # fmt: skip
        loss_sum, rows, step = 0.0, 0, start_step
        with run.tasks(self._keep) as tasks:
            for window, is_last in with_last(windows):
                batches = self._microbatches(window, step)
                run.window(tasks, self._actions(len(window), is_last), batches, step)
                sums = [b.loss * batch.rows for b, batch in zip(batches, window, strict=True)]
                for each in sums:
                    loss_sum += each
                window_rows = sum(batch.rows for batch in window)
                rows += window_rows
                if on_step is not None:
                    on_step(step, sum(sums) / window_rows, run.cursor)
                step += 1
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
        recipe = self._recipe
        evaluation = RunningEvaluation(recipe)
        with self._predictor(need) as predict:
            for batch in batches:
                features, targets = recipe.collated(batch.features, batch.labels, None)
                inputs = recipe.inputs(features, targets)
                self._check_shapes(inputs)
                with torch.no_grad(), recipe.precision():
                    outputs = predict(inputs)
                    if on_outputs is not None:
                        on_outputs(outputs)
                    loss = recipe.compute_loss(outputs, targets).item()
                    evaluation.add(loss, outputs, targets, batch.rows)
        return evaluation.result()

    def _predictor(self, need: Need) -> AbstractContextManager[Callable[[Sequence[Tensor]], Any]]:
        if self._cut_model.graphs is None:
            return predict_by_modules(self._cut_model, self._layout, self._recipe, need)
        return nullcontext(GraphPredictor(self._cut_model, self._layout, need))

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
        graphs = self._cut_model.graphs
        for guards in graphs.of(inputs).guards if graphs else ():
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
        need: Need, publish: Publish, epoch_metrics: Mapping[str, float] | None,
    ) -> None:  # fmt: skip
        self._cut_model = cut_model
        self._layout = layout
        self._recipe = recipe
        self._steps_per_epoch = steps_per_epoch
        self._need = need
        self._publish = publish
        self._epoch_metrics = epoch_metrics
        self._order = [p.name for p in cut_model.params]
        self._states: dict[int, ShardState] = {}
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, Any]] = {}
        self._coefficient: Tensor | None = None
        self._original = {n: id(p) for n, p in recipe.model.named_parameters()}
        self._bound: BoundModel | None = None
        self._step = 0

    @contextmanager
    def tasks(self, keep: bool) -> Iterator[GraphTasks | ModuleTasks]:
        """Return what runs F and B, for the time of the sub-epoch."""
        recipe, cut_model = self._recipe, self._cut_model
        try:
            if cut_model.graphs is not None:
                yield GraphTasks(cut_model, self._states, recipe.precision, keep)
                return
            with bound_model(recipe.model) as self._bound:
                tasks = ModuleTasks(cut_model, recipe, self._bound, recompute=not keep)
                with tasks.attached():
                    yield tasks
                self._bound.check_unwritten()
        finally:
            self._let_go()

    def window(
        self,
        tasks: GraphTasks | ModuleTasks,
        actions: Sequence[Action],
        batches: Sequence[Microbatch],
        step: int,
    ) -> None:
        """Carry out the actions of one optimizer step."""
        self._coefficient = None
        self._step = step
        if self._bound is not None:
            self._recipe.model.train()  # the forward may have left a module in evaluation
        pending = iter(actions)
        for number, batch in enumerate(batches):
            tasks.run(batch, partial(self._reach, pending, number))
        for action in pending:
            self._move(action)
        self._check_no_late_gradient()

    def _check_no_late_gradient(self) -> None:
        """Check that no parameter got a gradient after its update, which the next would take.

        Raises:
            StepDiffers: one did, so the uncut model takes this step otherwise.
        """
        for state in self._states.values():
            for name, parameter in state.params.items():
                if parameter.grad is not None:
                    raise StepDiffers(
                        f"in step {self._step}, parameter {name!r} got a gradient after the "
                        "update of its shard; the forward uses it in another shard too, or takes "
                        "gradients itself"
                    )

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
        if k not in self._states:
            self._receive(k)

    def _move(self, action: Action) -> None:
        match action.kind:
            case ActionKind.U:
                self._update(action.shard)
            case ActionKind.SEND:
                self._send(action.shard)
            case _:
                raise AssertionError(f"{action} moves a shard, but this schedule moves none")

    def _let_go(self) -> None:
        """Refer to no segment any more: an optimizer and its scheduler refer to one another."""
        for optimizer, _ in self._optimizers.values():
            optimizer.state.clear()
            optimizer.param_groups.clear()
        self._states.clear()

    def _receive(self, k: int) -> None:
        segments, cursor = self._need(k)
        if self._bound is None:
            state = ShardState(self._layout.shards[k], segments)
        else:
            state = self._bound.bind(self._layout.shards[k], segments)
        mine = {self._original[name]: p for name, p in state.params.items()}
        optimizer = clone_optimizer(self._recipe.optimizer, mine)
        scheduler = self._recipe.lr_schedule.make(optimizer, self._steps_per_epoch)
        if cursor is not None:
            if cursor["step"] != self._step:
                raise ValueError(
                    f"shard {k} is at step {cursor['step']}, training at step {self._step}"
                )
            restore_cursor(cursor, optimizer, scheduler)
        if self._epoch_metrics is not None:
            self._recipe.lr_schedule.begin_epoch(scheduler, self._epoch_metrics)
        state.load_optimizer(optimizer)
        self._states[k] = state
        self._optimizers[k] = (optimizer, scheduler)

    def _update(self, k: int) -> None:
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
            state.average(self._recipe.ema, first=self._step == 0)
        for parameter in state.params.values():
            parameter.grad = None

    def cursor(self, k: int = 0) -> Cursor:
        """Return the cursor of a shard after the present step."""
        return make_cursor(self._step + 1, *self._optimizers[k])

    def _send(self, k: int) -> None:
        self._publish(k, self._states[k].segments, self.cursor(k))


def with_last(windows: Iterable[Window]) -> Iterable[tuple[Window, bool]]:
    """Yield each window and whether it is the last, looking ahead by one."""
    end = object()
    for window, following in itertools.pairwise(itertools.chain(windows, [end])):
        yield window, following is end  # type: ignore[misc]
