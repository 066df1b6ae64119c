"""A model as two flat graphs, for training and for evaluation, and where they may be cut.

`torch.export` runs the model once per mode; unit hooks leave markers in the graph. A cut lies
directly before a marker, and nowhere that an in-place operation reaches across.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from cerebro_hydra.shards.guards import Guards, length_held_fixed
from cerebro_hydra.shards.reseed import FORWARD, MARKER, unit_hooks
from cerebro_hydra.shards.sample import Sample

RANDOM = torch.Tag.nondeterministic_seeded
_DROPPED = {torch.ops.aten._assert_tensor_metadata.default}


class CutFailed(Exception):
    """A model can't be cut this way; the reason goes into the report."""


@dataclass(frozen=True)
class FlatGraph:
    """One exported graph: placeholders are parameters, buffers, constants, then inputs."""

    graph: fx.Graph
    params: dict[fx.Node, str]
    buffers: dict[fx.Node, str]
    constants: dict[fx.Node, Tensor]
    inputs: dict[fx.Node, int]
    out_spec: Any
    guards: Guards
    markers: dict[str, fx.Node]
    recomputed: frozenset[fx.Node]  # made from inputs and constants alone, never shipped
    mutated_buffers: frozenset[str]
    illegal: frozenset[str]  # markers at which a cut would part an in-place operation


@dataclass(frozen=True)
class Trace:
    """The graphs of a model, and the unit calls at which both may be cut, in order."""

    train: FlatGraph
    eval: FlatGraph
    legal: tuple[str, ...]
    worthwhile: tuple[str, ...]  # those of them that leave no shard without parameters


def trace(model: nn.Module, sample: Sample) -> Trace:
    """Export a copy of the model in both modes.

    Args:
        sample: one batch; other numbers of rows run on the same graph, and other shapes that meet
            its guards if the sample says that they may come.

    Raises:
        CutFailed: the model can't be exported, or does in its forward what no cut can keep.
    """
    twin = copy.deepcopy(model)
    train = _flatten(twin, sample, train=True)
    evaluation = _flatten(twin, sample, train=False)
    legal = _legal_cuts(train, evaluation)
    return Trace(train, evaluation, legal, _worthwhile(train, legal))


def _flatten(model: nn.Module, sample: Sample, train: bool) -> FlatGraph:
    model.train(train)
    # Of a view, torch.export would take the shape of its base for a condition too.
    inputs = tuple(x.clone() for x in sample.inputs)
    if all(x.dim() and x.shape[0] == 1 for x in inputs):
        inputs = tuple(torch.cat([x, x]) for x in inputs)  # one row would be taken for fixed
    args, kwargs = sample.call.arguments(inputs)
    shapes: Any = [_free(x, sample.free_shapes) for x in inputs]
    if kwargs:
        names = [*inspect.signature(model.forward).parameters]
        given = sample.call.names or names[: len(args)]
        shapes = dict.fromkeys(kwargs) | dict(zip(given, shapes, strict=False))
    elif _takes_varargs(model):
        shapes = (tuple(shapes),)
    try:
        with unit_hooks(model, MARKER), torch.set_grad_enabled(train), sample.precision():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise CutFailed(
            f"torch.export failed ({type(error).__name__}: {lines[0] if lines else ''})"
        ) from error
    guards = Guards.of(model, sample.call, program)
    if sample.free_shapes and (size := length_held_fixed(model, sample, guards)) is not None:
        raise CutFailed(
            f"its graph holds for batches of length {size} alone, and collate may give others"
        )
    return _read(model, program, guards)


def _free(tensor: Tensor, in_all: bool) -> dict[int, Any]:
    """Which dimensions may differ in other batches: rows, or as many as the model lets."""
    return {dim: Dim.AUTO for dim in range(tensor.dim()) if dim == 0 or in_all}


def _takes_varargs(model: nn.Module) -> bool:
    code = getattr(type(model).forward, "__code__", None)
    return code is not None and code.co_argcount == 1 and bool(code.co_flags & 0x04)


