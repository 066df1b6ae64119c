"""What trials of equal structure share: the programs of every shard, and who owns what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class TensorInfo:
    """A parameter or buffer: its first name, form, and the shard whose segments hold it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: int
    frozen: bool  # no gradient, or nobody writes to it


@dataclass(frozen=True)
class CutModel:
    """A model cut into shards, without the values of any trial.

    `params` are in `named_parameters()` order, `buffers` in `named_buffers()` order; tied tensors
    occur once, under their first name. `tied` maps a trainable parameter that several shards
    train to those shards; its owner is the first of them.
    """

    spec: CutSpec
    train: tuple[ShardGraph, ...]
    eval: tuple[ShardGraph, ...]
    params: tuple[TensorInfo, ...]
    buffers: tuple[TensorInfo, ...]
    tied: dict[str, tuple[int, ...]]
    outputs: Callable[[Sequence[Any], bool], Any]
    """What the last shard gave, and whether in training, as the model's own output."""
    guards: tuple[Guards, ...] = ()
    """What a batch of another shape than the sample's has to meet."""

    @property
    def num_shards(self) -> int:
        return len(self.train)

    @property
    def tied_groups(self) -> tuple[tuple[int, ...], ...]:
        """Shards that share a parameter, the owner first, as schedules want them."""
        return tuple(sorted(set(self.tied.values())))

    def param_names(self, shard: int) -> tuple[str, ...]:
        return tuple(p.name for p in self.params if p.owner == shard)

    def buffer_names(self, shard: int) -> tuple[str, ...]:
        return tuple(b.name for b in self.buffers if b.owner == shard)

    @classmethod
    def build(cls, model: nn.Module, spec: CutSpec, sample: Sample) -> CutModel:
        """Cut a model as a spec says; the model itself is not changed.

        Raises:
            CutFailed: the spec does not fit this model.
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
        """Cut a model that was traced before."""
        for unit in spec.at:
            if unit not in traced.legal:
                raise CutFailed(f"{unit!r} is no place to cut; places are {list(traced.legal)}")
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
        param_owner: dict[str, int] = {}
        buffer_owner: dict[str, int] = {}
        for shard, programs in enumerate(zip(train, evaluation, strict=True)):
            for program in programs:
                for name in program.params:
                    param_owner.setdefault(name, shard)
                for name in program.buffers:
                    buffer_owner.setdefault(name, shard)
        persistent = set(model.state_dict(keep_vars=True))
        mutated = {name for program in train for name in program.mutates}
        params = tuple(
            _info(name, p, param_owner.get(name, 0), not p.requires_grad)
            for name, p in model.named_parameters()
        )
        buffers = tuple(
            _info(name, b, buffer_owner.get(name, 0), name not in mutated)
            for name, b in model.named_buffers()
            if name in buffer_owner or name in persistent
        )
        tied: dict[str, tuple[int, ...]] = {}
        for info in params:
            users = {k for k, program in enumerate(train) if info.name in program.params}
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
    """Whether its elements fill its memory without holes, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


class CutModelCache:
    """Exports and cuts once for all models of equal structure. Not thread-safe.

    Models with anything inside whose equality can't be told are not shared.
    """

    def __init__(self) -> None:
        self._cut_models: dict[Any, CutModel] = {}
        self._traces: dict[Any, TracedModel | CutFailed] = {}
        self._times: dict[Any, list[float]] = {}

    def get(self, model: nn.Module, spec: CutSpec, sample: Sample) -> CutModel:
        """The structure of a model, built at the first call for it; see `CutModel.build`."""
        key = model_key(model, sample)
        if key is None:
            return CutModel.build(model, spec, sample)
        if (key, spec) not in self._cut_models:
            if spec.mode == "export":
                cut_model = CutModel.cut(model, spec, self.trace(model, sample))
            else:
                cut_model = CutModel.build(model, spec, sample)
            self._cut_models[key, spec] = cut_model
        return self._cut_models[key, spec]

    def trace(self, model: nn.Module, sample: Sample) -> TracedModel:
        """The graphs of a model, exported at the first call for it; see `trace.trace`."""
        key = model_key(model, sample)
        found = None if key is None else self._traces.get(key)
        if found is None:
            try:
                found = trace(model, sample)
            except CutFailed as error:
                found = error
            if key is not None:
                self._traces[key] = found
        if isinstance(found, CutFailed):
            raise found
        return found

    def times(
        self,
        model: nn.Module,
        spec: CutSpec,
        sample: Sample,
        measure: Callable[[], list[float]],
    ) -> list[float]:
        """Seconds of each shard, measured at the first call: equal models get equal cuts."""
        key = model_key(model, sample)
        if key is None:
            return measure()
        if (key, spec) not in self._times:
            self._times[key, spec] = measure()
        return self._times[key, spec]
