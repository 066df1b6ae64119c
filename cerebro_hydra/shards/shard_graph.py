"""The pure function of one shard: parameters, buffers, live values and inputs go in.

Nothing of a trial is kept inside, so trials of equal structure share programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from cerebro_hydra.shards.reseed import MARKER, enter_unit
from cerebro_hydra.shards.trace import RANDOM, FlatGraph


@dataclass(frozen=True)
class ShardGraph:
    """One shard's forward in one mode.

    `run(*params, *buffers, *live, *inputs)` gives the values of `writes` as a tuple; the last
    shard's `writes` is empty and it gives the model's outputs, flattened.
    """

    run: Callable[..., Sequence[Any]]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    mutates: frozenset[str]  # those of its buffers that it writes to, in place
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    inputs: tuple[int, ...]
    units: tuple[str, ...]  # the unit calls inside, in order
    crossing: tuple[tuple[str, str, tuple[int | None, ...], int], ...] = ()
    """What `reads` is: name, dtype, shape (None: rows), bytes for the traced batch."""


def cut_graph(flat: FlatGraph, at: Sequence[str], train: bool) -> tuple[ShardGraph, ...]:
    """Cut a flat graph directly before the markers named."""
    place = _shard_of_nodes(flat, at)
    output = next(n for n in flat.graph.nodes if n.op == "output")
    last = len(at)
    order = {node: i for i, node in enumerate(flat.graph.nodes)}
    live: list[set[fx.Node]] = [set() for _ in range(last + 1)]
    for node, shard in (*place.items(), (output, last)):
        for value in node.all_input_nodes:
            made = place.get(value)
            if made is not None:
                for k in range(made + 1, shard + 1):
                    live[k].add(value)
    reads = [sorted(each, key=order.__getitem__) for each in live]
    silent = _silent_markers(flat) if train else set(flat.markers.values())
    return tuple(
        _program(
            flat,
            [n for n in flat.graph.nodes if place.get(n) == k and n not in silent],
            reads[k],
            reads[k + 1] if k < last else list(_flat_outputs(output)),
            units=tuple(u for u, n in flat.markers.items() if place[n] == k),
            is_last=k == last,
        )
        for k in range(last + 1)
    )


def _shard_of_nodes(flat: FlatGraph, at: Sequence[str]) -> dict[fx.Node, int]:
    place: dict[fx.Node, int] = {}
    shard = 0
    for node in flat.graph.nodes:
        if node.op != "call_function" or node in flat.recomputed:
            continue
        if node.target is MARKER and shard < len(at) and node.args[0] == at[shard]:
            shard += 1
        place[node] = shard
    return place


def _silent_markers(flat: FlatGraph) -> set[fx.Node]:
    """Reseeds after which nothing draws a number before the next one: leaving them out is exact."""
    silent: set[fx.Node] = set()
    pending: fx.Node | None = None
    for node in flat.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is MARKER:
            if pending is not None:
                silent.add(pending)
            pending = node
        elif _may_draw(node):
            pending = None
    return silent  # the last one stays: a loss may draw


def _may_draw(node: fx.Node) -> bool:
    target = node.target
    if getattr(target, "__module__", "") in ("_operator", "math", "operator"):
        return False
    return getattr(target, "namespace", "") != "aten" or RANDOM in getattr(target, "tags", ())


def _flat_outputs(output: fx.Node) -> Sequence[Any]:
    values = output.args[0]
    return values if isinstance(values, list | tuple) else (values,)


def _program(
    flat: FlatGraph, body: list[fx.Node], reads: list[fx.Node], results: list[Any],
    units: tuple[str, ...], is_last: bool,
) -> ShardGraph:  # fmt: skip
    graph = fx.Graph()
    root = nn.Module()
    needed = _inputs_of(flat, body, results)
    params = [n for n in flat.params if n in needed]
    buffers = [n for n in flat.buffers if n in needed]
    inputs = [n for n in flat.inputs if n in needed]
    copies: dict[fx.Node, fx.Node] = {
        n: graph.placeholder(n.name) for n in (*params, *buffers, *reads, *inputs)
    }

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node in flat.constants:
                root.register_buffer(node.name, flat.constants[node])
                copies[node] = graph.get_attr(node.name)
            else:
                copies[node] = graph.node_copy(node, copied)
        return copies[node]

    # First and in order: some of them write into others.
    for node in flat.graph.nodes:
        if node in needed and node in flat.recomputed:
            copied(node)
    for node in body:
        if node.target is MARKER:
            graph.call_function(enter_unit, (node.args[0],))
        else:
            copied(node)
    graph.output(tuple(fx.node.map_arg(value, copied) for value in results))
    mutated = {flat.buffers[n] for n in buffers} & flat.mutated_buffers
    return ShardGraph(
        run=fx.GraphModule(root, graph).forward,
        params=tuple(flat.params[n] for n in params),
        buffers=tuple(flat.buffers[n] for n in buffers),
        mutates=frozenset(mutated),
        reads=tuple(n.name for n in reads),
        writes=() if is_last else tuple(n.name for n in results),
        inputs=tuple(flat.inputs[n] for n in inputs),
        units=units,
        crossing=tuple(_describe(n) for n in reads),
    )


def _inputs_of(flat: FlatGraph, body: list[fx.Node], results: list[Any]) -> set[fx.Node]:
    """Every node that the body and results are made of, through recomputed values too."""
    found: set[fx.Node] = set()
    waiting = [n for node in body for n in node.all_input_nodes]
    waiting += [n for n in results if isinstance(n, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if node in flat.recomputed:
                waiting += [*node.all_input_nodes, *flat.written_with.get(node, ())]
    return found


def _describe(node: fx.Node) -> tuple[str, str, tuple[int | None, ...], int]:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return node.name, type(value).__name__, (), 0
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    total = value.element_size()
    for size in value.shape:
        total *= size if isinstance(size, int) else int(size.node.hint or 1)
    return node.name, str(value.dtype).removeprefix("torch."), shape, total