def _read(model: nn.Module, program: ExportedProgram, guards: Guards) -> FlatGraph:
    first_name = _first_names(model.named_parameters(remove_duplicate=False))
    first_name |= _first_names(model.named_buffers(remove_duplicate=False))
    persistent = set(model.state_dict(keep_vars=True))
    graph = program.graph_module.graph
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    params: dict[fx.Node, str] = {}
    buffers: dict[fx.Node, str] = {}
    constants: dict[fx.Node, Tensor] = {}
    inputs: dict[fx.Node, int] = {}
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.PARAMETER:
            params[node] = first_name[str(spec.target)]
        elif spec.kind is InputKind.BUFFER:
            buffers[node] = first_name[str(spec.target)]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[node] = program.constants[str(spec.target)]
        elif spec.kind is InputKind.USER_INPUT:
            inputs[node] = len(inputs)
        else:
            raise CutFailed(f"its graph takes a {spec.kind.name.lower()} ({spec.target})")
    for out in program.graph_signature.output_specs:
        if out.kind is not OutputKind.USER_OUTPUT:
            raise CutFailed(
                f"its forward replaces {out.target!r} by a new tensor instead of writing into it"
            )
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _DROPPED and not node.users:
            graph.erase_node(node)
        elif node.op not in ("placeholder", "call_function", "output"):
            raise CutFailed(f"its graph has a nested region ({node.target})")

    groups = _AliasGroups(graph)
    for node, name in params.items():
        if groups.is_mutated(node):
            raise CutFailed(f"its forward writes into parameter {name!r}")
    for node in (*inputs, *constants):
        if groups.is_mutated(node):
            raise CutFailed(f"its forward writes into its own input or constant ({node.name})")
    mutated = frozenset(name for node, name in buffers.items() if groups.is_mutated(node))
    # A buffer that nobody writes and that no checkpoint holds is made again by the factory.
    tensors = dict(model.named_buffers())
    for node, name in list(buffers.items()):
        if name not in mutated and name not in persistent:
            constants[node] = tensors[name].detach().clone()
            del buffers[node]
    markers = {n.args[0]: n for n in graph.nodes if n.target is MARKER and n.args[0] != FORWARD}
    return FlatGraph(
        graph, params, buffers, constants, inputs, program.call_spec.out_spec, guards, markers,
        _recomputed(graph, groups, set(inputs) | set(constants), buffers, mutated),
        mutated, frozenset(u for u, n in markers.items() if groups.reaches_across(n)),
    )  # fmt: skip


def _first_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Every name of a tensor, tied ones included, to the first name it has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


class _AliasGroups:
    """Which values may share memory, and where each group is written to."""

    def __init__(self, graph: fx.Graph) -> None:
        self._leader: dict[fx.Node, fx.Node] = {}
        self._position = {node: i for i, node in enumerate(graph.nodes)}
        writes: list[tuple[fx.Node, fx.Node]] = []
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            for other, aliases, written in _memory_use(node):
                if aliases:
                    self._join(node, other)
                if written:
                    writes.append((node, other))
        self._writes: dict[fx.Node, list[int]] = {}
        for node, target in writes:
            self._writes.setdefault(self._find(target), []).append(self._position[node])
        self._touched: dict[fx.Node, list[int]] = {}
        for node in graph.nodes:
            for member in (node, *node.all_input_nodes):
                leader = self._find(member)
                if leader in self._writes and (member is not node or node.op == "call_function"):
                    self._touched.setdefault(leader, []).append(self._position[node])

    def is_mutated(self, node: fx.Node) -> bool:
        return self._find(node) in self._writes

    def reaches_across(self, marker: fx.Node) -> bool:
        """Whether a group is touched before the marker and written after it, or for a buffer,
        used on both sides of it at all: its new value would have to travel."""
        at = self._position[marker]
        return any(
            min(touched) < at < max(touched)
            and (max(self._writes[leader]) > at or leader.op == "placeholder")
            for leader, touched in self._touched.items()
        )

    def _find(self, node: fx.Node) -> fx.Node:
        while (up := self._leader.get(node, node)) is not node:
            node = up
        return node

    def _join(self, a: fx.Node, b: fx.Node) -> None:
        a, b = self._find(a), self._find(b)
        if self._position[a] < self._position[b]:
            a, b = b, a
        self._leader[a] = b  # the earliest leads: a placeholder leads its group


