"""Where training in shards differs from the uncut model: which operation, or which tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cerebro_hydra.shards.digest import digest
from cerebro_hydra.shards.layout import Segments, TrialLayout
from cerebro_hydra.shards.reference_steps import ReferenceSteps
from cerebro_hydra.shards.state import ShardState


def first_difference(
    layout: TrialLayout, shards: Sequence[Segments], reference: ReferenceSteps
) -> str | None:
    """The first tensor of a state whose bits are not the reference's, or None."""
    params = dict(reference.model.named_parameters())
    buffers = dict(reference.model.named_buffers())
    averages = {} if reference.ema is None else dict(reference.ema.module.named_parameters())
    for shard, segments in zip(layout.shards, shards, strict=True):
        state = ShardState.bind(shard, **segments)
        optimizer = state.existing_optimizer_state()
        for name, parameter in state.params.items():
            if not same_bits(parameter, params[name]):
                return f"parameter {name!r}"
            there = reference.optimizer.state.get(params[name], {})
            there = {key: value for key, value in there.items() if value is not None}
            here = optimizer.get(name, {})
            if params[name].requires_grad and here.keys() != there.keys():
                return f"optimizer state of {name!r}: {sorted(here)}, not {sorted(there)}"
            for key, value in here.items():
                if not same_bits(value, there[key]):
                    return f"optimizer state {key!r} of {name!r}"
        for name, tensor in state.buffers.items():
            if not same_bits(tensor, buffers[name]):
                return f"buffer {name!r}"
        for name, tensor in state.ema.items():
            if not same_bits(tensor, averages[name]):
                return f"moving average of {name!r}"
    return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in type, shape and every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


@dataclass(frozen=True)
class Operation:
    """One operation that ran: its name, its output's form, and a digest of its bits."""

    name: str
    form: str
    digest: str


@dataclass
class Recorder(TorchDispatchMode):
    """Within it, every operation that computes something is noted, with the unit it ran in."""

    operations: list[tuple[Operation, str]] = field(default_factory=list)
    unit: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        computes = any(isinstance(a, Tensor) for a in args) and "empty" not in str(func)
        if computes and not is_view:
            for value in out if isinstance(out, list | tuple) else (out,):
                if isinstance(value, Tensor):
                    self.operations.append((_operation(func, value), self.unit))
        return out


def _operation(func: Any, value: Tensor) -> Operation:
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    form = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return Operation(str(func), form, digest(flat))


def first_operation(uncut: Recorder, cut: Recorder) -> str | None:
    """The first operation of the uncut model whose output the cut one never computed, or None."""
    there = Counter(operation for operation, _ in cut.operations)
    for operation, unit in uncut.operations:
        if there[operation] == 0:
            where = f"in {unit.removesuffix('@0')!r}" if unit else "before its first unit"
            return f"{operation.name} {where}, whose output is {operation.form}"
        there[operation] -= 1
    return None
