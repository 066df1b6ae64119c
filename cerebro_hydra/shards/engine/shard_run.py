"""A sub-epoch of one trial whose tasks are taken one by one, from outside.

In a moving run, of a graph cut, microbatches go from device to device between two units.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.recipe import RandomKey, Recipe, Window
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.engine.bound_model import HeldTensors
from cerebro_hydra.shards.engine.graph_tasks import GraphPass, GraphTasks
from cerebro_hydra.shards.engine.layout import ALIGNMENT, Memory, Segments, TrialLayout
from cerebro_hydra.shards.engine.microbatch import (
    MemoryLimit,
    Microbatch,
    MicrobatchMaker,
    Reach,
    Then,
)
from cerebro_hydra.shards.engine.module_tasks import PausedRun
from cerebro_hydra.shards.engine.pass_record import (
    Key,
    PassRecord,
    TensorLog,
    check_room,
    tensors_of,
)
from cerebro_hydra.shards.engine.sub_epoch import Cursor, Norms, SubEpoch


@dataclass(frozen=True)
class TrainTotals:
    """Holds a sub-epoch's totals: its loss summed over rows, its rows, and its optimizer steps."""

    loss_sum: float
    rows: int
    steps: int


def with_last(windows: Iterable[Window]) -> Iterator[tuple[Window, bool]]:
    """Yield each window and whether it is the last, looking ahead by one."""
    end = object()
    for window, following in itertools.pairwise(itertools.chain(windows, [end])):
        yield window, following is end  # type: ignore[misc]