def _memory_use(node: fx.Node) -> list[tuple[fx.Node, bool, bool]]:
    """Inputs of a node: whether its outputs may share their memory, whether it writes to them."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [(n, node.target is operator.getitem, False) for n in node.all_input_nodes]
    statistics = {a.name for a in schema.arguments} & {"running_mean", "running_var"}
    if torch.Tag.maybe_aliasing_or_mutating in getattr(node.target, "tags", ()) and not statistics:
        # Dropout gives its input back at p = 0.
        return [(n, True, False) for n in node.all_input_nodes]
    returned = {s for r in schema.returns if r.alias_info for s in r.alias_info.before_set}
    uses = []
    for i, argument in enumerate(schema.arguments):
        info = argument.alias_info
        aliases = info is not None and bool(
            returned & set(info.before_set) or "*" in info.after_set
        )
        written = info is not None and info.is_write
        # batch_norm writes its running statistics without saying so in its schema.
        written |= argument.name in statistics and _is_training(node)
        if aliases or written:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            values = value if isinstance(value, list | tuple) else [value]
            uses += [(v, aliases, written) for v in values if isinstance(v, fx.Node)]
    return uses


def _is_training(node: fx.Node) -> bool:
    schema = node.target._schema  # type: ignore[union-attr]
    for i, argument in enumerate(schema.arguments):
        if argument.name in ("training", "train", "use_input_stats"):
            return bool(node.args[i] if i < len(node.args) else node.kwargs.get(argument.name))
    return True


def _recomputed(
    graph: fx.Graph, groups: _AliasGroups, free: set[fx.Node],
    buffers: dict[fx.Node, str], mutated: frozenset[str],
) -> frozenset[fx.Node]:  # fmt: skip
    sources = free | {node for node, name in buffers.items() if name not in mutated}
    found = set(sources)
    for node in graph.nodes:
        if node.op != "call_function" or node.target is MARKER or groups.is_mutated(node):
            continue
        tags = getattr(node.target, "tags", ())
        schema = getattr(node.target, "_schema", None)
        if RANDOM in tags or (schema is not None and schema.is_mutable):
            continue
        if all(n in found for n in node.all_input_nodes):
            found.add(node)
    return frozenset(found - sources)


def _legal_cuts(train: FlatGraph, evaluation: FlatGraph) -> tuple[str, ...]:
    """Markers in both graphs, in one order, that part no in-place operation, after real work."""
    place = {unit: i for i, unit in enumerate(evaluation.markers)}
    legal: list[str] = []
    last = -1
    working = False
    for node in train.graph.nodes:
        if node.op != "call_function" or node in train.recomputed:
            continue
        if node.target is not MARKER:
            working = True
            continue
        unit = node.args[0]
        if unit in train.illegal | evaluation.illegal or place.get(unit, -1) <= last:
            continue
        if working:
            legal.append(unit)
            last = place[unit]
            working = False
    if legal and not working:
        legal.pop()
    return tuple(legal)


def _worthwhile(flat: FlatGraph, legal: tuple[str, ...]) -> tuple[str, ...]:
    """The cuts between which parameters are used."""
    chosen: list[str] = []
    pending: str | None = None
    has_params = False
    for node in flat.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is MARKER and node.args[0] in legal and has_params:
            pending = node.args[0]
        if any(n in flat.params for n in node.all_input_nodes):
            if pending is not None:
                chosen.append(pending)
                pending = None
            has_params = True
    return tuple(chosen)
