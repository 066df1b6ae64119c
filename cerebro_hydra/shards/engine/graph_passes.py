"""The microbatches of a trial that is cut as a graph, on their way through the shards, by task.

A microbatch is here from its first task to its last, or for one unit at a time. Between two units
it is then in memory that all devices of the worker share, and any of them may do its next unit.

A record says where in this memory its values lie between two units. Whoever does the next unit
reads there what the unit needs, and writes what is new behind it. So the memory has all that a
microbatch left since its begin, and a unit that is done again begins with the record before it, and
writes the same bytes to the same place.

Where activations are kept, a device that goes on with the shard behind has a microbatch itself, and
the memory gets only what goes to another device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cerebro_hydra.plan.human_units import bytes_text
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.recipe import RandomKey
from cerebro_hydra.shards.engine.barrier import GradientFacts
from cerebro_hydra.shards.engine.graph_tasks import (
    AutogradGraph,
    GraphPass,
    GraphPredictor,
    GraphTasks,
)
from cerebro_hydra.shards.engine.layout import ALIGNMENT, Memory, TrialRuntime
from cerebro_hydra.shards.engine.microbatch import (
    BatchTooLarge,
    LiveBytes,
    MemoryLimit,
    Microbatch,
)

Key = tuple[str, int | str]
"""Names a tensor of a pass: its kind, and its name or number."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Says where in memory the elements of a tensor lie, with the strides that it had."""

    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor, at: int) -> StoredTensor:
        """Return what is to be stored there."""
        shape, strides = tuple(tensor.shape), tensor.stride()
        return cls(at, tensor.dtype, shape, strides, tensor.requires_grad)

    @property
    def elements(self) -> int:
        """Return how many there are from the first one to the last one in memory."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)

    @property
    def end(self) -> int:
        """Return where in memory the tensor ends."""
        return self.at + self.elements * self.dtype.itemsize

    def write(self, tensor: Tensor, memory: Memory) -> None:
        """Store a tensor of this form."""
        flat = tensor.detach().as_strided((self.elements,), (1,), tensor.storage_offset())
        self._flat(memory).copy_(flat)

    def read(self, memory: Memory, device: torch.device) -> Tensor:
        """Return the tensor, which is a view of the memory if that is the device's."""
        flat = self._flat(memory).data.to(device)  # autograd tells its writes from those to others
        return flat.as_strided(self.shape, self.strides).requires_grad_(self.requires_grad)

    def _flat(self, memory: Memory) -> Tensor:
        return memory[self.at : self.end].view(self.dtype)


@dataclass(frozen=True, slots=True)
class PassRecord:
    """Describes a microbatch between two units.

    Args:
        nbytes: of memory that has been written since the microbatch began.
        tensors: where each lies.
        others: values that are no tensors, by name.
        needs_grad: the values that get a gradient.
        rows: of the batch.
        weight: of its loss; see `Microbatch`.
        loss: of the batch, once it is known.
        facts: of the gradients of shards, where a backward has been.
    """

    nbytes: int = 0
    tensors: Mapping[Key, StoredTensor] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    needs_grad: frozenset[str] = frozenset()
    rows: int = 0
    weight: float | None = None
    loss: float = float("nan")
    facts: Mapping[int, GradientFacts] = field(default_factory=dict)


