"""A sub-epoch of one trial: binds its shards to memory, updates them, and lets them go."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import StepDiffers
from cerebro_hydra.recipe.randomness import random_numbers_kept
from cerebro_hydra.shards.cut.values import absent_value
from cerebro_hydra.shards.engine.bound_model import (
    BoundModel,
    HeldTensors,
    IdleModel,
    ShardMarks,
    bound_model,
    check_released,
    storages,
)
from cerebro_hydra.shards.engine.clipping import Clipping, Norms, floats, grad_norms
from cerebro_hydra.shards.engine.differences import same_bits, used_elsewhere
from cerebro_hydra.shards.engine.graph_tasks import GraphTasks
from cerebro_hydra.shards.engine.layout import GradientLayout, Memory, Segments, TrialRuntime
from cerebro_hydra.shards.engine.module_tasks import ModuleTasks
from cerebro_hydra.shards.engine.optimizer import clone_optimizer
from cerebro_hydra.shards.engine.state import ShardState, make_cursor, restore_cursor

Cursor = dict[str, Any]

MOST_TRIED = 1 << 20
"""Bytes of the largest parameter with which it is tried whether an optimizer is separable."""

LARGE = 1e6
"""An element of a gradient that any rule about all gradients takes for large."""

_CONTAINERS = (dict, list, set, deque)


class SubEpoch:
    """Holds the shards of a trial that trains, each from `receive` to `release`.

    Args:
        trial: who trains.
        start_step: the number of optimizer steps that the trial has done before.
        epoch_metrics: see `Engine.train`.
        held: a microbatch's copies of what it may read while a shard is away, or None if shards
            stay once they are there.
    """

    def __init__(
        self,
        trial: TrialRuntime,
        start_step: int,
        epoch_metrics: Mapping[str, float] | None,
        held: HeldTensors | None = None,
    ) -> None:
        recipe, cut_model = trial.recipe, trial.cut_model
        self._cut_model, self._layout, self._recipe = cut_model, trial.layout, recipe
        self._steps_per_epoch = trial.steps_per_epoch
        self._start_step = start_step
        self._epoch_metrics = epoch_metrics
        self._held = held
        self._states: dict[int, ShardState] = {}
        self._params: dict[int, dict[str, nn.Parameter]] = {}  # of the shards that were here
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, Any]] = {}
        self._steps: dict[int, int] = {}  # that each shard has done
        self._gradients: dict[int, Memory | None] = {}  # memory for those of each shard
        self._updated: set[int] = set()  # in this window
        self._marks: dict[int, ShardMarks] = {}  # of shards that the trial's code must leave alone
        self.in_last_window = False
        self._clipping = Clipping(recipe, cut_model)
        self._original = {n: id(p) for n, p in recipe.model.named_parameters()}
        self._bound: BoundModel | None = None
        self._idle: IdleModel | None = None
        self.step = start_step
        self._holding: Collection[int] = ()  # the shards of which copies are held if they come

    @contextmanager
    def tasks(self, keep: bool) -> Iterator[GraphTasks | ModuleTasks]:
        """Return what runs F and B, for the time of the sub-epoch."""
        recipe, cut_model = self._recipe, self._cut_model
        try:
            if cut_model.graphs is not None:
                self._idle = IdleModel(recipe.model)
                yield GraphTasks(cut_model, self._states, recipe.precision, keep, self._held)
                return
            with bound_model(recipe.model) as self._bound:
                tasks = ModuleTasks(cut_model, recipe, self._bound, recompute=not keep)
                with tasks.attached():
                    yield tasks
        finally:
            self._let_go()

    def __contains__(self, k: int) -> bool:
        """Return whether a shard is here."""
        return k in self._states

    # ------------------------------------------------------------------ windows and microbatches

    def begin_window(self, step: int) -> None:
        """Begin an optimizer step."""
        self.step = step
        self._clipping.begin_window()
        if self._bound is not None:
            self._recipe.model.train()  # the forward may have left a module in evaluation

    def end_window(self) -> None:
        """Check that no shard was changed after its update, nor got a gradient for the next one.

        Raises:
            StepDiffers: one was, so the uncut model takes this step otherwise.
        """
        for k in self._updated:
            self._check_left_alone(k)
        self._updated.clear()
        self._marks.clear()

    def _check_left_alone(self, k: int) -> None:
        if (marks := self._marks.get(k)) is not None and (written := marks.written()) is not None:
            done = "the update of its shard" if k in self._updated else "its shard had left"
            raise StepDiffers(
                f"in step {self.step}, {written} was written to after {done}, so the write is lost "
                "or comes too late; a backward hook of another layer, or a thread, writes to it"
            )
        if k in self._updated:
            self._check_no_late_gradient(k)

    def _check_no_late_gradient(self, k: int) -> None:
        for name, parameter in self._params[k].items():
            if parameter.grad is not None:
                raise StepDiffers(used_elsewhere(self.step, name))

    def begin_microbatch(self, shard: int | None = None) -> None:
        """Hold copies, from now on, of what is read while its shard is away.

        Args:
            shard: the one whose tasks come, which alone is held; None if those of all come.
        """
        self._holding = range(self._cut_model.num_shards) if shard is None else (shard,)
        for k in self._states.keys() & self._holding:
            self._hold(self._states[k])

    def end_microbatch(self) -> None:
        """Hold copies no more.

        Raises:
            StepDiffers: copies were written to whose shard had left.
        """
        for k in self._marks.keys() - self._updated:
            self._check_left_alone(k)
            del self._marks[k]
        for k in self._states.keys() & self._holding:
            self._end_hold(self._states[k])
        self._holding = ()
        assert self._held is not None
        if self._bound is not None:
            self._bound.end_copies(self._held.copies)
        self._held.copies.clear()

    def _hold(self, state: ShardState) -> None:
        assert self._held is not None
        copies = self._held.hold(state)
        if self._bound is not None:
            self._bound.use_copies(copies)

    def _end_hold(self, state: ShardState) -> dict[str, Tensor]:
        """Let a shard's memory have what is held of it, and hold it no more.

        Returns:
            The copies of its buffers.
        """
        assert self._held is not None
        self._write_back(state)
        copies = self._held.drop(self._held.names_of(state))
        if self._bound is not None:
            self._bound.end_copies(copies.keys(), state)
        return {name: copy for name, copy in copies.items() if name in state.buffers}

    def _write_back(self, state: ShardState) -> None:
        assert self._held is not None
        if self._bound is not None:
            self._bound.collect_written()
        self._held.write_back(state)

    # ------------------------------------------------------------------ one shard

    def receive(
        self,
        k: int,
        segments: Segments,
        cursor: Cursor | None,
        gradients: Memory | None = None,
    ) -> None:
        """Bind a shard to memory, in which it is trained until it is released."""
        if (marks := self._marks.get(k)) is not None and k not in self._updated:
            marks.come_back()
        self._check_left_alone(k)
        self._marks.pop(k, None)
        self._updated.discard(k)
        shard = self._layout.shards[k]
        if self._bound is None:
            state = ShardState(shard, segments, self._params.get(k))
        elif self._held is None:
            state = self._bound.bind(shard, segments)
        else:
            state = self._bound.bind_params(shard, segments)
        self._params[k] = state.params
        self._states[k] = state
        if k not in self._optimizers or (cursor is not None and cursor["step"] != self._steps[k]):
            self._make_optimizer(k, cursor)
        self._optimizers[k][0].state.clear()
        state.load_optimizer(self._optimizers[k][0])
        self._gradients[k] = gradients
        if gradients is not None:
            GradientLayout.of(shard).load(gradients, state.params)
        if k in self._holding:
            self._hold(state)

    def _make_optimizer(self, k: int, cursor: Cursor | None) -> None:
        mine = {self._original[name]: p for name, p in self._params[k].items()}
        optimizer = clone_optimizer(self._recipe.optimizer, mine)
        scheduler = self._recipe.lr_schedule.make(optimizer, self._steps_per_epoch)
        self._steps[k] = self._start_step if cursor is None else cursor["step"]
        if cursor is not None:
            restore_cursor(cursor, optimizer, scheduler, self._recipe.lr_schedule)
        if self._epoch_metrics is not None and self._steps[k] == self._start_step:
            self._recipe.lr_schedule.begin_epoch(scheduler, self._epoch_metrics)
        self._optimizers[k] = (optimizer, scheduler)

    def check_step(self, k: int) -> None:
        """Check that a shard has done every step before the present one.

        Raises:
            ValueError: it has not, or has done more.
        """
        if self._steps[k] != self.step:
            raise ValueError(f"shard {k} is at step {self._steps[k]}, training at step {self.step}")

    def release(self, k: int, *, needed: bool, last: bool) -> Norms | None:
        """Refer to a shard's memory no more; return the norms of its gradients, if they count.

        Args:
            needed: whether the present microbatch has yet to come back to the shard.
            last: whether it was the shard's last time in the sub-epoch.

        Raises:
            ConfigurationError: the forward keeps a view of a parameter.
        """
        state = self._states[k]
        assert self._held is not None
        self._check_left_alone(k)
        self._write_back(state)
        counts = self._clipping.by_norm and k not in self._updated
        norms = self._clipping.note(k, state.params) if counts else None
        GradientLayout.of(self._layout.shards[k]).store(self._gradients.pop(k), state.params)
        if self._bound is not None:
            if last:
                self._bound.check_frozen(state.constant & state.values.keys())
            self._bound.unbind(state, self._held.copies)
            self._mark_what_left(k, self._bound, state)
        else:
            for parameter in state.params.values():
                parameter.data = absent_value(parameter)
        self._optimizers[k][0].state.clear()
        memory = storages(state)
        del self._states[k], state
        if needed:
            check_released(memory)
        return norms

    def add_norms(self, norms: Mapping[int, Norms]) -> None:
        """Take the norms of gradients of shards whose last backward was in another process."""
        self._clipping.add(norms)

    def norms_of(self, k: int) -> Norms:
        """Return the norms of the gradients of a shard that is here."""
        return floats(grad_norms(self._states[k].params))

    def update(self, k: int) -> None:
        """Take the optimizer step of a shard.

        Raises:
            ValueError: the norms of a shard's gradients are not known, by which they are clipped.
        """
        state, copies = self._states[k], {}
        if self._held is not None:
            copies = self._end_hold(state)
        elif self._bound is not None:
            self._bound.collect_written(state)  # what a backward hook has assigned
        self._clipping.clip(k, self._states)
        optimizer, scheduler = self._optimizers[k]
        optimizer.step()
        state.keep_optimizer(optimizer)
        self._recipe.lr_schedule.after_step(scheduler)
        if self._recipe.ema is not None:
            state.average(self._recipe.ema, first=self.step == 0)
        for parameter in state.params.values():
            parameter.grad = None
        self._steps[k] = self.step + 1
        self._updated.add(k)
        if self._bound is not None and k > 0 and not self._clipping.by_norm:
            # Else no backward comes after it.
            self._mark_updated(k, self._bound, state, copies)

    def _mark_updated(
        self, k: int, bound: BoundModel, state: ShardState, copies: Mapping[str, Tensor]
    ) -> None:
        """Mark a shard that the backwards of other shards must leave alone from now on.

        Where shards stay, the next window finds what is written to buffers, as in plain training;
        the last one has none after it.
        """
        last = self.in_last_window
        keys = bound.keys_of(state, buffers=last or self._held is not None)
        self._marks[k] = ShardMarks(bound, keys, (), copies, last)

    def _mark_what_left(self, k: int, bound: BoundModel, state: ShardState) -> None:
        """Mark what the model has of a shard that is away: values without memory, and copies."""
        assert self._held is not None
        if (marks := self._marks.get(k)) is not None:
            marks.left()
        elif k not in self._updated:
            keys, held = bound.keys_of(state), self._held.copies.keys()
            self._marks[k] = ShardMarks(bound, keys, held, {}, self.in_last_window)

    def check_separable(self, k: int) -> None:
        """Check, before a shard's update, that its optimizer would not look at other shards.

        Raises:
            StepDiffers: what it does with one parameter depends on the gradients of others.
        """
        optimizer = self._optimizers[k][0]
        if self._cut_model.num_shards == 1 or _is_known(optimizer):
            return
        if (found := other_gradients_matter(optimizer)) is not None:
            (name,) = (name for name, p in self._states[k].params.items() if p is found)
            raise StepDiffers(
                f"in step {self.step}, the optimizer updates parameter {name!r} otherwise if "
                "another one has a large gradient; so it needs the gradients of all shards, and "
                "has those of one"
            )

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of all shards that were here."""
        return [optimizer for optimizer, _ in self._optimizers.values()]

    def cursor(self, k: int = 0) -> Cursor:
        """Return the cursor of a shard with its last update."""
        return make_cursor(self._steps[k], *self._optimizers[k])

    # ------------------------------------------------------------------ the end

    def check_unwritten(self) -> None:
        """Check that training wrote to nothing that does not hop; see `BoundModel`.

        Raises:
            StepDiffers: code beside the model's graph wrote to the model.
        """
        if self._bound is not None:
            self._bound.check_unwritten()
        elif self._idle is not None and (written := self._idle.written()) is not None:
            raise StepDiffers(
                f"up to step {self.step}, {written} was written to by code beside the model's "
                "graph, such as its loss or a thread, and the graph has another copy of it"
            )

    def _let_go(self) -> None:
        """Refer to no segment any more: an optimizer and its scheduler refer to one another."""
        for optimizer, _ in self._optimizers.values():
            optimizer.state.clear()
            optimizer.param_groups.clear()
        if self._bound is None:  # else these are the model's own parameters
            own = dict(self._recipe.model.named_parameters())
            for name, parameter in itertools.chain(*(p.items() for p in self._params.values())):
                vars(own[name]).update(vars(parameter))  # what the optimizer has kept there
        self._states.clear()
        self._params.clear()
        self._marks.clear()
        self._gradients.clear()
        if self._held is not None:
            self._held.copies.clear()


