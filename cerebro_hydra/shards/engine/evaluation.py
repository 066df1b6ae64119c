"""An evaluation of one trial: binds its shards to memory, measures batches, and lets shards go.

Its tasks are taken one after another here, or one by one from outside.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from cerebro_hydra.errors import StepDiffers
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.recipe import BatchTensors, Evaluation, RandomKey, RunningEvaluation
from cerebro_hydra.recipe.randomness import generator_states
from cerebro_hydra.recipe.shared_settings import shared_settings_kept
from cerebro_hydra.shards.cut.values import TensorKey
from cerebro_hydra.shards.engine.bound_model import (
    BoundModel,
    HeldTensors,
    bound_model,
    check_released,
    storages,
)
from cerebro_hydra.shards.engine.differences import (
    checksums,
    same_bits,
    tensor_used_elsewhere,
    used_elsewhere,
)
from cerebro_hydra.shards.engine.graph_passes import GraphPasses, PassRecord
from cerebro_hydra.shards.engine.graph_tasks import GraphPredictor
from cerebro_hydra.shards.engine.layout import Memory, Segments, TrialRuntime
from cerebro_hydra.shards.engine.microbatch import (
    Execution,
    MemoryLimit,
    Microbatch,
    MicrobatchMaker,
    Reach,
    Then,
    UsesElsewhere,
    memory_reads_seen,
)
from cerebro_hydra.shards.engine.module_tasks import ModulePredictor, PausedPass
from cerebro_hydra.shards.engine.state import ShardState
from cerebro_hydra.shards.places import Places


class ShardEvaluation:
    """Evaluates one trial in the process of a device, one F of a shard at a time.

    It is driven as a `VisitRun` is, and only reads the shards' memory.

    Args:
        trial: who is evaluated.
        batches: the validation rows of a partition.
        execution: how its tasks are done.
        looks, waits: see `EvaluatedShards`.
    """

    def __init__(
        self,
        trial: TrialRuntime,
        batches: Iterable[BatchTensors],
        execution: Execution,
        looks: bool = False,
        waits: bool = False,
    ) -> None:
        self._resident, self._moves = execution.resident, execution.moves
        shared = () if self._resident else trial.cut_model.shared.union(execution.shared)
        self._shards = EvaluatedShards(trial, shared, execution.limit, looks=looks, waits=waits)
        self._batches = enumerate(batches)
        self._paused = PausedPass(trial.recipe.device)
        self._stack = ExitStack()
        self._stack.enter_context(self._shards.evaluating())
        self._number = -1  # of the batch under way
        self._next: tuple[str, int] | None = None  # its next task

    def load(self, k: int, segments: Segments) -> None:
        """Let shard k be in this memory until it is unloaded."""
        if k in self._shards:
            raise ValueError(f"shard {k} is loaded already; unload it before")
        self._shards.receive(k, segments)

    def unload(self, k: int) -> None:
        """Refer to shard k's memory no more.

        Raises:
            StepDiffers: the forward keeps a view of a parameter.
        """
        if not self._resident:
            self._shards.release(k, needed=self._next is not None and self._next[1] > k)

    def take_up(self, tasks: Sequence[Action], memory: Memory, record: PassRecord) -> None:
        """Begin a unit of a microbatch that moves; see `VisitRun.take_up`."""
        torch.set_num_threads(torch.get_num_threads())  # OpenMP keeps their number per thread
        self._shards.begin_batch()
        self._shards.passes.take_up(tasks, memory, record)

    def put_down(self) -> PassRecord:
        """End the unit, and return what describes its microbatch now.

        Raises:
            MemoryError: the memory has no room for what the microbatch leaves there.
        """
        record = self._shards.passes.put_down({})
        self._shards.end_batch()
        return record

    def perform(self, task: Action, then: Then | None = None) -> Action:
        """Do F of a shard that is loaded; see `VisitRun`.

        Raises:
            ValueError: the task can't come now, or its shard is not loaded.
            NonFiniteLoss: the loss is NaN or infinite.
            StepDiffers: it is because a parameter was read while its shard was away.
        """
        k, number = task.shard, self._check(task)
        if k == 0:
            while self._number < number:
                self._number, batch = next(self._batches)
        if self._moves:
            if k == 0:
                self._shards.begin_pass(number, batch)
            self._shards.forward(task)
            return task
        if k == 0:
            if self._resident:
                assert then is not None, "a resident visit needs to know where its tasks come from"
                return self._in_one_call(batch, task, then)
            self._shards.begin_batch()
            self._next = self._paused.begin(
                partial(shared_settings_kept()(self._shards.run), batch)
            )
        if self._next != ("F", k) or number != self._number:
            raise ValueError(f"{task} can't come now; the batch is before {self._next}")
        self._next = self._paused.advance()
        if self._next is None:
            self._shards.end_batch()
        return task

    def _check(self, task: Action) -> int:
        if task.kind is not ActionKind.F or task.microbatch is None:
            raise ValueError(f"{task} is no task of an evaluation")
        if task.shard not in self._shards:
            raise ValueError(f"{task} can't be done; load its shard before")
        return task.microbatch

    def _in_one_call(self, batch: BatchTensors, task: Action, then: Then) -> Action:
        """Do F of all shards, from the first one on."""
        begun = False

        def reach(kind: Literal["F", "B"], k: int) -> None:
            nonlocal task, begun
            task, begun = then(task) if begun else task, True
            if (task.shard, self._check(task)) != (k, self._number):
                raise ValueError(f"{task} can't come before {kind} of shard {k}")

        self._shards.run(batch, reach)
        return task

    @property
    def result(self) -> Evaluation | None:
        """Return what the batches have given; None if another device has the last shard of them."""
        return None if self._moves and not self._shards.measured else self._shards.result()

    @property
    def draws(self) -> bool:
        """Return whether the trial's code has drawn random numbers of torch."""
        return self._shards.draws

    @property
    def looked_seconds(self) -> float:
        """Return how long it took to look at contents."""
        return self._shards.looked_seconds

    def written(self) -> set[TensorKey]:
        """Return which tensors of the model the trial's code has written to, before `close`."""
        return self._shards.written()

    def close(self) -> None:
        """End the evaluation, wherever it stands."""
        self._paused.close()
        self._stack.close()


