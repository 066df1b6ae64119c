"""Writes an exported program as the document that `stored_graph` reads, with its tensors apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from cerebro_hydra.shards.operators import name_of
from cerebro_hydra.shards.regions import inline_regions, regions_of
from cerebro_hydra.shards.stored_graph import DEVICE, InvalidGraph, dense_strides

_DROPPED = (torch.ops.aten._assert_tensor_metadata.default,)  # what it asserts, the sizes say


@dataclass
class GraphDocument:
    """Holds calls and descriptions of tensors in the form of a document, and the tensors."""

    features: list[Any]
    weights: frozenset[str]
    prefix: str
    regions: list[dict[str, Any]] = field(default_factory=list)
    descriptions: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    calls: int = 0

    @classmethod
    def of(cls, program: ExportedProgram, prefix: str, autocast: str | None) -> GraphDocument:
        """Write a program that takes tensors and returns a tuple of tensors.

        Args:
            program: exported on the CPU.
            prefix: what the name of every weight begins with, and is left out.
            autocast: the precision of the whole program, or None.

        Raises:
            InvalidGraph: the program has something that a document can't say.
        """
        document = cls(list(_features(program)), frozenset(program.state_dict), prefix)
        module = program.module(check_guards=False)
        inline_regions(module)
        document._write(module, autocast)
        return document

    def fields(self) -> dict[str, Any]:
        """Return what `read_graph` takes."""
        return {
            "features": self.features,
            "tensors": self.descriptions,
            "regions": self.regions,
            "outputs": self.outputs,
        }

    def _write(self, module: Any, autocast: str | None) -> None:
        """Write the calls of a graph, and its outputs."""
        features = module.graph.find_nodes(op="placeholder")
        values: dict[fx.Node, Any] = {node: {"feature": i} for i, node in enumerate(features)}
        for node in module.graph.nodes:
            if node.op == "get_attr":
                values[node] = self._attribute(module, node.target)
            elif node.op == "call_function":
                values[node] = self._call(node, values, _autocast_of(node, autocast))
            elif node.op not in ("placeholder", "output"):
                raise InvalidGraph(f"its graph calls the module {node.target}")
        self.outputs = _encoded(module.graph.output_node().args[0], values)

    def _attribute(self, module: nn.Module, target: str) -> Any:
        found: Any = module
        for part in target.split("."):
            found = getattr(found, part)
        if isinstance(found, fx.GraphModule):
            return found
        if not isinstance(found, Tensor) or type(found.data) is not Tensor:
            raise InvalidGraph(f"{target} is a {type(found).__name__} and not a plain tensor")
        for number, tensor in enumerate(self.tensors):
            if tensor is found:
                return {"tensor": number}
        kind = "buffer" if target in self.weights else "constant"
        if isinstance(found, nn.Parameter) and kind == "buffer":
            kind = "parameter" if found.requires_grad else "frozen"
        order = sorted(range(found.dim()), key=lambda dim: -found.stride(dim))
        if dense_strides(found.shape, order) != found.stride():
            order = list(range(found.dim()))
        self.tensors.append(found)
        self.descriptions.append(
            {
                "name": target if kind == "constant" else target.removeprefix(self.prefix),
                "kind": kind,
                "dtype": _name(found.dtype),
                "shape": list(found.shape),
                "order": order,
            }
        )
        return {"tensor": len(self.tensors) - 1}

    def _call(self, node: fx.Node, values: dict[fx.Node, Any], autocast: str | None) -> Any:
        target: Any = node.target
        if target in _DROPPED:
            return None
        name = name_of(target)
        if name is None:
            name = getattr(target, "__name__", str(target))
            raise InvalidGraph(f"its graph calls {name}, which is no allowed operator")
        if not self.regions or self.regions[-1]["autocast"] != autocast:
            self.regions.append({"autocast": autocast, "calls": []})
        self.regions[-1]["calls"].append(
            {
                "operator": name,
                "args": [_encoded(x, values) for x in node.args],
                "kwargs": {key: _encoded(x, values) for key, x in node.kwargs.items()},
            }
        )
        self.calls += 1
        return {"call": self.calls - 1}


def _autocast_of(node: fx.Node, autocast: str | None) -> str | None:
    """Return the precision in which a node runs; evaluation records no gradients in any region."""
    for region in regions_of(node):
        if region.autocast is not None:
            device, dtype, enabled = region.autocast
            if device == "cpu":  # where it is exported; no other device is autocast there
                autocast = _name(dtype) if enabled else None
    return autocast


def _encoded(value: Any, values: dict[fx.Node, Any]) -> Any:
    """Return a value of a graph's node as the document writes it."""
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, list | tuple):
        return [_encoded(each, values) for each in value]
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return _name(value)
    if isinstance(value, torch.device) and value.type == "cpu":
        return DEVICE
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidGraph(f"its graph holds {value!r}, a {type(value).__name__}")


def _name(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


def _features(program: ExportedProgram) -> Iterator[list[Any]]:
    """Return the sizes of each input; those that an expression ties to another are left open."""
    symbols: dict[Any, int] = {}
    placeholders = program.graph.find_nodes(op="placeholder")
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            continue
        sizes: list[Any] = []
        for size in node.meta["val"].shape:
            symbol = size.node.expr if isinstance(size, torch.SymInt) else None
            if symbol is None or symbol.is_number:
                sizes.append(int(size))
            elif not symbol.is_symbol:
                sizes.append(None)
            else:
                sizes.append(
                    {"size": symbols.setdefault(symbol, len(symbols))}
                    | _bounds(program.range_constraints.get(symbol))
                )
        yield sizes


def _bounds(constraint: Any) -> dict[str, int | None]:
    least, most = (None, None) if constraint is None else (constraint.lower, constraint.upper)
    # torch.export asks for at least 2 of each size that may differ, and 0 and 1 run as well.
    return {
        "least": int(least) if least is not None and least.is_Integer and least > 2 else None,
        "most": int(most) if most is not None and most.is_Integer else None,
    }
