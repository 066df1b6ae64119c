"""A sub-epoch of one trial: binds its shards to memory, updates them, and lets them go."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import StepDiffers
from cerebro_hydra.recipe.grad_scaling import GradScaling, take_step
from cerebro_hydra.recipe.placement import CPU
from cerebro_hydra.shards.cut.values import TensorKey, absent_value
from cerebro_hydra.shards.engine.barrier import Barrier, GradientFacts
from cerebro_hydra.shards.engine.bound_model import (
    BoundModel,
    HeldTensors,
    ShardMarks,
    bound_model,
    check_released,
    storages,
)
from cerebro_hydra.shards.engine.differences import (
    BY_OTHERS,
    TRIED_STEPS,
    is_torchs_own,
    other_gradients_matter,
    refused_draws,
    tensor_used_elsewhere,
    used_elsewhere,
)
from cerebro_hydra.shards.engine.graph_tasks import GraphTasks
from cerebro_hydra.shards.engine.layout import Memory, Segments, TrialRuntime
from cerebro_hydra.shards.engine.microbatch import (
    SubEpochInput,
    UsesElsewhere,
    memory_reads_seen,
)
from cerebro_hydra.shards.engine.module_tasks import ModuleTasks
from cerebro_hydra.shards.engine.optimizer import check_groups, clone_optimizer, different_option
from cerebro_hydra.shards.engine.state import (
    EarlyGradients,
    ShardState,
    WeightVersions,
    WordSamples,
    beside_state_dict,
    check_in_state_dict,
    make_cursor,
    restore_cursor,
)
from cerebro_hydra.shards.places import Places, TensorMark

Cursor = dict[str, Any]


class SubEpoch:
    """Holds the shards of a trial that trains, each from `receive` to `release`.

    Attributes:
        at_once: whether shards are looked at right after their updates, while backward runs.
        after_backward: whether updates come when the backward of all shards is over.

    Args:
        trial: who trains.
        given: what it trains on; whoever runs the tasks reads its batches.
        held: a microbatch's copies of what it may read while a shard is away, or None if shards
            stay once they are there.
    """

    def __init__(
        self,
        trial: TrialRuntime,
        given: SubEpochInput,
        held: HeldTensors | None = None,
    ) -> None:
        recipe, cut_model = trial.recipe, trial.cut_model
        self._cut_model, self._layout, self._recipe = cut_model, trial.layout, recipe
        self._steps_per_epoch = trial.steps_per_epoch
        self._given = given
        self._held = held
        self._staleness = trial.staleness
        self._versions: dict[int, WeightVersions] = {}  # of shards that read older weights
        self._reading = given.start_step  # the step whose tasks read
        self._states: dict[int, ShardState] = {}
        self._params: dict[int, dict[str, nn.Parameter]] = {}  # of the shards that were here
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, Any]] = {}
        self._scalings: dict[int, GradScaling | None] = {}
        self._beside: dict[int, dict[str, Any]] = {}  # the schedulers' state that does not hop
        self._steps: dict[int, int] = {}  # that each shard has done
        self._gradients: dict[int, Memory | None] = {}  # memory for those of each shard
        self._early = EarlyGradients(self._params, recipe.model)
        self._updated: set[int] = set()  # in this window
        self._trainable: dict[int, Memory] = {}
        self._samples = WordSamples(trial.layout)  # of shards that were updated in this window
        # What stands for gradients after an update.
        self._gone: dict[int, dict[str, TensorMark | None]] = {}
        self._marks: dict[int, ShardMarks] = {}  # of shards that the trial's code must leave alone
        self.in_last_window = self.at_once = self.after_backward = False
        self._barrier = Barrier(recipe, cut_model)
        self._original = {n: id(p) for n, p in recipe.model.named_parameters()}
        self._bound: BoundModel | None = None
        self._idle: BoundModel | None = None  # it has no shard, because its graph trains
        self.step = given.start_step
        self._holding: Collection[int] = ()  # the shards of which copies are held if they come

    @contextmanager
    def tasks(self, keep: bool) -> Iterator[GraphTasks | ModuleTasks]:
        """Return what runs F and B, for the time of the sub-epoch."""
        recipe, cut_model = self._recipe, self._cut_model
        try:
            if cut_model.graphs is not None:
                with (
                    memory_reads_seen(),
                    bound_model(recipe.model, self._layout.shards) as self._idle,
                ):
                    yield GraphTasks(
                        cut_model,
                        self._states,
                        recipe.precision,
                        keep,
                        self._scaled,
                        self._held,
                        self._versions,
                    )
                return
            # The code of a model in one shard runs only while that is there.
            several = self._layout.shards if len(self._layout.shards) > 1 else ()
            with memory_reads_seen(), bound_model(recipe.model, several) as self._bound:
                tasks = ModuleTasks(cut_model, recipe, self._bound, not keep, self._scaled)
                with tasks.attached():
                    yield tasks
        finally:
            self._let_go()

    def _scaled(self, loss: Tensor) -> Tensor:
        """Scale a loss as the shard does in which its backward begins."""
        scaling = self._scalings[self._cut_model.num_shards - 1]
        return loss if scaling is None else scaling.scale(loss)

    def __contains__(self, k: int) -> bool:
        """Return whether a shard is here."""
        return k in self._states

    # ------------------------------------------------------------------ windows and microbatches

    def begin_window(self, step: int) -> None:
        """Begin an optimizer step."""
        self.step = step
        self._barrier.begin_window()
        if self._bound is not None:
            self._recipe.model.train()  # the forward may have left a module in evaluation
            self._bound.begin_step()

    def end_window(self) -> None:
        """Check that no shard was changed after its update, nor got a gradient for the next one.

        Nor may others have used what it has.

        Raises:
            StepDiffers: that was so, and the uncut model takes this step otherwise.
        """
        for k in self._updated:
            self._check_left_alone(k)
            self._end_gone(k)
        if self._bound is not None:
            self._bound.end_step()
        self._updated.clear()
        self._marks.clear()
        self._samples.clear()

    def _check_left_alone(self, k: int, returns: bool = False) -> None:
        """Check a shard that others must leave alone by now.

        Args:
            returns: whether it comes back in its microbatch, for it has then what was written to
                the copies that the model had of it.
        """
        written: TensorKey | None = None
        if not returns and (marks := self._marks.get(k)) is not None:
            written = marks.written()
        if written is None and k in self._samples:
            written = self._samples.changed(k, self._trainable[k])
        if written is None and self._bound is not None and k not in self._states:
            content = self.in_last_window or self._recipe.device == CPU
            written = self._bound.written_while_away(k, content)
        if written is not None:
            raise StepDiffers(self._told(k, *written))
        if k in self._updated:
            self._check_no_late_gradient(k)

    def _told(self, k: int, kind: str, name: str) -> str:
        """Tell of a tensor that was written to where its shard does not get it, or not in time."""
        written = f"in step {self.step}, {kind} {name!r} was written to"
        if k in self._updated or k in self._marks:
            when = "the update of its shard" if k in self._updated else "its shard had left"
            return f"{written} after {when}, so the write is lost or comes too late; {BY_OTHERS}"
        return f"{written} before its shard had come, so the write is lost; {BY_OTHERS}"

    def _check_no_late_gradient(self, k: int) -> None:
        gone = self._gone.get(k, {})
        for name, parameter in self._params[k].items():
            gradient, mark = parameter.grad, gone.get(name)
            is_left = mark is not None and gradient is mark.tensor and not mark.is_written
            if gradient is not None and not is_left:
                raise StepDiffers(used_elsewhere(self.step, name))

    def _end_gone(self, k: int) -> None:
        """Let nothing stand for gradients of a shard any more, and let its parameters be used."""
        if k in self._states:
            self._let_use(k)
        for name in self._gone.pop(k, ()):
            self._params[k][name].grad = None

    def _let_use(self, k: int) -> None:
        if self._bound is not None:
            for name in self._gone.get(k, ()):
                self._bound.elsewhere.discard(self._states[k].values[name])

    def _read(self, k: int) -> None:
        """Let tasks of a shard read the weights that those of the present step read.

        If it has done that step, the next task that reads them is of a later one.
        """
        step = max(self._reading, self._steps[k]) - self._given.start_step
        self._versions[k].read(max(0, step - self._staleness[k]))

    def begin_microbatch(
        self, step: int, shard: int | None = None, follows: bool | None = None
    ) -> None:
        """Hold copies, from now on, of what is read while its shard is away.

        Args:
            step: the optimizer step of the microbatch.
            shard: the one whose tasks come, which alone is held; None if those of all come.
            follows: whether the model's own forward begins behind another one of its window, None
                if there is none.
        """
        self._reading = step
        for k in self._versions.keys() & (self._versions if shard is None else {shard}):
            self._read(k)
        if follows is not None:
            self._early.begin(self._states, follows)
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

    def end_forward(self) -> None:
        """End a microbatch's forward, whose gradients must not be lost; see `EarlyGradients`."""
        self._early.end(self.step, self._gradients)

    def end_backward(self, k: int) -> None:
        """Note where gradients of a shard are now."""
        self._early.end_backward(k, self._gradients.get(k))

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
            self._bound.collect_written(state)
        self._held.write_back(state, self._bound is not None)

    # ------------------------------------------------------------------ one shard

    def receive(
        self,
        k: int,
        segments: Segments,
        cursor: Cursor | None,
        gradients: Memory | None = None,
    ) -> None:
        """Bind a shard to memory, in which it is trained until it is released."""
        self._early.check(self.step, k, self._gradients.get(k))
        returns = k in self._marks and k not in self._updated
        if returns and self._bound is not None:
            self._bound.collect_written()  # such as a buffer in the place of its copy
        self._check_left_alone(k, returns)
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
        self._trainable[k] = segments["trainable"]
        if k not in self._optimizers or (cursor is not None and cursor["step"] != self._steps[k]):
            self._make_optimizer(k, cursor)
        self._optimizers[k][0].state.clear()
        state.load_optimizer(self._optimizers[k][0])
        if (memory := segments.get("versions")) is not None:
            newest, stale = self._steps[k] - self._given.start_step, self._staleness[k]
            self._versions[k] = WeightVersions(shard, state, memory, stale, newest)
            self._read(k)
        self._gradients[k] = gradients
        if gradients is not None:
            shard.gradients.load(gradients, state.params)
        self._early.note(k)
        if k in self._holding:
            self._hold(state)

    def complete(self, k: int, segments: Segments, gradients: Memory | None) -> None:
        """Bind what has come of a shard's memory after the shard was bound."""
        state, shard = self._states[k], self._layout.shards[k]
        if not state.is_whole and "optimizer" in segments:
            state.complete(segments["optimizer"])
            state.load_optimizer(self._optimizers[k][0])
        if gradients is not None and self._gradients[k] is None:
            self._early.check(self.step, k, self._gradients.get(k))
            self._gradients[k] = gradients
            shard.gradients.load(gradients, state.params)
            self._early.note(k)

    def _make_optimizer(self, k: int, cursor: Cursor | None) -> None:
        mine = {self._original[name]: p for name, p in self._params[k].items()}
        optimizer = clone_optimizer(self._recipe.optimizer, mine)
        scheduler = self._recipe.lr_schedule.make(optimizer, self._steps_per_epoch)
        self._steps[k] = self._given.start_step if cursor is None else cursor["step"]
        scaling = self._recipe.scaling(None if cursor is None else cursor.get("scaler"))
        if cursor is not None:
            restore_cursor(cursor, optimizer, scheduler, scaling, self._recipe.lr_schedule)
        self._optimizers[k], self._scalings[k] = (optimizer, scheduler), scaling
        if self._given.epoch_metrics is not None and self._steps[k] == self._given.start_step:
            with self._seen_by_update(k):
                self._recipe.lr_schedule.begin_epoch(scheduler, self._given.epoch_metrics)
        self._beside[k] = beside_state_dict(scheduler)

    def check_step(self, k: int, updates: bool) -> None:
        """Check that a shard has done every step before the present one.

        Where a shard reads older weights, forwards and backwards need the version that they read.

        Raises:
            ValueError: it has not, or has done more.
        """
        if self._staleness and not updates:
            self._reading = self.step
            if k in self._versions:
                self._read(k)
        elif self._steps[k] != self.step:
            raise ValueError(f"shard {k} is at step {self._steps[k]}, training at step {self.step}")

    def release(self, k: int, *, needed: bool, last: bool) -> None:
        """Refer to a shard's memory no more.

        Args:
            needed: whether the present microbatch has yet to come back to the shard.
            last: whether it was the shard's last time in the sub-epoch.

        Raises:
            StepDiffers: the forward keeps a view of a parameter.
        """
        state = self._states[k]
        assert self._held is not None
        self._check_left_alone(k)
        self._let_use(k)
        self._samples.pop(k, None)
        for name in self._gone.get(k, ()):
            state.params[name].grad = None
        self._write_back(state)
        if k not in self._updated:
            self._barrier.note(k, state.params, self._scalings[k])
        self._early.check(self.step, k, self._gradients.get(k))
        gradients = self._gradients.pop(k)
        self._early.resting.discard(k)
        if gradients is not None or not needed:  # else they wait at the parameters for the shard
            self._early.forget(k)
            self._layout.shards[k].gradients.store(gradients, state.params)
        if self._bound is not None:
            if last:
                self._bound.check_frozen(state.constant & state.values.keys())
            self._bound.unbind(state, self._held.copies)
            self._mark_what_left(k, self._bound, state)
            for name, mark in self._gone.get(k, {}).items():
                state.params[name].grad = None if mark is None else mark.tensor
        else:
            for parameter in state.params.values():
                parameter.data = absent_value(parameter)
        self._optimizers[k][0].state.clear()
        self._versions.pop(k, None)
        memory = storages(state)
        del self._states[k], self._trainable[k], state
        if needed:
            check_released(memory)

    def add_facts(self, facts: Mapping[int, GradientFacts]) -> None:
        """Take what is known of shards whose last backward was in another process."""
        self._barrier.add(facts)

    def facts_of(self, k: int) -> GradientFacts:
        """Return what others must know of the gradients of a shard that is here."""
        return self._barrier.facts(self._states[k].params, self._scalings[k])

    def update(self, k: int) -> None:
        """Take the optimizer step of a shard, or skip it.

        Raises:
            StepDiffers: the optimizer reads what other shards have.
            ValueError: what the barrier needs of a shard is not known, or the optimizer state of
                this one is not here.
            NonFiniteLoss: see `GradScaling.step`.
        """
        state, copies = self._states[k], {}
        if not state.is_whole:
            raise ValueError(f"shard {k} has no optimizer state here; load that before its update")
        if self._held is not None:
            copies = self._end_hold(state)
        elif self._bound is not None:
            self._bound.collect_written(state)  # what a backward hook has assigned
        (optimizer, scheduler), scaling = self._optimizers[k], self._scalings[k]
        self._barrier.apply(k, self._states, optimizer, scaling)
        if (versions := self._versions.get(k)) is not None:
            versions.begin_next()
        others, device = len(self._layout.shards) - 1, self._recipe.device
        with self._seen_by_update(k), refused_draws(self.step, others, device):
            if take_step(optimizer, scaling, self.step, self._recipe.optimizer_on == "host"):
                self._recipe.lr_schedule.after_step(scheduler)
        state.keep_optimizer(optimizer)  # a fused one makes its state in a step that is skipped
        if self._recipe.ema is not None:
            state.average(self._recipe.ema, first=self.step == 0)
        if versions is not None and self.step + 1 == self._given.start_step + self._given.steps:
            versions.settle()
        for parameter in state.params.values():
            parameter.grad = None
        self._steps[k] = self.step + 1
        self._updated.add(k)
        is_last = self._recipe.barrier or (self.after_backward and is_torchs_own(optimizer))
        if self._bound is not None and k > 0 and not is_last:  # else no code of the trial follows
            self._mark_updated(k, self._bound, state, copies)

    @contextmanager
    def _seen_by_update(self, k: int) -> Iterator[None]:
        """Let code of an update see its shard's buffers; look at what else it uses, at both ends.

        That is an optimizer of the user's, a hook of its steps, an LR scheduler.
        """
        model, state, (optimizer, scheduler) = self._bound, self._states[k], self._optimizers[k]
        idle = model or self._idle  # which has no shard's buffers
        if idle is None or (is_torchs_own(optimizer) and scheduler is None):
            yield
            return
        moving = {n: b for n, b in state.buffers.items() if n not in state.constant}
        places, looks = Places(), self.in_last_window or self.step == self._given.start_step
        if looks:
            all_shards = enumerate(self._layout.shards)
            places = idle.places_of(s for n, s in all_shards if n != k or model is None)
            for name, mark in itertools.chain(*(each.items() for each in self._gone.values())):
                if mark is not None:
                    places.add(f"the gradient of parameter {name!r}", mark.tensor)
        own = model.replaced_buffers(moving) if model and self._held is not None else nullcontext()
        with own, UsesElsewhere(places, looks=bool(places)) as uses:
            yield
        if uses.found is not None:
            raise StepDiffers(tensor_used_elsewhere(self.step, uses.found))

    def _mark_updated(
        self, k: int, bound: BoundModel, state: ShardState, copies: Mapping[str, Tensor]
    ) -> None:
        """Mark a shard that the backwards of other shards must leave alone from now on."""
        last = self.in_last_window
        if last or self.at_once:
            self._let_nobody_use(k, bound, state)
        if not last and self._recipe.device == CPU:
            self._samples.take(k, self._trainable[k])
        # Where shards stay, what the next window finds in buffers is as in plain training.
        keys = bound.keys_of(state, buffers=last or self._held is not None)
        self._marks[k] = ShardMarks(bound, keys, copies, last)

    def _let_nobody_use(self, k: int, bound: BoundModel, state: ShardState) -> None:
        """Let it be seen if a backward of other shards uses parameters or gradients of a shard."""
        self._gone[k] = {}
        for name, value in state.values.items():
            if name in state.constant:
                continue
            bound.elsewhere.add(f"parameter {name!r}", value)
            gone = bound.gone_gradient(name) if self._recipe.device == CPU else None
            state.params[name].grad = gone
            self._gone[k][name] = None if gone is None else TensorMark.on(gone)

    def _mark_what_left(self, k: int, bound: BoundModel, state: ShardState) -> None:
        """Mark the copies that the model has of a shard that is away."""
        assert self._held is not None
        if (marks := self._marks.get(k)) is not None:
            marks.left()
        elif k not in self._updated:
            keys = [key for key in bound.keys_of(state) if key[1] in self._held.copies]
            self._marks[k] = ShardMarks(bound, keys, {}, self.in_last_window)

    def check_separable(self, k: int) -> None:
        """Check, before a shard's update, that its optimizer would not look at other shards.

        Raises:
            StepDiffers: what it does with one parameter depends on the gradients of others.
        """
        optimizer = self._optimizers[k][0]
        if self._cut_model.num_shards == 1 or is_torchs_own(optimizer):
            return
        on_host, steps = self._recipe.optimizer_on == "host", 1 if self.step else TRIED_STEPS
        if (found := other_gradients_matter(optimizer, on_host, steps)) is not None:
            parameter, number, how = found
            (name,) = (name for name, p in self._states[k].params.items() if p is parameter)
            step = self.step + number
            raise StepDiffers(f"in step {step}, the optimizer updates parameter {name!r} {how}")

    @property
    def idle(self) -> Places | None:
        """Return where the model has its tensors if it is cut as a graph, which has others."""
        return None if self._idle is None else self._idle.elsewhere

    @property
    def optimizers(self) -> list[tuple[torch.optim.Optimizer, Any]]:
        """Return the optimizers of all shards that were here, each with its LR scheduler."""
        return list(self._optimizers.values())

    def params(self, k: int) -> Mapping[str, nn.Parameter]:
        """Return the parameters of a shard that is here."""
        return self._params[k]

    def buffers(self, k: int) -> Mapping[str, Tensor]:
        """Return the buffers of a shard, with what was assigned to the model in their place."""
        if self._bound is not None:
            self._bound.collect_written(self._states[k])
        return self._states[k].buffers

    def forward_buffers(self, k: int) -> Mapping[str, Tensor]:
        """Return the buffers of a shard as its forward left them, while a backward is to come."""
        own = self._states[k].buffers
        bound = self._bound
        return own if bound is None else {name: bound.current(("buffer", name)) for name in own}

    def cursor(self, k: int = 0) -> Cursor:
        """Return the cursor of a shard with its last update."""
        return make_cursor(self._steps[k], *self._optimizers[k], self._scalings[k])

    # ------------------------------------------------------------------ the end

    def check_cursors(self) -> None:
        """Check that what each shard's optimizer and LR scheduler keep beside tensors is the same.

        Raises:
            StepDiffers: it is not, because one of them looks at the parameters that it has.
            ConfigurationError: an LR scheduler has changed what no cursor has.
        """
        first: tuple[int, Cursor] | None = None
        latest = max((self._steps[k] for k in self._optimizers), default=0)
        for k, (optimizer, scheduler) in self._optimizers.items():
            if self._steps[k] != latest:
                continue  # another device has updated it since
            check_groups(optimizer, self._recipe.optimizer)
            check_in_state_dict(scheduler, self._beside[k])
            cursor = self.cursor(k)
            for number, group in enumerate(optimizer.param_groups):
                if not group["params"]:
                    cursor["groups"][number] = None  # whatever an empty group holds, nobody needs
            if first is None:
                first = k, cursor
            elif (found := different_option(first[1], cursor)) is not None:
                where, there, here = found
                raise StepDiffers(
                    f"after step {self.step}, {where} is {there} for shard {first[0]} and {here} "
                    f"for shard {k}; the optimizer or the LR scheduler needs the parameters of all "
                    "shards, and has those of one"
                )

    def check_unwritten(self) -> None:
        """Check that training wrote to nothing that does not hop; see `BoundModel`.

        Raises:
            StepDiffers: code beside the model's graph wrote to the model.
        """
        if self._bound is not None:
            if (written := self._bound.written_apart()) is not None:
                raise StepDiffers(
                    f"up to step {self.step}, {written[0]} {written[1]!r} was written to while its "
                    f"shard was away, so the write is lost; {BY_OTHERS}"
                )
            self._bound.check_unwritten()
        elif self._idle is not None and (written := self._idle.written_idle()) is not None:
            raise StepDiffers(
                f"up to step {self.step}, {written[0]} {written[1]!r} was written to by code "
                "beside the model's graph, such as its loss or a thread, and the graph has another "
                "copy of it"
            )
        elif self._idle is not None and self._idle.elsewhere.used is not None:
            raise StepDiffers(self._idle.elsewhere.used)

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
        self._versions.clear()
        self._params.clear()
        self._marks.clear()
        self._gone.clear()
        self._trainable.clear()
        self._gradients.clear()
        if self._held is not None:
            self._held.copies.clear()
