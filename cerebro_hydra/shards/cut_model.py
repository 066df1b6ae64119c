"""A cut model has the graph of every shard and the owner of every tensor, but no trial's values.

Trials whose models have equal structure share one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cerebro_hydra.shards.cut_spec import CutSpec
from cerebro_hydra.shards.guards import Guards
from cerebro_hydra.shards.model_key import model_key
from cerebro_hydra.shards.module_graph import layer_graphs, whole_graph
from cerebro_hydra.shards.sample import Sample
from cerebro_hydra.shards.shard_graph import ShardGraph, cut_graph
from cerebro_hydra.shards.trace import CutFailed, TracedModel, trace

T = TypeVar("T")


@dataclass(frozen=True)
class TensorInfo:
    """Describes a parameter or buffer: its first name, its form, and the shard that holds it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: int
    frozen: bool  # a parameter without gradient, or a buffer that training does not write to


@dataclass(frozen=True)
class CutModel:
    """Holds a model cut into shards, without the values of any trial.

    `params` are in `named_parameters()` order and `buffers` in `named_buffers()` order. Tied
    tensors occur once, under their first name. `tied` maps each trainable parameter that several
    shards use to these shards; the first of them owns it.
    """

    spec: CutSpec
    train: tuple[ShardGraph, ...]
    eval: tuple[ShardGraph, ...]
    params: tuple[TensorInfo, ...]
    buffers: tuple[TensorInfo, ...]
    tied: dict[str, tuple[int, ...]]
    outputs: Callable[[Sequence[Any], bool], Any]
    """Turns the last shard's outputs into the model's own output; the flag says if in training."""
    guards: tuple[Guards, ...] = ()
    """The conditions on batches whose shape is not the sample's."""

    @property
    def num_shards(self) -> int:
        return len(self.train)

    @property
    def tied_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups of shards that share a parameter, each with its owner first."""
        return tuple(sorted(set(self.tied.values())))

    @classmethod
    def build(cls, model: nn.Module, spec: CutSpec, sample: Sample) -> CutModel:
        """Cut a model as a spec says, without changing the model.

        Raises:
            CutFailed: the model can't be cut that way.
        """
        if spec.mode == "export":
            return cls.cut(model, spec, trace(model, sample))
        if spec.mode == "layers":
            train, evaluation = (layer_graphs(model, spec.at, mode) for mode in (True, False))
        else:
            train, evaluation = ((whole_graph(model, sample, mode),) for mode in (True, False))
        return cls._assemble(model, spec, train, evaluation, lambda flat, training: flat[0])

    @classmethod
    def cut(cls, model: nn.Module, spec: CutSpec, traced: TracedModel) -> CutModel:
        """Cut a model that was traced before.

        Raises:
            CutFailed: the spec names a place where the model can't be cut.
        """
        for unit in spec.at:
            if unit not in traced.cut_points:
                raise CutFailed(
                    f"the model can't be cut at {unit!r}; choose among {list(traced.cut_points)}"
                )
        train = cut_graph(traced.train, spec.at, train=True)
        evaluation = cut_graph(traced.eval, spec.at, train=False)
        specs = (traced.eval.out_spec, traced.train.out_spec)

        def outputs(flat: Sequence[Any], training: bool) -> Any:
            return pytree.tree_unflatten(list(flat), specs[training])

        guards = (traced.train.guards, traced.eval.guards)
        return cls._assemble(model, spec, train, evaluation, outputs, guards)

    @classmethod
    def _assemble(
        cls, model: nn.Module, spec: CutSpec, train: tuple[ShardGraph, ...],
        evaluation: tuple[ShardGraph, ...], outputs: Callable[[Sequence[Any], bool], Any],
        guards: tuple[Guards, ...] = (),
    ) -> CutModel:  # fmt: skip
        owner: dict[str, int] = {}
        for shard, graphs in enumerate(zip(train, evaluation, strict=True)):
            for graph in graphs:
                for name in (*graph.params, *graph.buffers):
                    owner.setdefault(name, shard)
        persistent = set(model.state_dict(keep_vars=True))
        mutated = {name for graph in train for name in graph.mutates}
        params = tuple(
            _info(name, p, owner.get(name, 0), not p.requires_grad)
            for name, p in model.named_parameters()
        )
        buffers = tuple(
            _info(name, b, owner.get(name, 0), name not in mutated)
            for name, b in model.named_buffers()
            if name in owner or name in persistent
        )
        tied: dict[str, tuple[int, ...]] = {}
        for info in params:
            users = {k for k, graph in enumerate(train) if info.name in graph.params}
            users.add(info.owner)
            if len(users) > 1 and not info.frozen:
                tied[info.name] = tuple(sorted(users))
        return cls(spec, train, evaluation, params, buffers, tied, outputs, guards)


def _info(name: str, tensor: Tensor, owner: int, frozen: bool) -> TensorInfo:
    strides = tensor.stride()
    if not _is_dense(tensor):
        strides = torch.empty(tensor.shape, device="meta").stride()
    return TensorInfo(name, tensor.dtype, tuple(tensor.shape), tuple(strides), owner, frozen)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor fills its memory without holes, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


class CutModelCache:
    """Exports, measures and cuts once for all models of equal structure.

    A model is not shared if it holds anything whose equality can't be told. The cache is not
    thread-safe.
    """

    def __init__(self) -> None:
        self._cut_models: dict[Hashable, CutModel] = {}
        self._traces: dict[Hashable, TracedModel | CutFailed] = {}
        self._times: dict[Hashable, list[float]] = {}

    def get(self, model: nn.Module, spec: CutSpec, sample: Sample) -> CutModel:
        """Return the cut model, built at the first call; see `CutModel.build`."""

        def build() -> CutModel:
            if spec.mode == "export":
                return CutModel.cut(model, spec, self.trace(model, sample))
            return CutModel.build(model, spec, sample)

        return _once(self._cut_models, model_key(model, sample), spec, build)

    def trace(self, model: nn.Module, sample: Sample) -> TracedModel:
        """Return the graphs of a model, exported at the first call; see `trace.trace`."""

        def attempt() -> TracedModel | CutFailed:
            try:
                return trace(model, sample)
            except CutFailed as error:
                return error

        traced = _once(self._traces, model_key(model, sample), None, attempt)
        if isinstance(traced, CutFailed):
            raise traced
        return traced

    def times(
        self,
        model: nn.Module,
        spec: CutSpec,
        sample: Sample,
        measure: Callable[[], list[float]],
    ) -> list[float]:
        """Return the seconds of each shard, measured at the first call.

        Measuring once gives equal models equal cuts.
        """
        return _once(self._times, model_key(model, sample), spec, measure)


def _once(
    made: dict[Hashable, T], key: Hashable | None, spec: CutSpec | None, make: Callable[[], T]
) -> T:
    """Return what was made for this key and spec before, or make it; None is no key."""
    if key is None:
        return make()
    if (key, spec) not in made:
        made[key, spec] = make()
    return made[key, spec]
