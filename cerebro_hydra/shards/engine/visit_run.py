"""A sub-epoch of one trial whose tasks are taken one by one, from outside."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.recipe import Window
from cerebro_hydra.recipe.shared_settings import shared_settings_kept
from cerebro_hydra.shards.engine.barrier import GradientFacts
from cerebro_hydra.shards.engine.bound_model import HeldTensors
from cerebro_hydra.shards.engine.graph_passes import GraphPasses, PassRecord
from cerebro_hydra.shards.engine.graph_tasks import GraphTasks
from cerebro_hydra.shards.engine.layout import ALIGNMENT, Memory, Segments, TrialRuntime
from cerebro_hydra.shards.engine.microbatch import (
    Execution,
    Microbatch,
    MicrobatchMaker,
    OtherBatch,
    Reach,
    SubEpochInput,
    Then,
)
from cerebro_hydra.shards.engine.module_tasks import ModuleTasks, PausedPass
from cerebro_hydra.shards.engine.sub_epoch import Cursor, SubEpoch


@dataclass(frozen=True)
class TrainTotals:
    """Holds a sub-epoch's totals: its loss summed over rows, its rows, and its optimizer steps."""

    loss_sum: float
    rows: int
    steps: int


def _check_aligned(k: int, segments: Segments) -> None:
    if any(memory.data_ptr() % ALIGNMENT for memory in segments.values()):
        raise ValueError(f"the memory of shard {k} is not aligned to {ALIGNMENT} bytes; align it")


def with_last(windows: Iterable[Window]) -> Iterator[tuple[Window, bool]]:
    """Yield each window and whether it is the last, looking ahead by one."""
    end = object()
    for window, following in itertools.pairwise(itertools.chain(windows, [end])):
        yield window, following is end  # type: ignore[misc]


