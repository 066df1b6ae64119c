"""A cut model has the graph of every shard and the owner of every tensor, but no trial's values.

Trials whose models have equal structure share one.

`Recent` keeps values that can be made again: those that were used last.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import units
from cerebro_hydra.recipe.placement import CPU
from cerebro_hydra.shards.cut.export import Guards
from cerebro_hydra.shards.cut.model_key import model_key
from cerebro_hydra.shards.cut.sample import Sample
from cerebro_hydra.shards.cut.shard_graph import ShardGraph, cut_graph
from cerebro_hydra.shards.cut.spec import CutSpec, module_of
from cerebro_hydra.shards.cut.trace import CutFailed, TracedModel, first_names, trace

T = TypeVar("T")

MOST_GRAPHS = 16
"""Cut models, and traces, that a cache keeps for models which come again."""

MOST_TIMES = 1000
"""Structures whose measured seconds a cache keeps, so that equal models have equal cuts."""


@dataclass(frozen=True)
class TensorInfo:
    """Describes a parameter or buffer: its first name, its form, and the shard that holds it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: int
    frozen: bool  # a parameter without gradient or a buffer, and no step may write to it


@dataclass(frozen=True)
class GraphCut:
    """Holds the graphs of every shard, of a model that is cut by `torch.export`."""

    train: tuple[ShardGraph, ...]
    eval: tuple[ShardGraph, ...]
    outputs: Callable[[Sequence[Any], bool], Any]
    """Turns the last shard's outputs into the model's own output; the flag says if in training."""
    guards: tuple[Guards, ...]
    """The conditions on batches whose shape is not the sample's."""
    of_rows: Mapping[int, GraphCut] = field(default_factory=dict)
    """The graphs for each number of rows, where none holds for several."""

    def of(self, inputs: Sequence[Tensor]) -> GraphCut:
        """Return the graphs that hold for a batch.

        Raises:
            ConfigurationError: none holds for its number of rows.
        """
        if not self.of_rows:
            return self
        rows = inputs[0].shape[0]
        if rows not in self.of_rows:
            raise ConfigurationError(
                f"a batch has {rows} rows, and the model was cut for {sorted(self.of_rows)} rows "
                "alone; let it take any number of rows, or choose a batch_size and accumulate that "
                "give these alone; schedule='sequential' with cut='modules' takes any, too"
            )
        return self.of_rows[rows]

    def on(self, device: torch.device) -> GraphCut:
        """Return the graphs on a device; they were traced on the CPU."""
        return replace(
            self,
            train=tuple(replace(each, run=each.run.on(device)) for each in self.train),
            eval=tuple(replace(each, run=each.run.on(device)) for each in self.eval),
            of_rows={rows: each.on(device) for rows, each in self.of_rows.items()},
        )


