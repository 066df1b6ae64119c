"""Runs the shard tasks F and B of one microbatch, with the same bits as in the uncut model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.cut.reseed import random_key
from cerebro_hydra.shards.cut.shard_graph import ShardGraph
from cerebro_hydra.shards.engine.bound_model import HeldTensors
from cerebro_hydra.shards.engine.microbatch import Microbatch, Reach, Scale
from cerebro_hydra.shards.engine.state import ShardState, WeightVersions


@dataclass
class AutogradGraph:
    """Keeps what a shard's B needs from its F: values and tied weights received, and outputs."""

    received: dict[str, Tensor]
    outputs: dict[str, Any]
    tied: dict[str, Tensor]
    loss: Tensor | None = None


@dataclass
class GraphPass:
    """Carries one batch through the shards: values go forward and gradients go backward.

    ``turns_at_once`` says whether B of the last shard follows its F.
    """

    batch: Microbatch
    turns_at_once: bool = True
    values: dict[str, Any] = field(default_factory=dict)
    needs_grad: set[str] = field(default_factory=set)
    graphs: dict[int, AutogradGraph] = field(default_factory=dict)
    buffers_before: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    tied_grads: dict[str, Tensor] = field(default_factory=dict)


class GraphTasks:
    """Runs F and B of one trial's shards, whose model is cut as a graph.

    `states[k]` must be bound before a task of shard k; what `held` has is read there. With `keep`,
    autograd's graph lives from F to B. Without it, F drops the graph and B computes it again; only
    the last shard keeps it where its B follows at once. Backward begins from what `scaled` returns
    of the loss. Shards with `versions` read what is chosen there.
    """

    def __init__(
        self,
        cut_model: CutModel,
        states: Mapping[int, ShardState],
        precision: Callable[[], AbstractContextManager[Any]],
        keep: bool,
        scaled: Scale,
        held: HeldTensors | None = None,
        versions: Mapping[int, WeightVersions] | None = None,
    ) -> None:
        assert cut_model.graphs is not None
        self._graphs = cut_model.graphs
        self._scaled = scaled
        self._tied = cut_model.tied
        self._states = states
        self._precision = precision
        self._keep = keep
        self._versions = {} if versions is None else versions
        self._held: Mapping[str, Tensor] = {} if held is None else held.copies
        self._last = cut_model.num_shards - 1
        self._param_owner = {p.name: p.owner for p in cut_model.params}
        self._buffer_owner = {b.name: b.owner for b in cut_model.buffers}

    def run(self, batch: Microbatch, reach: Reach) -> None:
        """Run F and B of every shard, after `reach` has allowed each of them."""
        self.carry(GraphPass(batch), reach)

    def carry(self, going: GraphPass, reach: Reach) -> None:
        """Run F and B of every shard for a pass; see `run`."""
        for k in range(self._last + 1):
            reach("F", k)
            self.forward(k, going)
        for k in reversed(range(self._last + 1)):
            reach("B", k)
            self.backward(k, going)

    def forward(self, k: int, going: GraphPass) -> None:
        """Run F of shard k."""
        shard_graph = self._graph(k, going)
        buffers = self._buffers(shard_graph)
        keep = self._keep or (k == self._last and going.turns_at_once)
        if not keep:
            # B runs on the buffers as they are before F, so that statistics don't move twice.
            going.buffers_before[k] = {n: buffers[n].clone() for n in shard_graph.mutates}
        graph = self._run(k, going, buffers)
        if keep:
            going.graphs[k] = graph
        for name, value in graph.outputs.items():
            if isinstance(value, Tensor):
                if value.requires_grad:
                    going.needs_grad.add(name)
                value = value.detach() if keep else apart(value, self._states[k].values.values())
            going.values[name] = value

    def backward(self, k: int, going: GraphPass) -> None:
        """Run B of shard k, after its F; where F's graph is gone, F is computed again."""
        graph = going.graphs.pop(k, None)
        if graph is None:
            buffers = self._buffers(self._graph(k, going)) | going.buffers_before.pop(k)
            graph = self._run(k, going, buffers)
        roots: list[Tensor] = []
        seeds: list[Tensor | None] = []
        if graph.loss is not None:
            weight = going.batch.weight
            roots.append(self._scaled(graph.loss if weight is None else graph.loss * weight))
            seeds.append(None)
        # A value that passes through is a root too: its gradient from later shards comes first.
        for name, value in graph.outputs.items():
            grad = going.grads.get(name)
            if grad is not None and value.requires_grad:
                roots.append(value)
                seeds.append(grad)
        for name, users in self._tied.items():
            if k in users and (grad := going.tied_grads.pop(name, None)) is not None:
                own = self._states[k].read
                roots.append(graph.tied[name] if name in graph.tied else own[name])
                seeds.append(grad)
        if roots:
            versions = self._versions.get(k)
            with nullcontext() if versions is None else versions.gathering():
                torch.autograd.backward(roots, seeds)
        received = self._graph(k, going).live_in
        for name in graph.outputs:
            going.grads.pop(name, None)
            if name not in received:
                going.values.pop(name, None)
        going.grads |= {n: v.grad for n, v in graph.received.items() if v.grad is not None}
        going.tied_grads |= {n: t.grad for n, t in graph.tied.items() if t.grad is not None}

    def _graph(self, k: int, going: GraphPass) -> ShardGraph:
        return self._graphs.of(going.batch.inputs).train[k]

    def _buffers(self, graph: ShardGraph) -> dict[str, Tensor]:
        found = {}
        for name in graph.buffers:
            held = self._held.get(name)
            owner = self._buffer_owner[name]
            found[name] = self._states[owner].buffers[name] if held is None else held
        return found

    def _run(self, k: int, going: GraphPass, buffers: Mapping[str, Tensor]) -> AutogradGraph:
        graph = self._graph(k, going)
        params: list[Tensor] = []
        tied: dict[str, Tensor] = {}
        for name in graph.params:
            owner = self._param_owner[name]
            if owner != k and name in self._held:
                param = self._held[name]
            else:
                param = self._states[owner].read[name]
            if owner != k and param.requires_grad:
                # A shard that uses the weight but does not own it sends its gradient backwards.
                param = tied[name] = param.detach().requires_grad_()
            params.append(param)
        received: dict[str, Tensor] = {}
        live: list[Any] = []
        for name in graph.live_in:
            value = going.values[name]
            if name in going.needs_grad:
                leaf = value.detach().requires_grad_()
                # Not a leaf, as in the uncut model; a leaf's gradient would take its strides.
                received[name] = value = leaf.view_as(leaf)
                value.retain_grad()
            live.append(value)
        inputs = [going.batch.inputs[i] for i in graph.inputs]
        with torch.enable_grad(), self._precision(), random_key(going.batch.key):
            if k == 0:
                going.batch.key.reseed("")
            out = graph.run(*params, *(buffers[n] for n in graph.buffers), *live, *inputs)
            if k == self._last:
                outputs = self._graphs.of(going.batch.inputs).outputs(out, True)
                loss = going.batch.loss_of(outputs)
                going.batch.finish_forward(loss, outputs)
                return AutogradGraph(received, {}, tied, loss)
        return AutogradGraph(received, dict(zip(graph.live_out, out, strict=True)), tied)


