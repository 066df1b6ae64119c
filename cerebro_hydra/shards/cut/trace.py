"""Traces a model into flat graphs for training and evaluation, and finds where to cut them.

`torch.export` runs the model once per mode, and unit hooks leave markers in the graph. A cut lies
directly before a marker, but nowhere that it would part an in-place operation.

Which values share memory, what changes the backward without being in the graph, and which values
are constants is found on the way.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from cerebro_hydra.foreign_text import error_text
from cerebro_hydra.recipe.randomness import FORWARD, unit_hooks
from cerebro_hydra.shards.cut.export import ExportFailed, Guards, export_program, length_held_fixed
from cerebro_hydra.shards.cut.regions import inline_regions
from cerebro_hydra.shards.cut.reseed import MARKER
from cerebro_hydra.shards.cut.sample import Sample
from cerebro_hydra.shards.cut.values import AttributeValues, ParameterValues

RANDOM = torch.Tag.nondeterministic_seeded
_DROPPED = {torch.ops.aten._assert_tensor_metadata.default}
_COPY = torch.ops.aten.copy_.default

_MODULE_HOOK = "BackwardHookFunctionBackward"

_FACTORIES = {
    torch.arange, torch.as_tensor, torch.eye, torch.full, torch.linspace, torch.logspace,
    torch.ones, torch.tensor, torch.tril_indices, torch.triu_indices, torch.zeros,
}  # fmt: skip
_READS = {
    Tensor.__bool__, Tensor.__float__, Tensor.__index__, Tensor.__int__, Tensor.item, Tensor.tolist,
    torch.equal, torch.is_nonzero,
}  # fmt: skip
_REPEATS = {Tensor.expand, torch.broadcast_to}
"""Functions that repeat the same values as often as a size says."""

_UNKNOWN: Any = object()


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
        # Evaluation only reads what training has written to.
        evaluation = _flatten(model, sample, rows is None, False, train.mutated_buffers)
    points = _cut_points(train, evaluation)
    return TracedModel(train, evaluation, points, _with_params_between(train, points))


def _flatten(
    model: nn.Module,
    sample: Sample,
    any_rows: bool,
    train: bool,
    written_in_training: frozenset[str] = frozenset(),
) -> FlatGraph:
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
        shapes = dict(zip(names, shapes, strict=False))
        shapes |= {name: None for name in kwargs if name not in shapes}
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
        raise CutFailed(f"torch.export failed ({error_text(error)})") from error
    if watch.found is not None:
        raise CutFailed(f"its graph does not hold {watch.found}")
    guards = Guards.of(model, sample.call, program)
    if sample.dynamic_shapes and (size := length_held_fixed(model, sample, guards)) is not None:
        raise CutFailed(
            f"its graph holds for batches of length {size} alone, and collate may give others"
        )
    return _read(model, program, guards, written_in_training)


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


def _read(
    model: nn.Module, program: ExportedProgram, guards: Guards, written_in_training: frozenset[str]
) -> FlatGraph:
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
        if name not in mutated | written_in_training and name not in persistent:
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


class AliasGroups:
    """Holds the groups of values that may share memory, and where each group is written to."""

    def __init__(self, graph: fx.Graph) -> None:
        self._leader: dict[fx.Node, fx.Node] = {}
        self._nodes = list(graph.nodes)
        self._position = {node: i for i, node in enumerate(self._nodes)}
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
        """Return whether an operation writes to the node's memory."""
        return self._find(node) in self._writes

    def in_place_nodes(self, node: fx.Node) -> list[fx.Node]:
        """Return all nodes that touch a mutated node's memory up to its last write, in order."""
        leader = self._find(node)
        last = max(self._writes[leader])
        return [self._nodes[i] for i in self._touched[leader] if i <= last]

    def blocks_cut(self, marker: fx.Node, recomputed: Set[fx.Node]) -> bool:
        """Return whether a cut at the marker would part a write from other uses of its memory.

        That is so for a group that is touched before the marker and written after it. It is also
        so for a buffer that is written and used on both sides, because its new value would have to
        travel. Groups that every shard recomputes don't count.
        """
        at = self._position[marker]
        return any(
            min(touched) < at < max(touched)
            and (max(self._writes[leader]) > at or leader.op == "placeholder")
            and leader not in recomputed
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
        self._leader[a] = b  # the earliest node leads, so a placeholder leads its group


def _memory_use(node: fx.Node) -> list[tuple[fx.Node, bool, bool]]:
    """Return (input, whether outputs may share its memory, whether it is written) per input."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [(n, node.target is operator.getitem, False) for n in node.all_input_nodes]
    statistics = {a.name for a in schema.arguments} & {"running_mean", "running_var"}
    if torch.Tag.maybe_aliasing_or_mutating in getattr(node.target, "tags", ()) and not statistics:
        # Dropout returns its own input at p = 0.
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


class BackwardWatch(TorchFunctionMode):
    """Notes, while it is entered, the first hook or own backward that a model's forward has.

    Attributes:
        found: what it was, in words, or None.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.found: str | None = None

    def __enter__(self) -> BackwardWatch:
        self._handle = self._model.register_forward_hook(self._look_at)
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._handle.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            self.found = self.found or f"a hook on a tensor (Tensor.{func.__name__})"
        return func(*args, **(kwargs or {}))

    def _look_at(self, module: nn.Module, args: Any, outputs: Any) -> None:
        for node in _autograd_nodes(outputs):
            if isinstance(node, BackwardCFunction):
                name = type(node).__name__
                self.found = self.found or (
                    "a backward hook on a module (register_full_backward_hook)"
                    if name == _MODULE_HOOK
                    else f"the backward of torch.autograd.Function {name.removesuffix('Backward')}"
                )


def _autograd_nodes(outputs: Any) -> Iterator[Any]:
    pending = [leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]


class ConstantValues(TorchFunctionMode):
    """Computes what a traced forward makes of constants alone, and gives values where it asks.

    A constant is a tensor that the forward makes of numbers, or an attribute that is no parameter
    and no buffer. The operations are traced too; only the question for a value is not. Constants
    may be repeated as often as a size says that differs between batches, such as the number of
    rows. What is made of them is known as long as it is the same for the sample's size and for one
    more, or repeats the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known = (_Known(0), _Known(1))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = {id(each): each._version for each in _tensors((args, kwargs))}
        found = [known.evaluated(func, args, kwargs) for known in self._known]
        agree = not any(each is _UNKNOWN for each in found) and _agree(*found)
        if agree and func in _READS:
            return found[0]
        results = func(*args, **kwargs)
        if agree:
            for known, values in zip(self._known, found, strict=True):
                known.note(results, values, _tensors((args, kwargs)), before)
        return results


class _Known:
    """Holds the values of constants where each size that differs between batches is one number.

    It is the sample's, and so many more.
    """

    def __init__(self, more: int) -> None:
        self._more = more
        self._values: Any = WeakTensorKeyDictionary()

    def note(
        self, results: Any, values: Any, given: list[Tensor], before: Mapping[int, int]
    ) -> None:
        """Keep the values of results, and of what was written to.

        Args:
            before: the version that each given tensor had.
        """
        for written in given:
            if written in self._values and written._version != before[id(written)]:
                self._follow(written, before[id(written)])
        for tensor, value in zip(_tensors(results), _tensors(values), strict=True):
            if type(tensor) is not Tensor:
                self._values[tensor] = (value, tensor._version)

    def _follow(self, written: Tensor, before: int) -> None:
        """Go on knowing all tensors that share the memory of one which was written to."""
        memory = self._values[written][0].untyped_storage().data_ptr()
        for tensor, (value, version) in list(self._values.items()):
            if version == before and value.untyped_storage().data_ptr() == memory:
                self._values[tensor] = (value, written._version)

    def evaluated(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what a function gives for constants, unless it takes or draws anything else."""
        given = tree_leaves((args, kwargs))
        tensors = _tensors(given)
        if not tensors and func not in _FACTORIES:
            return _UNKNOWN
        if func in _REPEATS:
            args, kwargs = tree_map_only(torch.SymInt, self._size, (args, kwargs))
            given = tree_leaves((args, kwargs))
        if any(isinstance(each, torch.SymInt | torch.SymFloat | torch.SymBool) for each in given):
            return _UNKNOWN
        if any(self._value(each) is None for each in tensors):
            return _UNKNOWN
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            args, kwargs = tree_map_only(Tensor, self._value, (args, kwargs))
            before = torch.get_rng_state()
            try:
                values = func(*args, **kwargs)
            except Exception:
                return _UNKNOWN
            if not torch.equal(torch.get_rng_state(), before):
                torch.set_rng_state(before)
                return _UNKNOWN
        return values

    def _size(self, size: torch.SymInt) -> int | torch.SymInt:
        """Return a size as a number, unless it depends on values."""
        return size if size.node.hint is None else size.node.hint + self._more

    def _value(self, tensor: Tensor) -> Tensor | None:
        if type(tensor) is Tensor:
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                return None  # of torch.vmap, around one that is traced
            return tensor.clone()  # the forward writes into its own, if at all
        value, version = self._values.get(tensor, (None, None))
        return value if version == tensor._version else None


def _agree(one: Any, more: Any) -> bool:
    """Tell whether values are the same for both sizes, or repeat the same as often as they say."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        ours, theirs = _tensors(one), _tensors(more)
        if len(ours) != len(theirs):
            return False
        pairs = zip(ours, theirs, strict=True)
        if not all(_same(_once(a, b), _once(b, a)) for a, b in pairs):
            return False
        if _tensors(one):
            return True
        return repr(one) == repr(more)


def _once(tensor: Tensor, other: Tensor) -> Tensor | None:
    """Return a tensor without the repetitions along each dimension in which another is longer."""
    if tensor.dim() != other.dim():
        return None
    for dim, size in enumerate(other.shape):
        if tensor.shape[dim] != size:
            first = tensor.narrow(dim, 0, 1)
            if not _same(first.expand_as(tensor), tensor):
                return None
            tensor = first
    return tensor


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]
