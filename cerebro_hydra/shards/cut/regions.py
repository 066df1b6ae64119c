"""Regions are the parts of a graph that a forward runs without gradients or under an autocast.

`torch.export` nests each in a graph of its own. Inlined, their operations are cut, aliased and
computed again like all others, and run in the modes that they had.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_ARGUMENTS = {_GRAD_MODE: 1, _AUTOCAST: 4}  # how many each has before its graph


@dataclass(frozen=True, eq=False)
class Region:
    """Describes one region of a forward; each is equal to itself alone."""

    gradients: bool | None
    """Whether operations record gradients, or None if it is as outside."""
    autocast: tuple[str, torch.dtype, bool] | None
    """The device, the precision and whether it is on, or None if it is as outside."""

    @classmethod
    def of(cls, node: fx.Node) -> Region:
        """Return the region that a node of `torch.export` nests."""
        arguments: Any = node.args
        if node.target is _GRAD_MODE:
            return cls(arguments[0], None)
        # torch.export always says that autocast has no cache, so that is as outside.
        return cls(None, arguments[:3])

    def on(self, device: torch.device) -> Region:
        """Return the region on another device than the one of the trace."""
        if self.autocast is None:
            return self
        return Region(self.gradients, (device.type, *self.autocast[1:]))

    def mode(self) -> AbstractContextManager[Any]:
        """Return a context that runs operations as the region does."""
        if self.autocast is None:
            return torch.set_grad_enabled(bool(self.gradients))
        return torch.autocast(*self.autocast)


def regions_of(node: fx.Node) -> tuple[Region, ...]:
    """Return the regions in which an inlined node lies, from the outermost."""
    found: tuple[Region, ...] = node.meta.get("regions", ())
    return found


def inline_regions(module: Any) -> None:
    """Put the operations of all regions into the graph of the module itself."""
    graph: fx.Graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _ARGUMENTS:
            continue
        count = _ARGUMENTS[node.target]
        own = node.args[count]
        nested = getattr(module, own.target)
        inline_regions(nested)
        region = Region.of(node)
        values = dict(
            zip(nested.graph.find_nodes(op="placeholder"), node.args[count + 1 :], strict=True)
        )
        with graph.inserting_before(node):
            for each in nested.graph.nodes:
                if each.op in ("placeholder", "output"):
                    continue
                values[each] = graph.node_copy(each, values.__getitem__)
                values[each].meta["regions"] = (region, *regions_of(each))
        results = nested.graph.output_node().args[0]
        for user in list(node.users):
            assert user.target is operator.getitem, user
            user.replace_all_uses_with(values[results[user.args[1]]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not own.users:
            graph.erase_node(own)


class OpenRegions:
    """Holds the modes of the regions in which a running graph is; leaves them all at its end."""

    def __init__(self, paths: Sequence[tuple[Region, ...]]) -> None:
        self._paths = paths
        self._open: list[tuple[Region, AbstractContextManager[Any]]] = []

    def __enter__(self) -> OpenRegions:
        return self

    def __exit__(self, *error: object) -> None:
        self._leave(0)

    def enter(self, number: int) -> None:
        """Leave and enter regions until those of one path are open."""
        path = self._paths[number]
        kept = 0
        for (region, _), other in zip(self._open, path, strict=False):
            if region is not other:
                break
            kept += 1
        self._leave(kept)
        for region in path[kept:]:
            mode = region.mode()
            mode.__enter__()
            self._open.append((region, mode))

    def _leave(self, kept: int) -> None:
        while len(self._open) > kept:
            _, mode = self._open.pop()
            mode.__exit__(None, None, None)


@dataclass(frozen=True)
class InRegions:
    """Calls a graph's module, which takes the open regions before its own arguments."""

    module: fx.GraphModule
    paths: tuple[tuple[Region, ...], ...]

    def __call__(self, *args: Any) -> Sequence[Any]:
        with OpenRegions(self.paths) as regions:
            return self.module.forward(regions, *args)  # type: ignore[no-any-return]

    def on(self, device: torch.device) -> InRegions:
        """Return the graph with its constants on a device, where it makes tensors.

        It was traced on the CPU, and has that device wherever its operations name one.
        """

        def placed(value: Any) -> Any:
            return device if isinstance(value, torch.device) else value

        graph = fx.Graph()
        graph.output(graph.graph_copy(self.module.graph, {}))
        for node in graph.nodes:
            node.args = fx.node.map_aggregate(node.args, placed)
            node.kwargs = fx.node.map_aggregate(node.kwargs, placed)
        root = nn.Module()
        for name, constant in self.module.named_buffers():
            root.register_buffer(name, constant.to(device))
        regions = {region: region.on(device) for path in self.paths for region in path}
        paths = tuple(tuple(map(regions.__getitem__, path)) for path in self.paths)
        return InRegions(fx.GraphModule(root, graph), paths)