class TensorLog:
    """Lays tensors out one behind the other; those that were laid out before stay where they are.

    Args:
        stored: what lies in memory by now.
        nbytes: of memory that was written.
    """

    def __init__(self, stored: Mapping[Key, StoredTensor], nbytes: int) -> None:
        self.stored = dict(stored)
        self.nbytes = nbytes
        self._known: dict[Key, tuple[object, ...]] = {}  # the tensors that were read or laid out

    def read(self, key: Key, memory: Memory, device: torch.device) -> Tensor:
        """Return a tensor that lies in memory."""
        tensor = self.stored[key].read(memory, device)
        self._known[key] = _identity(tensor)
        return tensor

    def has(self, key: Key) -> bool:
        """Return whether a tensor was read or laid out."""
        return key in self._known

    def lay_out(self, tensors: Mapping[Key, Tensor]) -> list[tuple[Tensor, StoredTensor]]:
        """Return which of the tensors are new, and where they are to be stored.

        What was read or laid out and is not among them any more is forgotten.
        """
        for key in self._known.keys() - tensors.keys():
            del self._known[key], self.stored[key]
        return self.add(tensors)

    def leave(self, kind: str) -> None:
        """Note that tensors of a kind are in memory alone from now on, where they stay."""
        for key in [key for key in self._known if key[0] == kind]:
            del self._known[key]

    def add(self, tensors: Mapping[Key, Tensor]) -> list[tuple[Tensor, StoredTensor]]:
        """Return which of the tensors are new, and where they are to be stored."""
        new = []
        for key, tensor in tensors.items():
            identity, known = _identity(tensor), self._known.get(key)
            # What a unit has not read of what is held it can't have changed.
            is_there = key[0] == "held" and known is None and key in self.stored
            if known != identity and not is_there:
                self._known[key] = identity
                place = self.stored[key] = StoredTensor.of(tensor, self.nbytes)
                self.nbytes = place.end + -place.end % ALIGNMENT
                new.append((tensor, place))
        return new


def check_room(inputs: Sequence[Tensor], nbytes: int, memory: int) -> None:
    """Check that what a microbatch leaves between its units fits into the memory for it.

    Raises:
        BatchTooLarge: it does not.
    """
    if nbytes > memory:
        raise BatchTooLarge(inputs, f"leaves {bytes_text(nbytes)} between its shards", memory)