@dataclass(frozen=True)
class CutModel:
    """Describes a model cut into shards, without the values of any trial.

    `params` are in `named_parameters()` order and `buffers` in `named_buffers()` order. Tied
    tensors occur once, under their first name. `tied` maps each trainable parameter that several
    shards use to these shards; the first of them owns it. `units` has the unit calls of each shard.
    """

    spec: CutSpec
    units: tuple[tuple[str, ...], ...]
    params: tuple[TensorInfo, ...]
    buffers: tuple[TensorInfo, ...]
    tied: dict[str, tuple[int, ...]]
    shared: frozenset[str]
    """The parameters that may be read while another shard than their owner runs."""
    graphs: GraphCut | None = None
    """None if the model's own forward runs."""

    @property
    def num_shards(self) -> int:
        return len(self.units)

    @property
    def tied_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups of shards that share a parameter, each with its owner first."""
        return tuple(sorted(set(self.tied.values())))

    @property
    def shard_of_unit(self) -> dict[str, int]:
        """Return the shard of each unit, by the module's name."""
        return {module_of(unit): k for k, units in enumerate(self.units) for unit in units}

    @property
    def read_elsewhere(self) -> frozenset[str]:
        """Return the parameters and buffers that graphs of other shards read."""
        if self.graphs is None:
            return self.shared
        owner = {t.name: t.owner for t in (*self.params, *self.buffers)}
        return frozenset(
            name
            for graphs in (self.graphs, *self.graphs.of_rows.values())
            for mode in (graphs.train, graphs.eval)
            for k, graph in enumerate(mode)
            for name in (*graph.params, *graph.buffers)
            if owner[name] != k
        )

    def on(self, device: torch.device) -> CutModel:
        """Return the cut model for a device; it was cut on the CPU."""
        if device == CPU or self.graphs is None:
            return self
        return replace(self, graphs=self.graphs.on(device))

    @classmethod
    def build(cls, model: nn.Module, spec: CutSpec, sample: Sample) -> CutModel:
        """Cut a model as a spec says, without changing the model.

        Raises:
            CutFailed: the model can't be cut that way.
        """
        if spec.mode == "export":
            rows = spec.rows or (None,)
            return cls.by_graph(model, spec, [trace(model, sample, each) for each in rows])
        return cls.by_modules(model, spec)

    @classmethod
    def by_modules(cls, model: nn.Module, spec: CutSpec) -> CutModel:
        """Cut between units; what no unit holds, and units that have never run, are in shard 0."""
        shards: list[list[str]] = [[] for _ in range(len(spec.at) + 1)]
        shard_of: dict[str, int] = {}
        shard = 0
        for unit in spec.units:
            shard += unit in spec.at
            shard_of[module_of(unit)] = shard
            shards[shard].append(unit)
        modules = dict(model.named_modules())
        persistent = set(model.state_dict(keep_vars=True))
        params = first_names(model.named_parameters(remove_duplicate=False))
        buffers = first_names(model.named_buffers(remove_duplicate=False))
        run_again = {module_of(unit) for unit in spec.units if unit not in spec.overwritten}
        inside_one: set[str] = set()  # units that are run again in backward
        # The forward may write to frozen parameters before it enters their unit.
        users: dict[str, set[int]] = {
            name: {0} for name, _ in model.named_parameters() if name in spec.written
        }
        for name in units(model):
            # A unit that never runs may hold weights that the forward reads, as in DeBERTa.
            shard = shard_of.get(name, 0)
            if name not in shard_of:
                shards[0].append(f"{name}@0")
            for first, inside in (
                (params, modules[name].named_parameters(name)),
                (buffers, modules[name].named_buffers(name)),
            ):
                for full_name, _ in inside:
                    users.setdefault(first[full_name], set()).add(shard)
                    if name in run_again:
                        inside_one.add(first[full_name])
        return cls(
            spec,
            tuple(map(tuple, shards)),
            tuple(
                _info(
                    name,
                    p,
                    min(users.get(name, {0})),
                    not p.requires_grad and name not in spec.written,
                )
                for name, p in model.named_parameters()
            ),
            tuple(
                _info(name, b, min(users.get(name, {0})), name not in spec.written)
                for name, b in model.named_buffers()
                # The factory makes a buffer again that nobody writes to and no checkpoint holds.
                if name in spec.written or name in persistent
            ),
            {
                name: tuple(sorted(users[name]))
                for name, p in model.named_parameters()
                if p.requires_grad and len(users.get(name, ())) > 1
            },
            frozenset(
                name
                for name, _ in model.named_parameters()
                if name not in inside_one or name in spec.written or len(users[name]) > 1
            ),
        )

    def eager(self, model: nn.Module) -> CutModel:
        """Return the same shards, run by the model's own forward in place of graphs."""
        if self.graphs is None:
            return self
        # A module that is called in several shards belongs to the first of them.
        units = tuple(tuple(u for u in each if u.endswith("@0")) for each in self.units)
        written = tuple(buffer.name for buffer in self.buffers if not buffer.frozen)
        in_order, overwritten = tuple(itertools.chain(*units)), self.spec.overwritten
        spec = CutSpec("modules", self.spec.at, in_order, overwritten, written)
        shared = self.shared | CutModel.by_modules(model, spec).shared
        return replace(self, spec=spec, units=units, shared=shared, graphs=None)

    @classmethod
    def by_graph(cls, model: nn.Module, spec: CutSpec, traced: Sequence[TracedModel]) -> CutModel:
        """Cut a model that was traced before, for each of the spec's numbers of rows, if any.

        Raises:
            CutFailed: the spec names a place where the model can't be cut.
        """
        first, *others = (cls._by_one_graph(model, spec, each) for each in traced)
        for other in others:
            if (other.params, other.buffers, other.tied) != (
                first.params, first.buffers, first.tied,
            ):  # fmt: skip
                raise CutFailed("its graphs for several numbers of rows use other weights")
        graphs = [each.graphs for each in (first, *others) if each.graphs is not None]
        of_rows = dict(zip(spec.rows, graphs, strict=bool(spec.rows)))
        return replace(first, graphs=replace(graphs[0], of_rows=of_rows))

    @classmethod
    def _by_one_graph(cls, model: nn.Module, spec: CutSpec, traced: TracedModel) -> CutModel:
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

        owner: dict[str, int] = {}
        for shard, graphs in enumerate(zip(train, evaluation, strict=True)):
            for graph in graphs:
                for name in (*graph.params, *graph.buffers):
                    owner.setdefault(name, shard)
        persistent = set(model.state_dict(keep_vars=True))
        written = set(spec.written).union(*(graph.mutates for graph in train))
        params = tuple(
            _info(name, p, owner.get(name, 0), not p.requires_grad)
            for name, p in model.named_parameters()
        )
        buffers = tuple(
            _info(name, b, owner.get(name, 0), name not in written)
            for name, b in model.named_buffers()
            if name in owner or name in persistent
        )
        tied: dict[str, tuple[int, ...]] = {}
        for info in params:
            users = {k for k, graph in enumerate(train) if info.name in graph.params}
            users.add(info.owner)
            if len(users) > 1 and not info.frozen:
                tied[info.name] = tuple(sorted(users))
        shared = {
            name
            for k, graphs in enumerate(zip(train, evaluation, strict=True))
            for graph in graphs
            for name in graph.params
            if owner[name] != k
        }
        graph_cut = GraphCut(train, evaluation, outputs, (traced.train.guards, traced.eval.guards))
        units_of = tuple(g.units for g in train)
        return cls(spec, units_of, params, buffers, tied, frozenset(shared), graph_cut)


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
    """Exports, measures and cuts once for models of equal structure.

    A model is not shared if it holds anything whose equality can't be told. Models that did not
    come for long are exported anew. The cache is not thread-safe.

    Args:
        device: where the cut models compute; models are cut on the CPU.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._cut_models = Recent[Hashable, CutModel](MOST_GRAPHS)
        self._traces = Recent[Hashable, TracedModel | CutFailed](MOST_GRAPHS)
        self._times = Recent[Hashable, list[float]](MOST_TIMES)

    def get(self, model: nn.Module, spec: CutSpec, sample: Sample) -> CutModel:
        """Return the cut model, built at the first call; see `CutModel.build`."""

        def build() -> CutModel:
            if spec.mode == "export":
                rows = spec.rows or (None,)
                traced = [self.trace(model, sample, each) for each in rows]
                return CutModel.by_graph(model, spec, traced).on(self._device)
            return CutModel.build(model, spec, sample)

        return _once(self._cut_models, model_key(model, sample), spec, build)

    def trace(self, model: nn.Module, sample: Sample, rows: int | None = None) -> TracedModel:
        """Return the graphs of a model, exported at the first call; see `trace.trace`."""

        def attempt() -> TracedModel | CutFailed:
            try:
                return trace(model, sample, rows)
            except CutFailed as error:
                return error

        traced = _once(self._traces, model_key(model, sample), rows, attempt)
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
    made: Recent[Hashable, T],
    key: Hashable | None,
    spec: CutSpec | int | None,
    make: Callable[[], T],
) -> T:
    """Return what was made for this key and spec or rows before, or make it; None is no key."""
    return make() if key is None else made.get((key, spec), make)


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Drops the values that were longest unused, but never the latest one. Not thread-safe.

    Args:
        most: how many values are kept.
        most_bytes: how many bytes they may have together.
        nbytes: returns the bytes of a value.
    """

    def __init__(
        self, most: int, most_bytes: int = 0, nbytes: Callable[[V], int] = lambda value: 0
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._nbytes = nbytes
        self._values: OrderedDict[K, V] = OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        """Return how many values are kept."""
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        """Return whether the value of a key is kept."""
        return key in self._values

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key; make it unless it is kept."""
        if key not in self._values:
            self.put(key, make())
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: K, value: V) -> None:
        """Keep a value in place of an older one of its key."""
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self) > 1 and (len(self) > self._most or self._total() > self._most_bytes):
            self._values.popitem(last=False)

    def drop(self, key: K) -> None:
        """Drop the value of a key, if it is kept."""
        self._values.pop(key, None)

    def _total(self) -> int:
        return sum(map(self._nbytes, self._values.values()))
