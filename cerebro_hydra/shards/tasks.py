"""Runs the shard tasks F and B of one microbatch, with the same bits as in the uncut model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.reseed import random_key
from cerebro_hydra.shards.sample import Example
from cerebro_hydra.shards.shard_graph import ShardGraph
from cerebro_hydra.shards.state import ShardState


@dataclass
class AutogradGraph:
    """Keeps what a shard's B needs from its F: inputs and tied weights as leaves, and outputs."""

    leaves: dict[str, Tensor]
    outputs: dict[str, Any]
    tied: dict[str, Tensor]
    loss: Tensor | None = None


@dataclass
class Microbatch:
    """Carries one batch through the shards: values go forward and gradients go backward."""

    inputs: Sequence[Tensor]
    loss_of: Callable[[Any], Tensor]
    weight: float | None  # of its loss in a window of several microbatches, else None
    key: RandomKey
    values: dict[str, Any] = field(default_factory=dict)
    needs_grad: set[str] = field(default_factory=set)
    graphs: dict[int, AutogradGraph] = field(default_factory=dict)
    buffers_before: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    tied_grads: dict[str, Tensor] = field(default_factory=dict)
    loss: float = float("nan")

    @classmethod
    def collated(
        cls, recipe: Recipe, example: Example, key: RandomKey, weight: float | None
    ) -> Microbatch:
        """Return a batch before shard 0, as `collate` leaves it."""
        features, targets = recipe.collated(*example, key)
        loss_of = partial(recipe.compute_loss, targets=targets)
        return cls(recipe.inputs(features, targets), loss_of, weight, key)


class ShardTasks:
    """Runs F and B of one trial's shards.

    `states[k]` must be bound before the first task of shard k. With `keep`, autograd's graph lives
    from F to B. Without it, F drops the graph and B computes it again; only the last shard keeps
    it, because its B follows at once.
    """

    def __init__(
        self,
        cut_model: CutModel,
        states: Mapping[int, ShardState],
        precision: Callable[[], AbstractContextManager[Any]],
        keep: bool,
    ) -> None:
        self._cut_model = cut_model
        self._states = states
        self._precision = precision
        self._keep = keep
        self._last = cut_model.num_shards - 1
        self._param_owner = {p.name: p.owner for p in cut_model.params}
        self._buffer_owner = {b.name: b.owner for b in cut_model.buffers}

    def forward(self, k: int, batch: Microbatch) -> None:
        """Run F of shard k."""
        shard_graph = self._cut_model.train[k]
        buffers = self._buffers(shard_graph)
        keep = self._keep or k == self._last
        if not keep:
            # B runs on the buffers as they are before F, so that statistics don't move twice.
            batch.buffers_before[k] = {n: buffers[n].clone() for n in shard_graph.mutates}
        graph = self._run(k, batch, buffers)
        if keep:
            batch.graphs[k] = graph
        for name, value in graph.outputs.items():
            if isinstance(value, Tensor):
                if value.requires_grad:
                    batch.needs_grad.add(name)
                value = value.detach()
            batch.values[name] = value
        if graph.loss is not None:
            batch.loss = graph.loss.item()

    def backward(self, k: int, batch: Microbatch) -> None:
        """Run B of shard k, after its F."""
        graph = batch.graphs.pop(k, None)
        if graph is None:
            buffers = self._buffers(self._cut_model.train[k]) | batch.buffers_before.pop(k)
            graph = self._run(k, batch, buffers)
        roots: list[Tensor] = []
        seeds: list[Tensor | None] = []
        if graph.loss is not None:
            roots.append(graph.loss if batch.weight is None else graph.loss * batch.weight)
            seeds.append(None)
        # A value that passes through is a root too: its gradient from later shards comes first.
        for name, value in graph.outputs.items():
            grad = batch.grads.get(name)
            if grad is not None and value.requires_grad:
                roots.append(value)
                seeds.append(grad)
        for name, users in self._cut_model.tied.items():
            if k in users and (grad := batch.tied_grads.pop(name, None)) is not None:
                own = self._states[k].params
                roots.append(graph.tied[name] if name in graph.tied else own[name])
                seeds.append(grad)
        if roots:
            torch.autograd.backward(roots, seeds)
        for name in graph.outputs:
            if name not in graph.leaves:
                batch.grads.pop(name, None)
                batch.values.pop(name, None)
        for name, leaf in graph.leaves.items():
            if leaf.grad is not None:
                batch.grads[name] = leaf.grad
            else:
                batch.grads.pop(name, None)
        batch.tied_grads |= {n: t.grad for n, t in graph.tied.items() if t.grad is not None}

    def _buffers(self, graph: ShardGraph) -> dict[str, Tensor]:
        owner = self._buffer_owner
        return {name: self._states[owner[name]].buffers[name] for name in graph.buffers}

    def _run(self, k: int, batch: Microbatch, buffers: Mapping[str, Tensor]) -> AutogradGraph:
        graph = self._cut_model.train[k]
        params: list[Tensor] = []
        tied: dict[str, Tensor] = {}
        for name in graph.params:
            owner = self._param_owner[name]
            param: Tensor = self._states[owner].params[name]
            if owner != k and param.requires_grad:
                # A shard that uses the weight but does not own it sends its gradient backwards.
                param = tied[name] = param.detach().requires_grad_()
            params.append(param)
        leaves: dict[str, Tensor] = {}
        live: list[Any] = []
        for name in graph.live_in:
            value = batch.values[name]
            if name in batch.needs_grad:
                leaves[name] = leaf = value.detach().requires_grad_()
                value = leaf.view_as(leaf)  # not a leaf, as it is in the uncut model
            live.append(value)
        inputs = [batch.inputs[i] for i in graph.inputs]
        with torch.enable_grad(), self._precision(), random_key(batch.key):
            if k == 0:
                batch.key.reseed("")
            out = graph.run(*params, *(buffers[n] for n in graph.buffers), *live, *inputs)
            if k == self._last:
                loss = batch.loss_of(self._cut_model.outputs(out, True))
                return AutogradGraph(leaves, {}, tied, loss)
        return AutogradGraph(leaves, dict(zip(graph.live_out, out, strict=True)), tied)