def other_gradients_matter(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Return a parameter that an optimizer updates otherwise beside one with a large gradient.

    None is returned if there is none. It is tried with copies of the smallest parameter, before a
    step is taken; the optimizer stays as it is.
    """
    given = [p for group in optimizer.param_groups for p in group["params"] if _is_dense(p.grad)]
    smallest = min(given, key=lambda p: p.nbytes, default=None)
    if smallest is None or smallest.nbytes > MOST_TRIED:
        return None
    with random_numbers_kept():
        alone = _updated(optimizer, smallest, beside=False)
    with random_numbers_kept():
        beside = _updated(optimizer, smallest, beside=True)
    return None if same_bits(alone, beside) else smallest


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is torch's own, which is separable if it is not refused."""
    hooks = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    return type(optimizer).__module__.startswith("torch.optim.") and not any(hooks)


def _is_dense(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is torch.strided and gradient.numel() > 0


def _updated(optimizer: torch.optim.Optimizer, parameter: Tensor, *, beside: bool) -> Tensor:
    """Return a copy of a parameter after a step, alone or beside a copy with large gradients."""
    mine = nn.Parameter(parameter.detach().clone())
    assert parameter.grad is not None
    mine.grad = parameter.grad.detach().clone()
    clone = clone_optimizer(optimizer, {id(parameter): mine})
    held = vars(clone)  # what it shares with the original stays as it is
    held.update((name, copy.copy(v)) for name, v in tuple(held.items()) if type(v) in _CONTAINERS)
    if beside:
        other = nn.Parameter(mine.detach().clone())
        largest = torch.finfo(mine.grad.dtype).max / 8
        other.grad = torch.full_like(mine.grad, min(LARGE, largest))
        if mine in clone.state:
            clone.state[other] = copy.deepcopy(clone.state[mine])
        (group,) = (g for g in clone.param_groups if g["params"])
        group["params"].append(other)
        if "param_names" in group:
            group["param_names"].append(f"beside {group['param_names'][0]}")
    clone.step()
    return mine
