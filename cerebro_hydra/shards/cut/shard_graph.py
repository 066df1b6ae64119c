"""A shard graph is the forward of one shard as a pure function.

It takes parameters, buffers, live values and inputs as arguments and holds nothing of a trial,
so trials of equal structure share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from cerebro_hydra.shards.cut.regions import InRegions, Region, regions_of
from cerebro_hydra.shards.cut.reseed import MARKER, enter_unit
from cerebro_hydra.shards.cut.trace import RANDOM, FlatGraph


@dataclass(frozen=True)
class CrossingValue:
    """Describes a value that goes from one shard to the next."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    """None stands for the rows of a batch, or another size that differs between batches."""
    nbytes: int
    """Bytes for the traced batch, which has the largest size."""


@dataclass(frozen=True)
class ShardGraph:
    """Runs one shard's forward in one mode.

    `run(*params, *buffers, *live, *inputs)` returns the values of `live_out` as a tuple. The last
    shard has no `live_out`, and its `run` returns the model's outputs, flattened.
    """

    run: InRegions
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    mutates: frozenset[str]  # those of its buffers that it writes to, in place
    live_in: tuple[str, ...]  # the names of values from the shard before
    live_out: tuple[str, ...]  # the names of values for the shard behind
    inputs: tuple[int, ...]  # which of the model's inputs it takes
    units: tuple[str, ...]  # the unit calls inside, in order
    crossing: tuple[CrossingValue, ...] = ()
    """The values of `live_in`, where the graph tells them."""


def cut_graph(flat: FlatGraph, at: Sequence[str], train: bool) -> tuple[ShardGraph, ...]:
    """Cut a flat graph directly before the markers of the named unit calls."""
    shard_of = _shard_of_nodes(flat, at)
    output = next(n for n in flat.graph.nodes if n.op == "output")
    last = len(at)
    order = {node: i for i, node in enumerate(flat.graph.nodes)}
    live: list[set[fx.Node]] = [set() for _ in range(last + 1)]
    for node, shard in (*shard_of.items(), (output, last)):
        for value in node.all_input_nodes:
            made_in = shard_of.get(value)
            if made_in is not None:
                for k in range(made_in + 1, shard + 1):
                    live[k].add(value)
    live_in = [sorted(values, key=order.__getitem__) for values in live]
    redundant = _redundant_markers(flat) if train else set(flat.markers.values())
    return tuple(
        _shard_graph(
            flat,
            [n for n in flat.graph.nodes if shard_of.get(n) == k and n not in redundant],
            live_in[k],
            live_in[k + 1] if k < last else list(output.args[0]),
            units=tuple(u for u, n in flat.markers.items() if shard_of[n] == k),
            is_last=k == last,
        )
        for k in range(last + 1)
    )


def _shard_of_nodes(flat: FlatGraph, at: Sequence[str]) -> dict[fx.Node, int]:
    """Return the shard of every operation, except for those that every shard recomputes."""
    shard_of: dict[fx.Node, int] = {}
    shard = 0
    for node in flat.graph.nodes:
        if node.op != "call_function" or node in flat.recomputed:
            continue
        if node.target is MARKER and shard < len(at) and node.args[0] == at[shard]:
            shard += 1
        shard_of[node] = shard
    return shard_of


def _redundant_markers(flat: FlatGraph) -> set[fx.Node]:
    """Return the reseeds after which nothing draws a number before the next reseed.

    Leaving them out is exact.
    """
    redundant: set[fx.Node] = set()
    pending: fx.Node | None = None
    for node in flat.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is MARKER:
            if pending is not None:
                redundant.add(pending)
            pending = node
        elif _may_draw(node):
            pending = None
    return redundant  # the last marker is not redundant, because the loss may draw


def _may_draw(node: fx.Node) -> bool:
    target = node.target
    if getattr(target, "__module__", "") in ("_operator", "math", "operator"):
        return False
    return getattr(target, "namespace", "") != "aten" or RANDOM in getattr(target, "tags", ())


def _shard_graph(
    flat: FlatGraph, body: list[fx.Node], live_in: list[fx.Node], results: list[Any],
    units: tuple[str, ...], is_last: bool,
) -> ShardGraph:  # fmt: skip
    graph = fx.Graph()
    root = nn.Module()
    regions = graph.placeholder("regions")
    needed = _inputs_of(flat, body, results)
    params = [n for n in flat.params if n in needed]
    buffers = [n for n in flat.buffers if n in needed]
    inputs = [n for n in flat.inputs if n in needed]
    copies: dict[fx.Node, fx.Node] = {
        n: graph.placeholder(n.name) for n in (*params, *buffers, *live_in, *inputs)
    }

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node in flat.constants:
                root.register_buffer(node.name, flat.constants[node])
                copies[node] = graph.get_attr(node.name)
            else:
                copies[node] = graph.node_copy(node, copied)
        return copies[node]

    # Recomputed values come first and in order, because some of them write into others.
    operations = [n for n in flat.graph.nodes if n in needed and n in flat.recomputed] + body
    paths: list[tuple[Region, ...]] = [()]
    for node in operations:
        if node.target is MARKER:
            graph.call_function(enter_unit, (node.args[0],))
            continue
        if (path := regions_of(node)) != paths[-1]:
            graph.call_method("enter", (regions, len(paths)))
            paths.append(path)
        copied(node)
    graph.output(tuple(fx.node.map_arg(value, copied) for value in results))
    mutated = {flat.buffers[n] for n in buffers} & flat.mutated_buffers
    return ShardGraph(
        run=InRegions(fx.GraphModule(root, graph), tuple(paths)),
        params=tuple(flat.params[n] for n in params),
        buffers=tuple(flat.buffers[n] for n in buffers),
        mutates=frozenset(mutated),
        live_in=tuple(n.name for n in live_in),
        live_out=() if is_last else tuple(n.name for n in results),
        inputs=tuple(flat.inputs[n] for n in inputs),
        units=units,
        crossing=tuple(_crossing_value(n) for n in live_in),
    )


def _inputs_of(flat: FlatGraph, body: list[fx.Node], results: list[Any]) -> set[fx.Node]:
    """Return every node that the body and the results use, also through recomputed values."""
    found: set[fx.Node] = set()
    waiting = [n for node in body for n in node.all_input_nodes]
    waiting += [n for n in results if isinstance(n, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if node in flat.recomputed:
                waiting += [*node.all_input_nodes, *flat.in_place_nodes.get(node, ())]
    return found


def _crossing_value(node: fx.Node) -> CrossingValue:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return CrossingValue(node.name, type(value).__name__, (), 0)
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    nbytes = value.element_size()
    for size in value.shape:
        nbytes *= size if isinstance(size, int) else int(size.node.hint or 1)
    dtype = str(value.dtype).removeprefix("torch.")
    return CrossingValue(node.name, dtype, shape, nbytes)