class Chain(Protocol):
    """Sums gradients over replicas; see `shards/replicas/gradient_chain.py`."""

    def begin(self, number: int, here: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Wait for the buffers with which a forward begins, and let the shards here have them."""

    def enter(
        self,
        number: int,
        k: int,
        params: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
    ) -> None:
        """Watch a shard's gradients; if it has just come, let it have the buffers, too."""

    def end_forward(self, number: int, buffers: Sequence[Mapping[str, Tensor]]) -> None:
        """Send on what a forward has left in buffers."""

    def end_backward(self, number: int, buffers: Sequence[Mapping[str, Tensor]]) -> None:
        """Wait for the sum, and let parameters have all of it after the last round."""

    def close(self) -> None:
        """End the sub-epoch, after its last round or where it stands."""


class VisitRun:
    """Trains one trial over a sub-epoch in the process of a device, one shard task at a time.

    A shard's state is in the device's memory from `load` to `unload`. Tasks come in an order that
    `plan/schedules/graph.py` allows. Visits of other trials may take tasks in between. Until it is
    closed the visit has the recipe's model to itself.

    A microbatch is here from its first task to its last, and F and B of the last shard have no
    `unload` between them. Where the model is cut as a graph, microbatches may move instead: each is
    here for one unit at a time, between `take_up` and `put_down`. What the unit needs of it is read
    from memory that all devices of the worker share, and what is new is written there. So several
    may be under way at once, and devices do their tasks in turn.

    A resident visit has every shard from its first task to the end, and the device to itself during
    a microbatch: one call makes all of its tasks on the thread that asks for the first of them.

    Attributes:
        losses: the mean loss and the rows of each microbatch that was run here, by its number.

    Args:
        trial: who trains.
        given: what it trains on.
        execution: how its tasks are done.
        chain: sums the gradients of a resident visit with those of its replicas. Microbatches count
            the rounds of a window then; one of which the window has no batch for this rank is
            another replica's alone.
    """

    def __init__(
        self,
        trial: TrialRuntime,
        given: SubEpochInput,
        execution: Execution,
        chain: Chain | None = None,
    ) -> None:
        self._execution, self._chain = execution, chain
        self.losses: dict[int, tuple[float, int]] = {}
        recipe, cut_model = trial.recipe, trial.cut_model
        self._barrier = recipe.barrier
        self._accumulate = recipe.accumulate
        self._start_step = given.start_step
        self._windows = enumerate(with_last(given.windows))
        self._at: tuple[int, tuple[Window, bool]] | None = None
        self._maker = MicrobatchMaker(cut_model, recipe, trial.seed)
        resident, shared = execution.resident, cut_model.shared.union(execution.shared)
        held = None if resident else HeldTensors(shared)
        self._sub_epoch = SubEpoch(trial, given, held)
        self._copies = {} if held is None else held.copies
        self._paused = PausedPass(recipe.device)
        self._stack = ExitStack()
        self._tasks = self._stack.enter_context(self._sub_epoch.tasks(keep=not execution.recompute))
        self._graph: GraphPasses | None = None  # does F and B, unless the paused pass does
        if isinstance(self._tasks, GraphTasks) and not resident:
            self._graph = GraphPasses(
                self._tasks, trial, given.start_step, self._copies, execution.limit,
                execution.crossings,
            )  # fmt: skip
        assert self._graph or not execution.moves, "only microbatches of a graph cut move"
        self._last = trial.num_shards - 1
        self._step = -1  # whose window was begun
        self._number = -1  # of the microbatch under way that does not move
        self._next: tuple[str, int] | None = None  # its next task
        self._facts: dict[int, GradientFacts] = {}  # by shard, in the window of the unit
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
            segments: they begin at multiples of `ALIGNMENT`. F and B need no "optimizer" memory.
            cursor: the one with the shard's last update, None for state 0.
            gradients: memory laid out by `GradientLayout`, as `unload` left it, or zeroed. It is
                needed where gradients outlive a task: with accumulation or a barrier.
        """
        if k in self._sub_epoch:
            raise ValueError(f"shard {k} is loaded already; unload it before")
        _check_aligned(k, segments)
        self._sub_epoch.receive(k, segments, cursor, gradients)

    def complete(self, k: int, segments: Segments, gradients: Memory | None = None) -> None:
        """Let a loaded shard have the memory, too, that `load` was not given of it."""
        _check_aligned(k, segments)
        self._sub_epoch.complete(k, segments, gradients)

    def unload(self, k: int) -> None:
        """Refer to shard k's memory no more; what the visit has changed is in it.

        Raises:
            ConfigurationError: the forward keeps a view of a parameter, or wrote to a tensor to
                which it did not write in the trial's first steps.
        """
        if self._execution.resident:
            return  # it is not touched any more, and let go of when the visit is closed
        needed = self._will_return_to(k)
        if needed and not self._execution.recompute:
            raise ValueError(f"shard {k} is unloaded before its backward, without recomputation")
        self._sub_epoch.release(k, needed=needed, last=k in self._updated_last)

    def cursor(self, k: int) -> Cursor:
        """Return the cursor of a shard that was loaded, with its last update."""
        return self._sub_epoch.cursor(k)

    @property
    def optimizers(self) -> Sequence[tuple[torch.optim.Optimizer, Any]]:
        """Return the optimizers of all shards that were here, each with its LR scheduler."""
        return self._sub_epoch.optimizers

    def _will_return_to(self, k: int) -> bool:
        if self._next is None:
            return False
        kind, shard = self._next
        return shard > k if kind == "F" else shard >= k

    # ------------------------------------------------------------------ tasks

    def take_up(self, tasks: Sequence[Action], memory: Memory, record: PassRecord) -> None:
        """Begin a unit of a microbatch that moves.

        Args:
            tasks: of one shard, and one microbatch.
            memory: has what the record describes, and room for more.
            record: see `GraphPasses.take_up`. Its facts are those that were told by then; those
                of a shard whose last backward was here are kept here.
        """
        assert self._graph is not None
        torch.set_num_threads(torch.get_num_threads())  # OpenMP keeps their number per thread
        self._facts = dict(record.facts)
        self._graph.take_up(tasks, memory, record)
        self._sub_epoch.begin_microbatch(self._step_of(tasks[0].microbatch or 0), tasks[0].shard)

    def put_down(self) -> PassRecord:
        """End the unit, and return what describes its microbatch now.

        Raises:
            MemoryError: the memory has no room for what the microbatch leaves there.
        """
        assert self._graph is not None
        record = self._graph.put_down(self._facts)
        self._sub_epoch.end_microbatch()
        return record

    def perform(self, task: Action, then: Then | None = None) -> Action:
        """Do F, B or U of a shard that is loaded; return the task that was done last.

        Args:
            then: gives a resident visit the tasks that follow in a microbatch.

        Raises:
            ValueError: the task can't come now, or its shard is not loaded.
            NonFiniteLoss: the loss is NaN or infinite.
            UnfitShape: the batch has a shape that the cut model can't take.
        """
        number = self._check(task)
        if task.kind is ActionKind.U:
            self._sub_epoch.add_facts(self._facts)
            self._paused.call(partial(self._update, task, number))
        elif self._execution.resident:
            assert then is not None, "a resident visit needs to know where its tasks come from"
            return self._in_one_call(task, number, then)
        elif self._graph is None:
            self._pass_modules(task, number)
        else:
            self._pass_graph(self._graph, task, number)
        return task

    def _check(self, task: Action) -> int:
        """Return the microbatch of a task that can come now as far as its shard is concerned."""
        if task.microbatch is None or task.shard not in self._sub_epoch:
            raise ValueError(f"{task} can't be done; load its shard before")
        self._go_to_step(self._step_of(task.microbatch))
        self._sub_epoch.check_step(task.shard, updates=task.kind is ActionKind.U)
        return task.microbatch

    def _update(self, task: Action, number: int) -> None:
        at = self._at
        last = at is not None and at[0] == number // self._accumulate and at[1][1]
        if last:
            self._updated_last.add(task.shard)
            self._sub_epoch.check_separable(task.shard)
        self._sub_epoch.update(task.shard)

    def _in_one_call(self, task: Action, number: int, then: Then) -> Action:
        """Do all tasks of a microbatch, from its first one on, and the updates between them."""
        batch, rows = self._made(number) if self._chain is None else self._own(number)
        begun, later = False, []
        # Nobody waits for shards before the last window, so that hooks may read them until then.
        waits = isinstance(self._tasks, ModuleTasks) and not self._sub_epoch.at_once

        def reach(kind: Literal["F", "B"], k: int) -> None:
            nonlocal task, begun
            if begun:
                task = then(task)
                while task.kind is ActionKind.U:
                    update = partial(self._update, task, self._check(task))
                    later.append(update) if waits else update()
                    task = then(task)
            begun = True
            if (task.kind, task.shard, self._check(task)) != (kind, k, number):
                raise ValueError(f"{task} can't come before {kind} of shard {k}")

        if self._chain is None:
            assert batch is not None
            self._run(batch, number, rows, reach)
        else:
            self._run_in_chain(self._chain, batch, number, rows, reach)
        self._sub_epoch.after_backward = waits
        for update in later:
            update()
        self._sub_epoch.after_backward = False
        return task

    def _own(self, number: int) -> tuple[Microbatch | None, int]:
        """Return this rank's microbatch of a round and its rows, or None if it has none left."""
        window, place = divmod(number, self._accumulate)
        batches = self._window(window)[0]
        own = [n for n, each in enumerate(batches) if not isinstance(each, OtherBatch)]
        if place >= len(own):
            return None, 0
        return self._made_at(window, own[place])

    def _run_in_chain(
        self, chain: Chain, batch: Microbatch | None, number: int, rows: int, reach: Reach
    ) -> None:
        """Run a microbatch, or none, and sum its gradients with those of the other ranks."""
        last = self._last

        def reach_in_chain(kind: Literal["F", "B"], k: int) -> None:
            if (kind, k) == ("B", last):
                left = [self._sub_epoch.forward_buffers(n) for n in range(last + 1)]
                chain.end_forward(number, left)
            reach(kind, k)
            if kind == "F":
                chain.enter(number, k, self._sub_epoch.params(k), self._sub_epoch.buffers(k))

        here = filter(self._sub_epoch.__contains__, range(last + 1))
        chain.begin(number, {k: self._sub_epoch.buffers(k) for k in here})
        if batch is None:
            for k in range(last + 1):
                reach_in_chain("F", k)
            for k in reversed(range(last + 1)):
                reach_in_chain("B", k)
        else:
            self._run(batch, number, rows, reach_in_chain)
        chain.end_backward(number, [self._sub_epoch.buffers(k) for k in range(last + 1)])

    def _pass_modules(self, task: Action, number: int) -> None:
        """Do F or B of a microbatch, which the model's own forward and backward make."""
        if task.kind is ActionKind.F and task.shard == 0:
            batch, rows = self._made(number)
            self._begin_microbatch(number, follows=number % self._accumulate > 0)
            run = shared_settings_kept()(self._run)  # some are a thread's own
            self._next = self._paused.begin(partial(run, batch, number, rows))
        self._check_next(task, number)
        if task.kind is ActionKind.B and task.shard == self._last:
            self._sub_epoch.end_forward()
        self._next = self._paused.advance()
        if task.kind is ActionKind.B:
            self._sub_epoch.end_backward(task.shard)
        self._end_microbatch()

    def _pass_graph(self, passes: GraphPasses, task: Action, number: int) -> None:
        """Do F or B of a microbatch by the graph of its shard."""
        k, kind = task.shard, task.kind
        if kind is ActionKind.F and k == 0:
            passes.begin(number, *self._made(number))
            if not self._execution.moves:
                torch.set_num_threads(torch.get_num_threads())  # OpenMP keeps it per thread
                self._begin_microbatch(number)
                self._next = "F", 0
        if not self._execution.moves:
            self._check_next(task, number)
        passes.perform(task)
        if kind is ActionKind.B and k == 0:
            batch, rows = passes.batch
            self.losses[number] = batch.loss, rows
        if self._execution.moves:
            if kind is ActionKind.B and self._barrier:
                self._facts[k] = self._sub_epoch.facts_of(k)
            return
        self._next = self._following(kind, k)
        if self._next is None:
            passes.end()
        self._end_microbatch()

    def _following(self, kind: ActionKind, k: int) -> tuple[str, int] | None:
        if kind is ActionKind.F:
            return ("F", k + 1) if k < self._last else ("B", k)
        return ("B", k - 1) if k > 0 else None

    def _begin_microbatch(self, number: int, follows: bool | None = None) -> None:
        self._sub_epoch.begin_microbatch(self._step_of(number), follows=follows)
        self._number = number

    def _check_next(self, task: Action, number: int) -> None:
        if self._next != (task.kind, task.shard) or number != self._number:
            raise ValueError(f"{task} can't come now; the microbatch is before {self._next}")

    def _end_microbatch(self) -> None:
        if self._next is None:
            self._sub_epoch.end_microbatch()

    def _step_of(self, number: int) -> int:
        """Return the optimizer step that a microbatch is of."""
        return self._start_step + number // self._accumulate

    def _go_to_step(self, step: int) -> None:
        if step != self._step:
            self._step = step
            self._sub_epoch.end_window()
            self._sub_epoch.begin_window(step)

    def _made(self, number: int) -> tuple[Microbatch, int]:
        """Return a microbatch, and its rows."""
        return self._made_at(*divmod(number, self._accumulate))

    def _window(self, number: int) -> tuple[Window, bool]:
        """Return the batches of a window, and whether it is the last one."""
        while self._at is None or self._at[0] < number:
            self._at = next(self._windows, None)
            if self._at is None:
                raise ValueError(f"the sub-epoch has no window {number}")
            self._sub_epoch.in_last_window = last = self._at[1][1]
            watched = () if self._execution.watched is None else (0, self._execution.watched)
            self._sub_epoch.at_once = self._execution.resident and (last or self._at[0] in watched)
        return self._at[1]

    def _made_at(self, window: int, place: int) -> tuple[Microbatch, int]:
        """Return the microbatch at a place in a window, and its rows."""
        batches, in_last_step = self._window(window)
        batch = self._maker.make(batches, place, self._sub_epoch.step)
        batch.in_last_step = in_last_step
        batch.looks = in_last_step or window == 0 or self._sub_epoch.at_once
        batch.idle = self._sub_epoch.idle
        return batch, batches[place].rows

    def _run(self, batch: Microbatch, number: int, rows: int, reach: Reach) -> None:
        if self._execution.limit is None:
            self._tasks.run(batch, reach)
        else:
            with self._execution.limit.kept(batch.inputs, self._copies.values(), reach) as watched:
                self._tasks.run(batch, watched)
        self.losses[number] = batch.loss, rows

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """End the visit after its last task.

        Raises:
            StepDiffers: a parameter got a gradient after its update.
            ConfigurationError: training wrote to what does not hop.
        """
        try:
            self._sub_epoch.end_window()
            self._sub_epoch.check_cursors()
            self._sub_epoch.check_unwritten()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the visit where it stands; what is loaded may be torn."""
        if self._chain is not None:
            self._chain.close()
        self._paused.close()
        if self._graph is not None:
            self._graph.cancel()
        self._stack.close()
