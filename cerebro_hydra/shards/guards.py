"""Guards are the conditions on input shapes under which an exported graph is its model's."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from cerebro_hydra.recipe import ForwardCall
from cerebro_hydra.shards.sample import Sample

_SIZE = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]")


@dataclass(frozen=True)
class Guards:
    """Holds the conditions on the arguments of a forward.

    `conditions` come from `torch.export`. `shapes` has the sizes of each input, with None where a
    size may differ between batches. `fixes_rows` says whether the number of rows may not.
    """

    conditions: tuple[str, ...]
    shapes: tuple[tuple[int | None, ...], ...]
    fixes_rows: bool
    signature: inspect.Signature
    call: ForwardCall

    @classmethod
    def of(cls, model: nn.Module, call: ForwardCall, program: ExportedProgram) -> Guards:
        """Return the conditions under which an exported program equals its model."""
        placeholders = program.graph.find_nodes(op="placeholder")
        inputs = [
            node.meta["val"].shape
            for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True)
            if spec.kind is InputKind.USER_INPUT and isinstance(node.meta["val"], Tensor)
        ]
        shapes = tuple(
            tuple(size if isinstance(size, int) else None for size in shape) for shape in inputs
        )
        fixes_rows = any(_is_fixed(shape[0]) for shape in inputs if shape)
        conditions = tuple(program._guards_code or ())
        return cls(conditions, shapes, fixes_rows, inspect.signature(model.forward), call)

    def violated(self, inputs: Sequence[Tensor]) -> str | None:
        """Return the first condition that a batch does not meet, or None."""
        for number, (tensor, sizes) in enumerate(zip(inputs, self.shapes, strict=True)):
            for dim, (size, fixed) in enumerate(zip(tensor.shape, sizes, strict=True)):
                if dim and fixed is not None and size != fixed:
                    return f"dimension {dim} of input {number} is {fixed}"
                if dim and fixed is None and size < 2:  # a size of one would broadcast
                    return f"dimension {dim} of input {number} is at least 2"
        args, kwargs = self.call.arguments(inputs)
        bound = self.signature.bind(*args, **kwargs).arguments
        names = {"L": dict(bound), "torch": torch, "math": math}
        for condition in self.conditions:
            if not eval(condition, names):
                return _SIZE.sub(r"\1.shape[\2]", condition)
        return None


def _is_fixed(size: int | torch.SymInt) -> bool:
    """Return whether a size is one number, which torch.export may have found out late."""
    return isinstance(size, int) or bool(size.node.expr.is_number)


def length_held_fixed(model: nn.Module, sample: Sample, guards: Guards) -> int | None:
    """Return a size other than the rows that the graph demands and the model does not, or None.

    The graph of a recurrent layer holds for one length of sequences, though the layer takes any.
    The one width of a linear layer is demanded by the layer itself.
    """
    sizes = {size for tensor in sample.inputs for size in tensor.shape[1:]}
    for size in sorted(sizes, reverse=True):
        if size < 3:
            continue
        shorter = [_shortened(tensor, size) for tensor in sample.inputs]
        if guards.violated(shorter) is None:
            continue
        try:
            with torch.no_grad(), sample.precision():
                sample.call(model, shorter)
        except Exception:
            continue
        return size
    return None


def _shortened(tensor: Tensor, size: int) -> Tensor:
    for dim in range(1, tensor.dim()):
        if tensor.shape[dim] == size:
            tensor = tensor.narrow(dim, 0, size - 1)
    return tensor.contiguous()
