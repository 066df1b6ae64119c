"""Traces a model into flat graphs for training and evaluation, and finds where to cut them.

`torch.export` runs the model once per mode, and unit hooks leave markers in the graph. A cut lies
directly before a marker, but nowhere that it would part an in-place operation.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from cerebro_hydra.recipe.randomness import FORWARD, unit_hooks
from cerebro_hydra.shards.aliases import AliasGroups
from cerebro_hydra.shards.attribute_values import AttributeValues
from cerebro_hydra.shards.backward_watch import BackwardWatch
from cerebro_hydra.shards.constant_values import ConstantValues
from cerebro_hydra.shards.export_program import ExportFailed, export_program
from cerebro_hydra.shards.guards import Guards, length_held_fixed
from cerebro_hydra.shards.parameter_values import ParameterValues
from cerebro_hydra.shards.regions import inline_regions
from cerebro_hydra.shards.reseed import MARKER
from cerebro_hydra.shards.sample import Sample

RANDOM = torch.Tag.nondeterministic_seeded
_DROPPED = {torch.ops.aten._assert_tensor_metadata.default}
_COPY = torch.ops.aten.copy_.default


class CutFailed(Exception):
    """A model can't be cut in this way; the reason goes into the report."""


@dataclass(frozen=True)
class FlatGraph:
    """Holds an exported graph, whose placeholders are parameters, buffers, constants and inputs."""

    graph: fx.Graph
    params: dict[fx.Node, str]
    buffers: dict[fx.Node, str]
    constants: dict[fx.Node, Tensor]
    inputs: dict[fx.Node, int]
    out_spec: Any
    guards: Guards
    markers: dict[str, fx.Node]
    recomputed: frozenset[fx.Node]  # made from inputs and constants alone, so never sent
    in_place_nodes: dict[fx.Node, tuple[fx.Node, ...]]  # for each recomputed node that is mutated
    mutated_buffers: frozenset[str]
    uncuttable: frozenset[str]  # unit calls at which a cut would part an in-place operation


@dataclass(frozen=True)
class TracedModel:
    """Holds the graphs of a model, and the unit calls at which both may be cut, in order."""

    train: FlatGraph
    eval: FlatGraph
    cut_points: tuple[str, ...]
    cut_points_with_params: tuple[str, ...]  # those that leave no shard without parameters

    @property
    def any_rows(self) -> bool:
        """Return whether the graphs hold for every number of rows, not for the sample's alone."""
        return not (self.train.guards.fixes_rows or self.eval.guards.fixes_rows)


def trace(model: nn.Module, sample: Sample, rows: int | None = None) -> TracedModel:
    """Export the model in both modes, which leaves it as it was.

    Args:
        sample: one batch. Other shapes that meet the graph's guards run on it too if the sample
            has dynamic shapes.
        rows: the one number of rows that runs on the graph. Without it all do, if the model allows
            that.

    Raises:
        CutFailed: the model can't be exported, or its forward does something that no cut keeps.
    """
    if rows is not None:
        sample = sample.of_rows(rows)
    with ParameterValues.initial(model).in_use(), AttributeValues(model).in_use():
        train = _flatten(model, sample, rows is None, train=True)
        evaluation = _flatten(model, sample, rows is None, train=False)
    points = _cut_points(train, evaluation)
    return TracedModel(train, evaluation, points, _with_params_between(train, points))


def _flatten(model: nn.Module, sample: Sample, any_rows: bool, train: bool) -> FlatGraph:
    model.train(train)
    # The input is a clone, because torch.export would also demand the shape of a view's base.
    inputs = tuple(x.clone() for x in sample.inputs)
    if any_rows and all(x.dim() and x.shape[0] == 1 for x in inputs):
        inputs = tuple(torch.cat([x, x]) for x in inputs)  # torch.export would fix one row
    args, kwargs = sample.call.arguments(inputs)
    shapes: Any = [dynamic_dims(x, sample.dynamic_shapes, any_rows) for x in inputs]
    if kwargs:
        parameters = [*inspect.signature(model.forward).parameters]
        names = sample.call.names or parameters[: len(args)]
        shapes = dict.fromkeys(kwargs) | dict(zip(names, shapes, strict=False))
    elif _takes_varargs(model):
        shapes = (tuple(shapes),)
    try:
        with (
            unit_hooks(model, MARKER),
            BackwardWatch(model) as watch,
            torch.set_grad_enabled(train),
            sample.precision(),
        ):
            program = export_program(model, args, kwargs, shapes, ConstantValues)
    except ExportFailed as error:
        raise CutFailed(f"torch.export failed ({error})") from error
    if watch.found is not None:
        raise CutFailed(f"its graph does not hold {watch.found}")
    guards = Guards.of(model, sample.call, program)
    if sample.dynamic_shapes and (size := length_held_fixed(model, sample, guards)) is not None:
        raise CutFailed(
            f"its graph holds for batches of length {size} alone, and collate may give others"
        )
    return _read(model, program, guards)


def dynamic_dims(tensor: Tensor, all_dims: bool, any_rows: bool = True) -> dict[int, Any]:
    """Return the dimensions that may differ between batches, as `torch.export` takes them.

    Args:
        all_dims: whether all dimensions but the rows may differ, as far as the model allows.
        any_rows: whether the rows may.
    """
    return {dim: Dim.AUTO for dim in range(tensor.dim()) if (all_dims if dim else any_rows)}


