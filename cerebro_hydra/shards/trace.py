"""A model as two flat graphs, for training and for evaluation, and where they may be cut.

`torch.export` runs the model once per mode; unit hooks leave markers in the graph. A cut lies
directly before a marker, and nowhere that an in-place operation reaches across.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from cerebro_hydra.recipe.randomness import FORWARD, unit_hooks
from cerebro_hydra.shards.aliases import AliasGroups
from cerebro_hydra.shards.guards import Guards, length_held_fixed
from cerebro_hydra.shards.reseed import MARKER
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
    written_with: dict[fx.Node, tuple[fx.Node, ...]]  # what belongs to one of them made in place
    mutated_buffers: frozenset[str]
    illegal: frozenset[str]  # markers at which a cut would part an in-place operation


@dataclass(frozen=True)
class TracedModel:
    """The graphs of a model, and the unit calls at which both may be cut, in order."""

    train: FlatGraph
    eval: FlatGraph
    legal: tuple[str, ...]
    worthwhile: tuple[str, ...]  # those of them that leave no shard without parameters


def trace(model: nn.Module, sample: Sample) -> TracedModel:
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
    return TracedModel(train, evaluation, legal, _worthwhile(train, legal))


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

    groups = AliasGroups(graph)
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
    recomputed = _recomputed(graph, groups, set(inputs) | set(constants), buffers, mutated)
    written = {n: tuple(groups.written_with(n)) for n in recomputed if groups.is_mutated(n)}
    return FlatGraph(
        graph, params, buffers, constants, inputs, program.call_spec.out_spec, guards, markers,
        recomputed, written, mutated,
        frozenset(u for u, n in markers.items() if groups.reaches_across(n, recomputed)),
    )  # fmt: skip


def _first_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Every name of a tensor, tied ones included, to the first name it has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _recomputed(
    graph: fx.Graph, groups: AliasGroups, free: set[fx.Node],
    buffers: dict[fx.Node, str], mutated: frozenset[str],
) -> frozenset[fx.Node]:  # fmt: skip
    sources = free | {node for node, name in buffers.items() if name not in mutated}
    spoiled: set[fx.Node] = set()
    while True:
        found = set(sources)
        for node in graph.nodes:
            if node.op != "call_function" or node.target is MARKER or node in spoiled:
                continue
            if RANDOM in getattr(node.target, "tags", ()):
                continue
            if all(n in found for n in node.all_input_nodes):
                found.add(node)
        made = found - sources
        # What is written in place is made again whole, or not at all.
        partly = {
            n for n in made if groups.is_mutated(n) and not made.issuperset(groups.written_with(n))
        }
        if not partly:
            return frozenset(made)
        spoiled |= partly


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
