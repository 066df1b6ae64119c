"""Finds the groups of a graph's values that share memory, and the operations that write to them."""

from __future__ import annotations

import operator
from collections.abc import Set

import torch
from torch import fx


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
