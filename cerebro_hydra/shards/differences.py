"""Finds where training in shards differs from plain training: which tensor, which operation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.shards.layout import HostSegments, TrialLayout, in_place, on_host
from cerebro_hydra.shards.state import ShardState


def first_difference(
    layout: TrialLayout, shards: Sequence[HostSegments], trained: Mapping[str, Tensor]
) -> str | None:
    """Return the first tensor of a state whose bits are not those of plain training, or None.

    Args:
        trained: the state of plain training, named as a checkpoint names it.
    """
    optimizer_state: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for full_name, tensor in trained.items():
        kind, _, rest = full_name.partition(":")
        if kind == "optim":
            name, _, key = rest.rpartition(":")
            optimizer_state[name][key] = tensor
    for shard, segments in zip(layout.shards, shards, strict=True):
        state = ShardState(shard, on_host(in_place(segments)))
        optimizer = state.existing_optimizer_state()
        for name, parameter in state.params.items():
            if not same_bits(parameter, trained[f"param:{name}"]):
                return f"parameter {name!r}"
            here, there = optimizer.get(name, {}), optimizer_state[name]
            if here.keys() != there.keys():
                return f"optimizer state of {name!r}: {sorted(here)}, not {sorted(there)}"
            for key, value in here.items():
                if not same_bits(value, there[key]):
                    return f"optimizer state {key!r} of {name!r}"
        for name, tensor in state.buffers.items():
            if not same_bits(tensor, trained[f"buffer:{name}"]):
                return f"buffer {name!r}"
        for name, tensor in state.ema.items():
            if not same_bits(tensor, trained[f"ema:{name}"]):
                return f"moving average of {name!r}"
    return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal in type, shape and every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_words(a), _words(b))


def checksum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bytes in words, which almost no change leaves as it is."""
    return int(_words(tensor).sum(dtype=torch.int64))


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes in words if they fill some, which is five times as fast."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.nbytes % 8:
        return raw
    if raw.storage_offset() % 8:  # words begin at multiples of their size
        raw = raw.clone()
    return raw.view(torch.int64)


@dataclass(frozen=True)
class Operation:
    """Describes an operation that ran: its name, and its output's type, shape and digest."""

    name: str
    form: str
    digest: str


@dataclass
class Recorder(TorchDispatchMode):
    """Notes, while it is entered, every operation that computes something, and its unit."""

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
    form = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return Operation(str(func), form, tensor_digest(value))


def first_operation(uncut: Recorder, cut: Recorder) -> str | None:
    """Return the first uncut operation whose output the cut model never computed, or None."""
    there = Counter(operation for operation, _ in cut.operations)
    for operation, unit in uncut.operations:
        if there[operation] == 0:
            where = f"in {unit.removesuffix('@0')!r}" if unit else "before its first unit"
            return f"{operation.name} {where}, whose output is {operation.form}"
        there[operation] -= 1
    return None