class ShardRun:
    """Trains one trial over a sub-epoch in the process of a device, one shard task at a time.

    A shard's state is in the device's memory from `load` to `unload`. Tasks come in an order that
    `plan/schedules/graph.py` allows; F and B of the last shard have no `unload` between them. Runs
    of other trials may take tasks in between. Until it is closed the run has the recipe's model to
    itself.

    A resident run has every shard from its first task to the end, and the device to itself during
    a microbatch: one call makes all of its tasks on the thread that asks for the first of them.

    Attributes:
        losses: the mean loss and the rows of each microbatch that was run here, by its number.

    Args:
        recompute: whether B computes the shard's activations again, so that the shard may be
            unloaded between its F and its B. Otherwise all shards stay during a microbatch.
        start_step: the number of optimizer steps that the trial has done before the sub-epoch.
        windows: the batches of each optimizer step of the sub-epoch.
        epoch_metrics: see `Engine.train`.
        shared: parameters that are read while another shard than theirs runs, if the cut model does
            not know of it.
        limit: bounds what tasks hold of the device beside their shards; None does not.
        resident: whether shards stay once they are there, until the run is closed.
    """

    def __init__(
        self,
        cut_model: CutModel,
        layout: TrialLayout,
        recipe: Recipe,
        trial_seed: int,
        steps_per_epoch: int,
        recompute: bool,
        start_step: int,
        windows: Iterable[Window],
        epoch_metrics: Mapping[str, float] | None = None,
        shared: Collection[str] = (),
        limit: MemoryLimit | None = None,
        resident: bool = False,
    ) -> None:
        self.losses: dict[int, tuple[float, int]] = {}
        self._cut_model, self._recipe, self._trial_seed = cut_model, recipe, trial_seed
        self._accumulate = recipe.accumulate
        self._recompute = recompute
        self._start_step = start_step
        self._windows = enumerate(with_last(windows))
        self._at: tuple[int, tuple[Window, bool]] | None = None
        self._maker = MicrobatchMaker(cut_model, recipe, trial_seed)
        self._resident = resident
        held = None if resident else HeldTensors(cut_model.shared.union(shared))
        self._sub_epoch = SubEpoch(
            cut_model, layout, recipe, steps_per_epoch, start_step, epoch_metrics, held
        )
        self._limit, self._copies = limit, {} if held is None else held.copies
        self._paused = PausedRun(recipe.device)
        self._stack = ExitStack()
        self._tasks = self._stack.enter_context(self._sub_epoch.tasks(keep=not recompute))
        self._step = -1  # whose window was begun
        self._number = -1  # of the microbatch under way
        self._next: tuple[str, int] | None = None  # its next task
        self._updated_last: set[int] = set()  # shards whose last window is over

    @property
    def totals(self) -> TrainTotals:
        """Return the totals of the microbatches that were run here."""
        loss_sum, rows = 0.0, 0
        for _, (loss, of_microbatch) in sorted(self.losses.items()):
            loss_sum += loss * of_microbatch
            rows += of_microbatch
        return TrainTotals(loss_sum, rows, len({n // self._accumulate for n in self.losses}))

    def mean_loss(self, first: int, microbatches: int) -> float:
        """Return the mean loss over the rows of these microbatches, which were run here."""
        found = [self.losses[number] for number in range(first, first + microbatches)]
        return sum(loss * rows for loss, rows in found) / sum(rows for _, rows in found)

    # ------------------------------------------------------------------ memory

    def load(
        self, k: int, segments: Segments, cursor: Cursor | None, gradients: Memory | None = None
    ) -> None:
        """Let shard k be in this memory until it is unloaded.

        Args:
            segments: they begin at multiples of `ALIGNMENT`.
            cursor: the one with the shard's last update, None for state 0.
            gradients: memory laid out by `GradientLayout`, as `unload` left it, or zeroed. It is
                needed where gradients outlive a task: with accumulation or clipping by the norm.
        """
        if k in self._sub_epoch:
            raise ValueError(f"shard {k} is loaded already; unload it before")
        if any(memory.data_ptr() % ALIGNMENT for memory in segments.values()):
            raise ValueError(
                f"the memory of shard {k} is not aligned to {ALIGNMENT} bytes; align it"
            )
        self._sub_epoch.receive(k, segments, cursor, gradients)

    def unload(self, k: int) -> Norms | None:
        """Refer to shard k's memory no more; what the run has changed is in it.

        Returns:
            The norms of the shard's gradients if they are clipped by their norm and it has not been
            updated with them; those after its last backward of a window count.

        Raises:
            ConfigurationError: the forward keeps a view of a parameter, or wrote to a tensor to
                which it did not write in the trial's first steps.
        """
        if self._resident:
            return None  # it is not touched any more, and let go of when the run is closed
        needed = self._will_return_to(k)
        if needed and not self._recompute:
            raise ValueError(f"shard {k} is unloaded before its backward, without recomputation")
        return self._sub_epoch.release(k, needed=needed, last=k in self._updated_last)

    def cursor(self, k: int) -> Cursor:
        """Return the cursor of a shard that was loaded, with its last update."""
        return self._sub_epoch.cursor(k)

    def _will_return_to(self, k: int) -> bool:
        if self._next is None:
            return False
        kind, shard = self._next
        return shard > k if kind == "F" else shard >= k

    # ------------------------------------------------------------------ tasks

    def perform(
        self, task: Action, norms: Mapping[int, Norms] | None = None, then: Then | None = None
    ) -> Action:
        """Do F, B or U of a shard that is loaded; return the task that was done last.

        Args:
            norms: for U where gradients are clipped by their norm, what `unload` has returned for
                shards whose last backward was done in the process of another device.
            then: gives a resident run the tasks that follow in a microbatch.

        Raises:
            ValueError: the task can't come now, or its shard is not loaded.
            NonFiniteLoss: the loss is NaN or infinite.
            UnfitShape: the batch has a shape that the cut model can't take.
        """
        number = self._check(task)
        if task.kind is ActionKind.U:
            self._sub_epoch.add_norms(norms or {})
            self._paused.call(partial(self._update, task, number))
        elif self._resident:
            assert then is not None, "a resident run needs to know where its tasks come from"
            return self._in_one_call(task, number, then)
        else:
            self._pass_through(task, number)
        return task

    def _check(self, task: Action) -> int:
        """Return the microbatch of a task that can come now as far as its shard is concerned."""
        if task.microbatch is None or task.shard not in self._sub_epoch:
            raise ValueError(f"{task} can't be done; load its shard before")
        self._go_to_step(self._start_step + task.microbatch // self._accumulate)
        self._sub_epoch.check_step(task.shard)
        return task.microbatch

    def _update(self, task: Action, number: int) -> None:
        self._sub_epoch.update(task.shard)
        if self._at is not None and self._at[0] == number // self._accumulate and self._at[1][1]:
            self._updated_last.add(task.shard)

    def _in_one_call(self, task: Action, number: int, then: Then) -> Action:
        """Do all tasks of a microbatch, from its first one on, and the updates between them."""
        batch, rows = self._made(number)
        begun = False

        def reach(kind: Literal["F", "B"], k: int) -> None:
            nonlocal task, begun
            if begun:
                task = then(task)
                while task.kind is ActionKind.U:
                    self._update(task, self._check(task))
                    task = then(task)
            begun = True
            if (task.kind, task.shard, self._check(task)) != (kind, k, number):
                raise ValueError(f"{task} can't come before {kind} of shard {k}")

        self._run(batch, number, rows, reach)
        return task

    def _pass_through(self, task: Action, number: int) -> None:
        """Do F or B of a microbatch."""
        k = task.shard
        if task.kind is ActionKind.F and k == 0:
            batch, rows = self._made(number)
            self._sub_epoch.begin_microbatch()
            self._number = number
            self._next = self._paused.begin(partial(self._run, batch, number, rows))
        if self._next != (task.kind, k) or number != self._number:
            raise ValueError(f"{task} can't come now; the microbatch is before {self._next}")
        self._next = self._paused.advance()
        if task.kind is ActionKind.B and self._next is None:
            self._sub_epoch.end_microbatch()

    def _go_to_step(self, step: int) -> None:
        if step != self._step:
            self._step = step
            self._sub_epoch.end_window()
            self._sub_epoch.begin_window(step)

    def _made(self, number: int) -> tuple[Microbatch, int]:
        """Return a microbatch, and its rows."""
        window, place = divmod(number, self._accumulate)
        while self._at is None or self._at[0] < window:
            self._at = next(self._windows, None)
            if self._at is None:
                raise ValueError(f"the sub-epoch has no microbatch {number}")
        batches, _ = self._at[1]
        return self._maker.make(batches, place, self._sub_epoch.step), batches[place].rows

    def _run(self, batch: Microbatch, number: int, rows: int, reach: Reach) -> None:
        if self._limit is None:
            self._tasks.run(batch, reach)
        else:
            with self._limit.kept(batch.inputs, self._copies.values(), reach) as watched:
                self._tasks.run(batch, watched)
        self.losses[number] = batch.loss, rows

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """End the run after its last task.

        Raises:
            StepDiffers: a parameter got a gradient after its update.
            ConfigurationError: training wrote to what does not hop.
        """
        try:
            self._sub_epoch.end_window()
            self._sub_epoch.check_unwritten()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the run where it stands; what is loaded may be torn."""
        self._paused.close()
        self._stack.close()


class MovingRun(ShardRun):
    """Trains like a `ShardRun` that recomputes, and has a microbatch for one unit at a time.

    A unit is what comes between `take_up` and `put_down`; its shard is loaded and unloaded in
    between. What the unit needs of its microbatch is read from memory that all devices of the
    worker share, and what is new is written there.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self._recompute, "autograd's graphs stay on their device"
        assert isinstance(self._tasks, GraphTasks) and self._cut_model.graphs is not None
        self._passes, self._graphs = self._tasks, self._cut_model.graphs
        self._tied = self._cut_model.tied
        self._shared = self._cut_model.read_elsewhere
        self._memory: Memory
        self._record = PassRecord()
        self._log = TensorLog({}, 0)
        self._going: GraphPass | None = None
        self._rows = 0
        self._norms: dict[int, Norms] = {}
        self._last = ActionKind.U  # the kind of the last task

    def take_up(self, task: Action, memory: Memory, record: PassRecord) -> None:
        """Begin a unit.

        Args:
            task: its first one.
            memory: has what the record describes, and room for more.
            record: of the unit before; an empty one before F of shard 0.
        """
        torch.set_num_threads(torch.get_num_threads())  # OpenMP keeps their number per thread
        self._memory, self._record = memory, record
        self._log = TensorLog(record.tensors, record.nbytes)
        self._rows, self._norms = record.rows, dict(record.norms)
        if task.kind is not ActionKind.U and record.tensors:
            self._going = self._read(task)
        self._sub_epoch.begin_microbatch()

    def put_down(self) -> PassRecord:
        """End a unit, and return what describes the microbatch after it.

        Raises:
            MemoryError: the memory has no room for what the microbatch leaves there.
        """
        going, record = self._going, self._record
        if going is not None:
            record = self._write(going)
        self._going = None
        del self._memory
        self._sub_epoch.end_microbatch()
        return replace(record, norms=self._norms)

    def unload(self, k: int) -> Norms | None:
        """Refer to shard k's memory no more; see `ShardRun`."""
        norms = super().unload(k)
        if norms is not None and self._last is ActionKind.B:
            self._norms[k] = norms
        return norms

    def perform(
        self, task: Action, norms: Mapping[int, Norms] | None = None, then: Then | None = None
    ) -> Action:
        """Do a task of the unit; see `ShardRun`."""
        k, clips = task.shard, self._recipe.clip_grad_norm is not None
        if clips and task.kind is ActionKind.U and k not in self._norms:
            self._norms[k] = self._sub_epoch.norms_of(k)  # the unit has its last backward
        self._last = task.kind
        return super().perform(task, self._norms)

    def cancel(self) -> None:
        """End the run where it stands; what is loaded may be torn."""
        self._going = None
        super().cancel()

    # ------------------------------------------------------------------ one task

    def _pass_through(self, task: Action, number: int) -> None:
        k, kind = task.shard, task.kind
        if kind is ActionKind.F and k == 0:
            batch, self._rows = self._made(number)
            self._going = GraphPass(batch)
        going = self._going
        if going is None:
            raise ValueError(f"{task} can't come now; take its microbatch up before")
        run = self._passes.forward if kind is ActionKind.F else self._passes.backward
        with torch.autograd.set_multithreading_enabled(False), self._within_limit(k, going):
            run(k, going)
        if kind is ActionKind.B and k == 0:
            self.losses[number] = going.batch.loss, self._rows

    @contextmanager
    def _within_limit(self, k: int, going: GraphPass) -> Iterator[None]:
        if self._limit is None:
            yield
            return
        batch = ("feature", "target")
        here = tensors_of(going, self._copies).items()
        held = [tensor for (kind, _), tensor in here if kind not in batch]
        with self._limit.kept(going.batch.inputs, held, lambda kind, shard: None) as reach:
            reach("F", k)
            yield

    # ------------------------------------------------------------------ records

    def _read(self, task: Action) -> GraphPass:
        """Return the microbatch with what tasks of one shard need of it."""
        k, record, recipe = task.shard, self._record, self._recipe
        window, place = divmod(task.microbatch or 0, self._accumulate)
        key = RandomKey(self._trial_seed, self._start_step + window, place, recipe.device)
        features, targets = (
            tuple(self._stored(each) for each in record.tensors if each[0] == kind)
            for kind in ("feature", "target")
        )
        batch = Microbatch(recipe, features, targets, record.weight, key, record.loss)
        graph = self._graphs.of(batch.inputs).train[k]
        before = self._named("before", graph.mutates)
        redone = task.kind is ActionKind.F or before.keys() == graph.mutates
        assert redone, "an F that wrote to buffers comes again with its B"
        self._copies |= self._named("held", (*graph.params, *graph.buffers))
        return GraphPass(
            batch,
            values={**record.others, **self._named("value", graph.live_in)},
            needs_grad=set(record.needs_grad),
            buffers_before={k: {name: buffer.clone() for name, buffer in before.items()}},
            grads=self._named("gradient", graph.live_out),
            tied_grads=self._named("tied", [n for n, users in self._tied.items() if k in users]),
        )

    def _named(self, kind: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return those of the tensors of a kind that are stored."""
        keys = {name: (kind, name) for name in names}
        return {n: self._stored(key) for n, key in keys.items() if key in self._record.tensors}

    def _stored(self, key: Key) -> Tensor:
        return self._log.read(key, self._memory, self._recipe.device)

    def _write(self, going: GraphPass) -> PassRecord:
        log, batch = self._log, going.batch
        held = {name: self._copies[name] for name in self._shared & self._copies.keys()}
        new = log.lay_out(tensors_of(going, held))
        check_room(log.nbytes, self._memory.nbytes)
        for tensor, place in new:
            place.write(tensor, self._memory)
        values = {n: v for n, v in going.values.items() if not isinstance(v, Tensor)}
        return PassRecord(
            log.nbytes, log.stored, values, frozenset(going.needs_grad), self._rows, batch.weight,
            batch.loss,
        )  # fmt: skip