def _takes_varargs(model: nn.Module) -> bool:
    first = next(iter(inspect.signature(model.forward).parameters.values()), None)
    return first is not None and first.kind is inspect.Parameter.VAR_POSITIONAL


def _read(model: nn.Module, program: ExportedProgram, guards: Guards) -> FlatGraph:
    first_name = first_names(model.named_parameters(remove_duplicate=False))
    first_name |= first_names(model.named_buffers(remove_duplicate=False))
    persistent = set(model.state_dict(keep_vars=True))
    inline_regions(program.graph_module)
    graph = program.graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    params: dict[fx.Node, str] = {}
    buffers: dict[fx.Node, str] = {}
    constants: dict[fx.Node, Tensor] = {}
    inputs: dict[fx.Node, int] = {}
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
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
        elif node.target is _COPY and _overwritten(node.args[1]) is node.args[0]:
            # Python assigns to a module's buffer what it has written into it before.
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
        elif node.op not in ("placeholder", "call_function", "output"):
            raise CutFailed(f"its graph has a nested graph ({node.target}), as of torch.cond")

    groups = AliasGroups(graph)
    for node, name in params.items():
        if groups.is_mutated(node):
            raise CutFailed(f"its forward writes into parameter {name!r}")
    for node in (*inputs, *constants):
        if groups.is_mutated(node):
            raise CutFailed(f"its forward writes into its own input or constant ({node.name})")
    mutated = frozenset(name for node, name in buffers.items() if groups.is_mutated(node))
    # The factory makes a buffer again that nobody writes to and that no checkpoint holds.
    tensors = dict(model.named_buffers())
    for node, name in list(buffers.items()):
        if name not in mutated and name not in persistent:
            constants[node] = tensors[name].detach().clone()
            del buffers[node]
    markers = {n.args[0]: n for n in graph.nodes if n.target is MARKER and n.args[0] != FORWARD}
    recomputed = _recomputed(graph, groups, set(inputs) | set(constants), buffers, mutated)
    written = {n: tuple(groups.in_place_nodes(n)) for n in recomputed if groups.is_mutated(n)}
    return FlatGraph(
        graph, params, buffers, constants, inputs, program.call_spec.out_spec, guards, markers,
        recomputed, written, mutated,
        frozenset(u for u, n in markers.items() if groups.blocks_cut(n, recomputed)),
    )  # fmt: skip


def _overwritten(node: fx.Node) -> fx.Node:
    """Return the tensor that operations in place have made into this one."""
    while isinstance(node.target, OpOverload) and node.target._schema.arguments:
        first, info = node.args[0], node.target._schema.arguments[0].alias_info
        if info is None or not info.is_write or not isinstance(first, fx.Node):
            break
        node = first
    return node


def first_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the first name of every tensor by each of its names; a tied tensor has several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _recomputed(
    graph: fx.Graph, groups: AliasGroups, inputs_and_constants: set[fx.Node],
    buffers: dict[fx.Node, str], mutated: frozenset[str],
) -> frozenset[fx.Node]:  # fmt: skip
    """Return the nodes that every shard can make from inputs, constants and unmutated buffers."""
    sources = inputs_and_constants | {n for n, name in buffers.items() if name not in mutated}
    excluded: set[fx.Node] = set()
    while True:
        found = set(sources)
        for node in graph.nodes:
            if node.op != "call_function" or node.target is MARKER or node in excluded:
                continue
            if RANDOM in getattr(node.target, "tags", ()):
                continue
            if all(n in found for n in node.all_input_nodes):
                found.add(node)
        made = found - sources
        # A value that is written in place is recomputed with all its writes, or not at all.
        partly = {
            n
            for n in made
            if groups.is_mutated(n) and not made.issuperset(groups.in_place_nodes(n))
        }
        if not partly:
            return frozenset(made)
        excluded |= partly


def _cut_points(train: FlatGraph, evaluation: FlatGraph) -> tuple[str, ...]:
    """Return the unit calls at which both graphs may be cut.

    They come in the same order in both graphs, part no in-place operation, and have operations on
    both sides.
    """
    place = {unit: i for i, unit in enumerate(evaluation.markers)}
    points: list[str] = []
    last = -1
    working = False  # whether an operation has come since the last point
    for node in train.graph.nodes:
        if node.op != "call_function" or node in train.recomputed:
            continue
        if node.target is not MARKER:
            working = True
            continue
        unit = node.args[0]
        if unit in train.uncuttable | evaluation.uncuttable or place.get(unit, -1) <= last:
            continue
        if working:
            points.append(unit)
            last = place[unit]
            working = False
    if points and not working:
        points.pop()
    return tuple(points)


def _with_params_between(flat: FlatGraph, points: tuple[str, ...]) -> tuple[str, ...]:
    """Return the cut points between which parameters are used."""
    chosen: list[str] = []
    pending: str | None = None
    has_params = False
    for node in flat.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is MARKER and node.args[0] in points and has_params:
            pending = node.args[0]
        if any(n in flat.params for n in node.all_input_nodes):
            if pending is not None:
                chosen.append(pending)
                pending = None
            has_params = True
    return tuple(chosen)
