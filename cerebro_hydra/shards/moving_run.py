"""A sub-epoch of a graph cut whose microbatches go from device to device between two units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.recipe import RandomKey
from cerebro_hydra.shards.graph_tasks import GraphPass, GraphTasks
from cerebro_hydra.shards.layout import Memory
from cerebro_hydra.shards.microbatch import Microbatch
from cerebro_hydra.shards.pass_record import Key, PassRecord, TensorLog, check_room, tensors_of
from cerebro_hydra.shards.shard_run import ShardRun
from cerebro_hydra.shards.sub_epoch import Norms


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

    def perform(self, task: Action, norms: Mapping[int, Norms] | None = None) -> None:
        """Do a task of the unit; see `ShardRun`."""
        k, clips = task.shard, self._recipe.clip_grad_norm is not None
        if clips and task.kind is ActionKind.U and k not in self._norms:
            self._norms[k] = self._sub_epoch.norms_of(k)  # the unit has its last backward
        super().perform(task, self._norms)
        self._last = task.kind

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
