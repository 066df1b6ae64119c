"""The microbatches of a trial that is cut as a graph, on their way through the shards, by task.

A microbatch is here from its first task to its last, or for one unit at a time. Between two units
it is then in memory that all devices of the worker share, and any of them may do its next unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.recipe import RandomKey
from cerebro_hydra.shards.engine.graph_tasks import AutogradGraph, GraphPass, GraphTasks
from cerebro_hydra.shards.engine.layout import Memory, TrialRuntime
from cerebro_hydra.shards.engine.microbatch import LiveBytes, MemoryLimit, Microbatch
from cerebro_hydra.shards.engine.pass_record import (
    Key,
    PassRecord,
    TensorLog,
    check_room,
    tensors_of,
)
from cerebro_hydra.shards.engine.sub_epoch import Norms


class GraphPasses:
    """Does F and B of shards for microbatches, of which one is here at a time.

    Of the others, autograd's graphs are kept here if activations are, and all else is where
    `put_down` has left it.

    Args:
        tasks: a shard is bound to it before its tasks come.
        start_step: the number of optimizer steps that the trial has done before the sub-epoch.
        copies: what is held of shards that may be away.
        limit: bounds what tasks hold of the device beside their shards; None does not.
    """

    def __init__(
        self,
        tasks: GraphTasks,
        trial: TrialRuntime,
        start_step: int,
        copies: dict[str, Tensor],
        limit: MemoryLimit | None,
    ) -> None:
        recipe, cut_model = trial.recipe, trial.cut_model
        assert cut_model.graphs is not None
        self._tasks, self._graphs = tasks, cut_model.graphs
        self._tied, self._shared = cut_model.tied, cut_model.read_elsewhere
        self._recipe, self._trial_seed, self._start_step = recipe, trial.seed, start_step
        self._copies, self._limit = copies, limit
        self._kept: dict[int, dict[int, AutogradGraph]] = {}  # by microbatch and shard
        self._live = LiveBytes()  # what tasks of the microbatch have left while it is here
        self._going: GraphPass | None = None
        self._number = self._rows = 0  # of the microbatch that is here
        self._turns = True  # whether the unit has a backward
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
                self._tasks.backward(k, going)

    @property
    def loss(self) -> tuple[float, int]:
        """Return the mean loss of the microbatch that is here, and its rows."""
        assert self._going is not None
        return self._going.batch.loss, self._rows

    def end(self) -> None:
        """Let go of the microbatch that is here."""
        self._going = None

    def cancel(self) -> None:
        """Let go of all microbatches."""
        self._going = None
        self._kept.clear()

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

    # ------------------------------------------------------------------ records

    def take_up(self, tasks: Sequence[Action], memory: Memory, record: PassRecord) -> None:
        """Begin a unit of a microbatch.

        Args:
            tasks: of the unit.
            memory: has what the record describes, and room for more.
            record: of the unit before; an empty one before F of shard 0.
        """
        self._memory, self._record = memory, record
        self._log = TensorLog(record.tensors, record.nbytes)
        self._turns = any(task.kind is ActionKind.B for task in tasks)
        first = tasks[0]
        if first.kind is not ActionKind.U and record.tensors:
            self._number, self._rows = first.microbatch or 0, record.rows
            self._live = LiveBytes()
            self._going = self._read(first)

    def put_down(self, norms: Mapping[int, Norms]) -> PassRecord:
        """End a unit, and return what describes its microbatch now.

        Args:
            norms: of gradients, which the tasks of other devices may need.

        Raises:
            MemoryError: the memory has no room for what the microbatch leaves there.
        """
        going, record, log = self._going, self._record, self._log
        self._going = None
        if going is not None:
            if going.graphs:
                self._kept[self._number] = going.graphs
            held = {name: self._copies[name] for name in self._shared & self._copies.keys()}
            new = log.lay_out(tensors_of(going, held))
            check_room(log.nbytes, self._memory.nbytes)
            for tensor, place in new:
                place.write(tensor, self._memory)
            batch = going.batch
            others = {n: v for n, v in going.values.items() if not isinstance(v, Tensor)}
            record = PassRecord(
                log.nbytes, log.stored, others, frozenset(going.needs_grad), self._rows,
                batch.weight, batch.loss,
            )  # fmt: skip
        del self._memory
        return replace(record, norms=dict(norms))

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
        graph, kept = self._graphs.of(batch.inputs).train[k], self._kept.pop(self._number, {})
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

    def _named(self, kind: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return those of the tensors of a kind that are stored."""
        keys = {name: (kind, name) for name in names}
        return {n: self._stored(key) for n, key in keys.items() if key in self._record.tensors}

    def _stored(self, key: Key) -> Tensor:
        return self._log.read(key, self._memory, self._recipe.device)