def tensors_of(going: GraphPass, held: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    """Return the tensors of a pass by what they are, with what is held for it."""
    batch = going.batch
    found: dict[Key, Tensor] = {("feature", n): t for n, t in enumerate(batch.features)}
    found |= {("target", n): t for n, t in enumerate(batch.targets)}
    # Sets of names have another order in another process, which may do a unit again.
    found |= {("held", name): held[name] for name in sorted(held)}
    found |= {("value", n): v for n, v in going.values.items() if isinstance(v, Tensor)}
    for buffers in going.buffers_before.values():
        found |= {("before", name): buffers[name] for name in sorted(buffers)}
    found |= {("gradient", name): t for name, t in going.grads.items()}
    return found | {("tied", name): t for name, t in going.tied_grads.items()}


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class GraphPasses:
    """Does F and B of shards for microbatches, or F for an evaluation's; one is here at a time.

    Of the others, autograd's graphs are kept here if activations are, and all else is where
    `put_down` has left it.

    Args:
        tasks: a shard is bound to it before its tasks come.
        start_step: the number of optimizer steps that the trial has done before the sub-epoch.
        copies: what is held of shards that may be away.
        limit: bounds what tasks hold of the device beside their shards; None does not.
        crossings: the shards to which microbatches come from other devices; None if any may.
    """

    def __init__(
        self,
        tasks: GraphTasks | GraphPredictor,
        trial: TrialRuntime,
        start_step: int,
        copies: dict[str, Tensor],
        limit: MemoryLimit | None,
        crossings: Collection[int] | None = None,
    ) -> None:
        recipe, cut_model = trial.recipe, trial.cut_model
        assert cut_model.graphs is not None
        self._tasks, self._graphs = tasks, cut_model.graphs
        self._tied, self._shared = cut_model.tied, cut_model.read_elsewhere
        self._recipe, self._trial_seed, self._start_step = recipe, trial.seed, start_step
        self._behind = max(trial.staleness, default=0)  # windows that may be under way beside one
        self._copies, self._limit = copies, limit
        self._crossings = crossings
        self._here: dict[int, tuple[GraphPass, TensorLog, LiveBytes]] = {}  # what goes on here
        self._kept: dict[int, dict[int, AutogradGraph]] = {}  # by microbatch and shard
        self._left: dict[int, PassRecord] = {}  # by microbatch, of the last unit here
        self._live = LiveBytes()  # what tasks of the microbatch have left while it is here
        self._going: GraphPass | None = None
        self._number = self._rows = 0  # of the microbatch that is here
        self._turns = True  # whether the unit has a backward
        self._last: Action | None = None  # forward or backward of the unit
        self._memory: Memory
        self._record = PassRecord()
        self._log = TensorLog({}, 0)

    def begin(self, number: int, batch: Microbatch, rows: int) -> None:
        """Take a microbatch before shard 0."""
        self._live = LiveBytes()
        self._going, self._number, self._rows = GraphPass(batch, self._turns), number, rows

    def perform(self, task: Action) -> None:
        """Do F or B of a shard.

        Raises:
            ValueError: its microbatch is not here.
            NonFiniteLoss: the loss is NaN or infinite.
        """
        going, k = self._going, task.shard
        if going is None or task.microbatch != self._number:
            raise ValueError(f"{task} can't come now; take its microbatch up before")
        with torch.autograd.set_multithreading_enabled(False), self._within_limit(k, going):
            if task.kind is ActionKind.F:
                self._tasks.forward(k, going)
            else:
                assert isinstance(self._tasks, GraphTasks), "an evaluation has no backward"
                self._tasks.backward(k, going)

    @property
    def batch(self) -> tuple[Microbatch, int]:
        """Return the microbatch that is here, and its rows."""
        assert self._going is not None
        return self._going.batch, self._rows

    def end(self) -> None:
        """Let go of the microbatch that is here."""
        self._going = None

    def cancel(self) -> None:
        """Let go of all microbatches."""
        self._going = None
        self._here.clear()
        self._kept.clear()
        self._left.clear()

    @contextmanager
    def _within_limit(self, k: int, going: GraphPass) -> Iterator[None]:
        if self._limit is None:
            yield
            return
        batch = ("feature", "target")
        here = tensors_of(going, self._copies).items()
        held = [tensor for (kind, _), tensor in here if kind not in batch]
        inputs, live = going.batch.inputs, self._live
        with self._limit.kept(inputs, held, lambda kind, shard: None, live) as reach:
            reach("F", k)
            yield

    @property
    def tensors(self) -> dict[Key, Tensor]:
        """Return the tensors of the microbatch that is here, with what is held for it."""
        assert self._going is not None
        shared = self._shared & self._copies.keys()
        return tensors_of(self._going, {name: self._copies[name] for name in shared})

    # ------------------------------------------------------------------ records

    def take_up(self, tasks: Sequence[Action], memory: Memory, record: PassRecord) -> None:
        """Begin a unit of a microbatch.

        Args:
            tasks: of the unit.
            memory: has what the record describes, and room for more.
            record: of the unit before; an empty one before F of shard 0, and where the unit before
                was done here.
        """
        first, number = tasks[0], tasks[0].microbatch or 0
        passes = first.kind is not ActionKind.U
        here = self._here.pop(number, None) if passes else None
        begins = first.kind is ActionKind.F and first.shard == 0
        if here is not None or not (record.tensors or begins or not passes):
            record = replace(self._left.pop(number), facts=record.facts)
        self._memory, self._record = memory, record
        self._log = TensorLog(record.tensors, record.nbytes)
        self._turns = any(task.kind is ActionKind.B for task in tasks)
        self._last = next((t for t in reversed(tasks) if t.kind is not ActionKind.U), None)
        if here is None and not (passes and record.tensors):
            return
        self._number, self._rows = number, record.rows
        if here is None:
            self._live = LiveBytes()
            self._going = self._read(first)
        else:
            self._going, self._log, self._live = here
            self._read_more(self._going, first.shard)

    def put_down(self, facts: Mapping[int, GradientFacts]) -> PassRecord:
        """End a unit, and return what describes its microbatch now.

        Args:
            facts: of gradients, which the tasks of other devices may need.

        Raises:
            MemoryError: the memory has no room for what the microbatch leaves there.
        """
        going, record, log = self._going, self._record, self._log
        if going is not None:
            goes_on = self._goes_on_here
            if going.graphs and not goes_on:
                self._kept[self._number] = going.graphs
            tensors = self._for_others(going)
            new = log.add(tensors) if goes_on else log.lay_out(tensors)
            check_room(going.batch.inputs, log.nbytes, self._memory.nbytes)
            for tensor, place in new:
                place.write(tensor, self._memory)
            if goes_on:
                log.leave("held")
                self._here[self._number] = going, log, self._live
            batch = going.batch
            others = {n: v for n, v in going.values.items() if not isinstance(v, Tensor)}
            record = PassRecord(
                log.nbytes, dict(log.stored), others, frozenset(going.needs_grad), self._rows,
                batch.weight, batch.loss,
            )  # fmt: skip
            self._keep(record)
        self._going = None
        del self._memory
        return replace(record, facts=dict(facts))

    @property
    def _goes_on_here(self) -> bool:
        """Return whether this device does what comes after the unit in its microbatch."""
        if self._crossings is None or self._last is None:
            return False
        k = self._last.shard
        return (k if self._last.kind is ActionKind.B else k + 1) not in {0, *self._crossings}

    def _for_others(self, going: GraphPass) -> Mapping[Key, Tensor]:
        """Return the tensors of the microbatch that tasks of others need after the unit.

        Where activations are kept, shards of this device have their values in autograd's graphs.
        """
        if self._crossings is None or self._last is None:
            return self.tensors
        k, goes_on = self._last.shard, self._goes_on_here
        behind: Sequence[str] = ()
        if self._last.kind is ActionKind.F:
            kinds = {"held"} if goes_on else {"feature", "target", "held"}
            if not goes_on:
                behind = self._graphs.of(going.batch.inputs).train[k + 1].live_in
        else:
            kinds = set() if goes_on or k == 0 else {"feature", "target", "gradient", "tied"}
        return {
            (kind, name): tensor
            for (kind, name), tensor in self.tensors.items()
            if kind in kinds or (kind == "value" and name in behind)
        }

    def _keep(self, record: PassRecord) -> None:
        """Keep the record of the microbatch, for units that are ordered before it is told."""
        window, size = self._number // self._recipe.accumulate, self._recipe.accumulate
        left = {m: r for m, r in self._left.items() if abs(m // size - window) <= self._behind}
        self._left = {**left, self._number: record}

    def _read(self, first: Action) -> GraphPass:
        """Return the microbatch with what tasks of one shard need of it."""
        k, record, recipe = first.shard, self._record, self._recipe
        window, place = divmod(self._number, recipe.accumulate)
        key = RandomKey(self._trial_seed, self._start_step + window, place, recipe.device)
        features, targets = (
            tuple(self._stored(each) for each in record.tensors if each[0] == kind)
            for kind in ("feature", "target")
        )
        batch = Microbatch(recipe, features, targets, record.weight, key, record.loss)
        graphs, kept = self._graphs.of(batch.inputs), self._kept.pop(self._number, {})
        graph = (graphs.train if isinstance(self._tasks, GraphTasks) else graphs.eval)[k]
        values = {} if k in kept else self._named("value", graph.live_in)
        before: dict[str, Tensor] = {}
        if first.kind is ActionKind.B and k not in kept:
            before = self._named("before", graph.mutates)
            assert before.keys() == graph.mutates, "an F that is not kept leaves what it overwrites"
        self._copies |= self._named("held", (*graph.params, *graph.buffers))
        return GraphPass(
            batch,
            self._turns,
            values={**record.others, **values},
            needs_grad=set(record.needs_grad),
            graphs=kept,
            buffers_before={k: {name: buffer.clone() for name, buffer in before.items()}},
            grads=self._named("gradient", graph.live_out),
            tied_grads=self._named("tied", [n for n, users in self._tied.items() if k in users]),
        )

    def _read_more(self, going: GraphPass, k: int) -> None:
        """Add what only tasks of shard k need of what other devices have left."""
        graph = self._graphs.of(going.batch.inputs).train[k]
        held = [n for n in (*graph.params, *graph.buffers) if n not in self._copies]
        self._copies |= self._named("held", held)
        tied = [name for name, users in self._tied.items() if k in users]
        going.tied_grads |= self._named("tied", [n for n in tied if not self._log.has(("tied", n))])

    def _named(self, kind: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return those of the tensors of a kind that are stored."""
        keys = {name: (kind, name) for name in names}
        return {n: self._stored(key) for n, key in keys.items() if key in self._record.tensors}

    def _stored(self, key: Key) -> Tensor:
        return self._log.read(key, self._memory, self._recipe.device)