class EvaluatedShards:
    """Holds the shards of a trial that is evaluated, each from `receive` to `release`.

    The forward writes to copies of the buffers, which stay to the end.

    Args:
        trial: who is evaluated.
        shared: the parameters that a batch may read while their shard is away.
        limit: bounds what forwards hold of the device beside their shards; None does not.
        on_outputs: is called with the model's outputs for each batch.
        looks: whether the contents of parameters and buffers are compared, too, as each shard comes
            and leaves for the first time. What is written by `.data` or NumPy counts no version.
        waits: whether forwards of modules begin when all shards are there.

    Attributes:
        looked_seconds: how long it took to compare contents.
        draws: whether the trial's code has drawn random numbers of torch.
    """

    def __init__(
        self,
        trial: TrialRuntime,
        shared: Collection[str] = (),
        limit: MemoryLimit | None = None,
        on_outputs: Callable[[Any], object] | None = None,
        looks: bool = False,
        waits: bool = False,
    ) -> None:
        recipe, cut_model = trial.recipe, trial.cut_model
        self._trial = trial
        self._cut_model, self._layout, self._recipe = cut_model, trial.layout, recipe
        self._maker = MicrobatchMaker(cut_model, recipe, trial.seed)
        self._limit = limit
        self._on_outputs = on_outputs
        self._held = HeldTensors(shared)
        self._states: dict[int, ShardState] = {}
        self._bound: BoundModel | None = None
        self._predictor: GraphPredictor | ModulePredictor
        self._evaluation = RunningEvaluation(recipe)
        self._looks, self._waits = looks, waits
        self._elsewhere = Places()
        self._versions: dict[int, dict[str, int]] = {}  # of the parameters of each shard
        self._contents: dict[int, list[int] | None] = {}  # checksums of theirs until it leaves
        self._written: set[TensorKey] = set()
        self.looked_seconds = 0.0
        self.draws = False

    @property
    def measured(self) -> bool:
        """Return whether any batch has been measured here."""
        return bool(self._evaluation.batches)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let batches be measured for a while."""
        try:
            if self._cut_model.graphs is not None:
                self._predictor = GraphPredictor(self._cut_model, self._states, self._held)
                self.passes = GraphPasses(
                    self._predictor, self._trial, 0, self._held.copies, self._limit
                )
                yield
                return
            (model := self._recipe.model).eval()
            with memory_reads_seen(), bound_model(model) as self._bound:
                if len(self._layout.shards) > 1:
                    self._elsewhere = self._bound.places_of(self._layout.shards)
                self._predictor = ModulePredictor(
                    self._cut_model, self._recipe, self._bound, self._waits
                )
                with self._predictor.attached():
                    yield
        finally:
            self._states.clear()
            self._held.copies.clear()

    def __contains__(self, k: int) -> bool:
        """Return whether a shard is here."""
        return k in self._states

    def receive(self, k: int, segments: Segments) -> None:
        """Bind a shard to memory, which is read until the shard is released."""
        state = ShardState(self._layout.shards[k], segments)
        state.values |= state.ema
        self._states[k] = state
        if self._bound is not None:
            for name in state.values:
                self._elsewhere.discard(self._bound.current(("parameter", name)))
            self._bound.bind_values(state)
            current = {name: self._bound.current(("parameter", name)) for name in state.values}
            self._versions[k] = {name: each._version for name, each in current.items()}
        if self._looks and k not in self._contents:
            self._contents[k] = self._checksums(state)
        self._hold(state)

    def _hold(self, state: ShardState) -> None:
        copies = self._held.hold(state)
        if self._bound is not None:
            self._bound.use_copies(copies)

    def release(self, k: int, needed: bool) -> None:
        """Refer to a shard's memory no more.

        Args:
            needed: whether the batch under way has been through the shard.

        Raises:
            StepDiffers: the forward keeps a view of a parameter.
        """
        self._find_written(k)
        state = self._states.pop(k)
        if self._bound is not None:
            self._bound.unbind(state, self._held.copies)
            for name in state.values.keys() - self._held.copies:
                told, value = f"parameter {name!r}", self._bound.current(("parameter", name))
                self._elsewhere.add(told, value)
        memory = storages(state)
        del state
        if needed:
            check_released(memory)

    def written(self) -> set[TensorKey]:
        """Return which tensors were written to, though their shard is here or was released."""
        for k in self._states:
            self._find_written(k)
        return self._written

    def _find_written(self, k: int) -> None:
        """Look at what is here of a shard; a buffer is written to if its content is another one."""
        state, bound = self._states[k], self._bound
        before = self._contents.get(k)
        for name, version in self._versions.get(k, {}).items():
            assert bound is not None
            if bound.current(("parameter", name))._version != version:
                self._written.add(("parameter", name))
        if before is not None:
            pairs = zip(state.values, before, self._checksums(state), strict=True)
            self._written |= {("parameter", name) for name, then, now in pairs if then != now}
        for name, buffer in state.buffers.items():
            copy = self._held.copies[name]
            current = copy if bound is None else bound.current(("buffer", name))
            touched = current is not copy or current._version or before is not None
            if touched and not same_bits(current, buffer):
                self._written.add(("buffer", name))
        self._contents[k] = None  # as it comes again, contents are compared no more

    def _checksums(self, state: ShardState) -> list[int]:
        begun = time.perf_counter()
        found = checksums(state.values.values())
        self.looked_seconds += time.perf_counter() - begun
        return found

    def begin_batch(self) -> None:
        """Hold copies, from now on, of what is read while its shard is away."""
        for state in self._states.values():
            self._hold(state)

    def end_batch(self) -> None:
        """Hold copies of parameters no more."""
        for state in self._states.values():
            names = self._held.drop(state.values)
            if self._bound is not None:
                self._bound.end_copies(names, state)
        names = self._held.drop([p.name for p in self._cut_model.params])
        if self._bound is not None:
            self._bound.end_copies(names)

    def run(self, batch: BatchTensors, reach: Reach) -> None:
        """Measure a batch, after `reach` has allowed F of each shard.

        Raises:
            NonFiniteLoss: its loss is NaN or infinite.
            StepDiffers: it is because a parameter was read while its shard was away.
        """
        recipe = self._recipe
        states = generator_states(recipe.device)
        features, targets = recipe.collated(batch.features, batch.labels, None)
        inputs = recipe.inputs(features, targets)
        self._maker.check_shapes(inputs)
        uses = UsesElsewhere(self._elsewhere, looks=not self._evaluation.batches)
        with torch.no_grad(), recipe.precision():
            with uses if self._elsewhere else nullcontext():
                outputs = self._outputs(inputs, uses.at_rest(reach))
            if self._on_outputs is not None:
                self._on_outputs(outputs)
            with uses if self._elsewhere else nullcontext():
                loss = recipe.compute_loss(outputs, targets).item()
            if uses.found is not None:
                raise StepDiffers(tensor_used_elsewhere(None, uses.found))
            if not math.isfinite(loss) and (name := self._read_elsewhere(inputs, targets)):
                raise StepDiffers(used_elsewhere(None, name))
            self._evaluation.add(loss, outputs, targets, batch.rows)
        self.draws |= generator_states(recipe.device) != states

    def begin_pass(self, number: int, batch: BatchTensors) -> None:
        """Take a batch that moves before its first shard."""
        recipe = self._recipe
        states = generator_states(recipe.device)
        features, targets = recipe.collated(batch.features, batch.labels, None)
        going = Microbatch(recipe, features, targets, None, RandomKey(self._trial.seed, 0, 0))
        self._maker.check_shapes(going.inputs)
        self.passes.begin(number, going, batch.rows)
        self.draws |= generator_states(recipe.device) != states

    @shared_settings_kept()
    def forward(self, task: Action) -> None:
        """Do F of a shard for the batch that is here; after the last shard, it is measured.

        Raises:
            NonFiniteLoss: its loss is NaN or infinite.
        """
        assert isinstance(self._predictor, GraphPredictor), "only batches of a graph cut move"
        recipe = self._recipe
        states = generator_states(recipe.device)
        with torch.no_grad(), recipe.precision():
            self.passes.perform(task)
            if task.shard == self._trial.num_shards - 1:
                batch, rows = self.passes.batch
                outputs = self._predictor.take_outputs()
                loss = recipe.compute_loss(outputs, batch.targets).item()
                self._evaluation.add(loss, outputs, batch.targets, rows)
        self.draws |= generator_states(recipe.device) != states

    def _read_elsewhere(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> str | None:
        """Return a parameter that was read while its shard was not here, if there is one."""
        if self._bound is None or not isinstance(self._predictor, ModulePredictor):
            return None  # a graph reads what it is given
        return self._predictor.read_elsewhere(inputs, targets, self._bound.absent())

    def _outputs(self, inputs: Sequence[Tensor], reach: Reach) -> Any:
        if self._limit is None:
            return self._predictor.run(inputs, reach)
        with self._limit.kept(inputs, self._held.copies.values(), reach) as watched:
            return self._predictor.run(inputs, watched)

    def result(self) -> Evaluation:
        """Return what the batches so far have given."""
        return self._evaluation.result()