def apart(value: Tensor, own: Iterable[Tensor]) -> Tensor:
    """Return a value that stays good when a shard's own tensors leave, in the same strides."""
    storage = value.untyped_storage()
    if storage.data_ptr() not in {each.untyped_storage().data_ptr() for each in own}:
        return value.detach()
    copy = torch.empty(0, dtype=value.dtype, device=value.device)
    return copy.set_(storage.clone(), value.storage_offset(), value.shape, value.stride())


class GraphPredictor:
    """Runs the evaluation graphs of all shards.

    `states[k]` must be bound before F of shard k; what `held` has is read there.
    """

    def __init__(
        self, cut_model: CutModel, states: Mapping[int, ShardState], held: HeldTensors
    ) -> None:
        assert cut_model.graphs is not None
        self._outputs: Any = None
        self._graphs = cut_model.graphs
        self._owner = {t.name: t.owner for t in (*cut_model.params, *cut_model.buffers)}
        self._trained = {p.name for p in cut_model.params if not p.frozen}
        self._states = states
        self._held: Mapping[str, Tensor] = held.copies

    def run(self, inputs: Sequence[Tensor], reach: Reach) -> Any:
        """Return the model's outputs, after `reach` has allowed F of each shard."""
        values: dict[str, Any] = {}
        for k in range(len(self._graphs.of(inputs).eval)):
            reach("F", k)
            values = self._run(k, inputs, values)
        return self.take_outputs()

    def forward(self, k: int, going: GraphPass) -> None:
        """Run F of shard k, whose values stay good when the shard leaves its memory."""
        values = self._run(k, going.batch.inputs, going.values)
        own = self._states[k].values.values()
        going.values = {
            name: apart(value, own) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }

    def take_outputs(self) -> Any:
        """Return the model's outputs after F of the last shard, and hold them no more."""
        outputs, self._outputs = self._outputs, None
        return outputs

    def _run(self, k: int, inputs: Sequence[Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
        """Run F of shard k, and return its values for the shard behind."""
        graphs = self._graphs.of(inputs)
        graph = graphs.eval[k]
        out = graph.run(
            *(self._parameter(name) for name in graph.params),
            *(self._held[name] for name in graph.buffers),
            *(values[name] for name in graph.live_in),
            *(inputs[i] for i in graph.inputs),
        )
        if graph is graphs.eval[-1]:
            self._outputs = graphs.outputs(out, False)
        return dict(zip(graph.live_out, out, strict=False))

    def _parameter(self, name: str) -> Tensor:
        value = self._held.get(name)
        if value is None:
            value = self._states[self._owner[name]].values[name]
        # By what requires gradients torch chooses kernels, even where none are recorded.
        return value.detach().requires_grad_() if name in self._trained else value
