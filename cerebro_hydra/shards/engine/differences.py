"""Finds where training in shards differs from plain training: which tensor, which operation.

What one step gave is kept so that the same step can be compared, taken otherwise.
"""

from __future__ import annotations

import copy
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from cerebro_hydra.copies import deep_copy
from cerebro_hydra.errors import StepDiffers
from cerebro_hydra.foreign_text import error_text
from cerebro_hydra.recipe.grad_scaling import take_step
from cerebro_hydra.recipe.randomness import generator_states, random_numbers_kept
from cerebro_hydra.shards.cut.torch_cond import Watch
from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.shards.engine.layout import (
    EXISTS,
    HostSegments,
    Segments,
    ShardLayout,
    TrialLayout,
    in_place,
    is_optimizer_state,
    on_host,
)
from cerebro_hydra.shards.engine.optimizer import clone_optimizer
from cerebro_hydra.shards.engine.state import ShardState
from cerebro_hydra.storage.digest import digest

MOST_TRIED = 1 << 20
"""Bytes of the largest parameter with which it is tried whether an optimizer is separable."""

TRIED_STEPS = 256
"""How many of its steps are tried before the first one is taken."""

LARGE = 1e6
"""An element of a gradient that any rule about all gradients takes for large."""

_CONTAINERS = (dict, list, set, deque)

BY_OTHERS = "the forward or a hook of another layer, or a thread, writes to it"
"""Says of a tensor what may write to it at a time when its own layer does not run."""


HOOK_OF_ABSENT = (
    "or a hook has read another layer in a step before, whose shard was away then, so that it read "
    "NaN"
)
"""Follows what is told of a loss that is NaN, where hooks may be why."""

_OF_MODULES = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)  # fmt: skip

_KNOWN = f"{__name__.partition('.')[0]}.", "torch."
"""Begin the names of modules whose hooks read no other layer."""

_SEVERAL = "more than one element of the written-to tensor refers to a single memory location"
"""What torch says of a write to the largest stand-ins, whose elements are one."""


_NOT_USERS = str(Path(torch.__file__).parent), str(Path(__file__).parents[2])


class TensorContent(NamedTuple):
    """Stands for a tensor where its bits are compared: its type, its shape and its digest."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorContent:
        return cls(tensor.dtype, tuple(tensor.shape), tensor_digest(tensor))


def contents(tensors: Mapping[str, Tensor]) -> dict[str, TensorContent]:
    """Return the contents of named tensors, for which their memory is not needed any more."""
    return {name: TensorContent.of(tensor) for name, tensor in tensors.items()}


def first_difference(
    layout: TrialLayout, shards: Sequence[HostSegments], trained: Mapping[str, TensorContent]
) -> str | None:
    """Return the first tensor of a state whose bits are not those of plain training, or None.

    Args:
        trained: the state of plain training, named as a checkpoint names it.
    """
    optimizer_state: dict[str, dict[str, TensorContent]] = defaultdict(dict)
    for full_name, content in trained.items():
        if is_optimizer_state(full_name):
            name, _, key = full_name.partition(":")[2].rpartition(":")
            optimizer_state[name][key] = content
    for shard, segments in zip(layout.shards, shards, strict=True):
        state = ShardState(shard, on_host(in_place(segments)))
        optimizer = state.existing_optimizer_state()
        for name, parameter in state.params.items():
            if TensorContent.of(parameter) != trained[f"param:{name}"]:
                return f"parameter {name!r}"
            here, there = optimizer.get(name, {}), optimizer_state[name]
            if here.keys() != there.keys():
                return f"optimizer state of {name!r}: {sorted(here)}, not {sorted(there)}"
            for key, value in here.items():
                if TensorContent.of(value) != there[key]:
                    return f"optimizer state {key!r} of {name!r}"
        for name, tensor in state.buffers.items():
            if (buffer := trained.get(f"buffer:{name}")) is None:
                return (
                    f"buffer {name!r}, which a step has made one tensor with another buffer where "
                    "it needs a copy, as by .clone()"
                )
            if TensorContent.of(tensor) != buffer:
                return f"buffer {name!r}"
        for name, tensor in state.ema.items():
            if TensorContent.of(tensor) != trained[f"ema:{name}"]:
                return f"moving average of {name!r}"
    return None


def used_elsewhere(step: int | None, parameter: str) -> str:
    """Tell of a parameter that is used while another shard than its own runs.

    Args:
        step: None in an evaluation.
    """
    return tensor_used_elsewhere(step, f"parameter {parameter!r}")


def tensor_used_elsewhere(step: int | None, told: str) -> str:
    """Tell of a tensor that is used while another shard than its own runs; see `used_elsewhere`.

    Args:
        told: its kind and its name.
    """
    where = "in evaluation" if step is None else f"in step {step}"
    return (
        f"{where}, {told} is used outside of its own shard: the forward or "
        "a hook reads it elsewhere, or takes gradients itself"
    )


def _of_user(frames: Sequence[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """Return the frames of an error that are in the user's code, all of them if none is."""
    found = [frame for frame in frames if not frame.filename.startswith(_NOT_USERS)]
    return found or frames


@contextmanager
def told_writes_to_absent() -> Iterator[None]:
    """Tell of code that writes to a tensor whose shard is away, if torch refuses the write.

    Raises:
        StepDiffers: the body does so.
    """
    try:
        yield
    except RuntimeError as error:
        if _SEVERAL not in error_text(error):
            raise
        *_, place = _of_user(traceback.extract_tb(error.__traceback__))
        raise StepDiffers(
            "a large tensor was written to while its shard was away, by the forward or a hook of "
            f"another layer: {place.line} ({place.filename}, line {place.lineno})"
        ) from error


def has_hooks(model: nn.Module) -> bool:
    """Return whether a module has a hook that is neither ours nor torch's own."""
    hooks = (h for m in model.modules() for kind in _OF_MODULES for h in getattr(m, kind).values())
    return any(not _module_of(hook).startswith(_KNOWN) for hook in hooks)


def _module_of(hook: object) -> str:
    while hasattr(hook, "func"):  # of a partial
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal in type, shape and every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_words(a), _words(b))


def checksum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bytes in words, which almost no change leaves as it is."""
    return int(_words(tensor).sum(dtype=torch.int64))


def checksums(tensors: Collection[Tensor]) -> list[int]:
    """Return the checksum of each tensor, for which a device is waited for once."""
    found: list[int] = sums(tensors).tolist() if tensors else []
    return found


def sums(tensors: Iterable[Tensor]) -> Tensor:
    """Return the checksums of one tensor or more on their device, which is not waited for."""
    return torch.stack([_words(tensor).sum(dtype=torch.int64) for tensor in tensors])


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
class Recorder(Watch):
    """Notes, while it is entered, every operation that computes something, and its unit."""

    operations: list[tuple[Operation, str]] = field(default_factory=list)
    unit: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(func, OpOverload):
            return out
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        computes = any(isinstance(a, Tensor) for a in args) and "empty" not in str(func)
        if computes and not is_view:
            for value in out if isinstance(out, list | tuple) else (out,):
                if isinstance(value, Tensor) and value.layout is torch.strided:
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


TensorDigests = Mapping[str, str]
"""The digest of each tensor of a shard that trains, by its name in the segment."""

EFFECT = "effect:"
"""Begins what is told of an attribute beside the tensors of shard 0."""

_KINDS = {"param": "parameter", "buffer": "buffer", "ema": "moving average of"}


def tensor_digests(layout: ShardLayout, segments: Segments) -> TensorDigests:
    """Return the digests of the tensors in a trainable segment."""
    placed = layout.placed(segments["trainable"], segments.get("optimizer"))
    return {
        entry.name: digest(memory[entry.offset : entry.offset + entry.nbytes].cpu().numpy())
        for entries, memory in placed
        for entry in entries
    }


@dataclass
class StepResult:
    """Holds the mean loss of a step, and the digests of the state after it, shard by shard."""

    loss: float = float("nan")
    shards: dict[int, TensorDigests] = field(default_factory=dict)

    def difference(self, uncut: StepResult) -> str | None:
        """Return what is otherwise in the uncut model's step, None if no bit is."""
        if self.loss != uncut.loss:
            return f"the loss is {self.loss!r}, not {uncut.loss!r}"
        for shard, digests in sorted(self.shards.items()):
            for name, found in digests.items():
                if not name.startswith(EFFECT) and found != uncut.shards[shard][name]:
                    return _described(name)
        return None

    def side_effect(self, uncut: StepResult) -> str | None:
        """Return which value that hops with no shard the step changed to another one than uncut."""
        for name, found in self.shards.get(0, {}).items():
            if name.startswith(EFFECT) and found != uncut.shards[0].get(name):
                return name
        return None


def _described(name: str) -> str:
    kind, _, rest = name.partition(":")
    if is_optimizer_state(name):
        parameter, _, key = rest.rpartition(":")
        return f"optimizer state {key!r} of {parameter!r}"
    return "which optimizer state exists" if name == EXISTS else f"{_KINDS[kind]} {rest!r}"


_NEEDS_ALL = (
    "otherwise if another one has a large gradient; so it needs the gradients of all shards, and "
    "has those of one"
)
_DRAWS = "with random numbers, which go on from one parameter to the next; a shard has some of them"


def other_gradients_matter(
    optimizer: torch.optim.Optimizer, on_host: bool = False, steps: int = 1
) -> tuple[Tensor, int, str] | None:
    """Return a parameter that an optimizer updates otherwise beside one with a large gradient.

    It is returned with the first of the steps and how that is, in words, and None if there is none.
    It is tried with copies of the smallest parameter, before a step is taken; the optimizer stays
    as it is.

    Args:
        on_host: whether the kernels of the CPU take its steps, as in `take_step`.
        steps: how many are tried one after the other, for what an optimizer does in some alone.
    """
    given = [p for group in optimizer.param_groups for p in group["params"] if _is_dense(p.grad)]
    smallest = min(given, key=lambda p: p.nbytes, default=None)
    if smallest is None or smallest.nbytes > MOST_TRIED:
        return None
    with random_numbers_kept():
        states = generator_states(smallest.device)
        alone = [*_updates(optimizer, smallest, on_host, steps, beside=False)]
        draws = generator_states(smallest.device) != states
    with random_numbers_kept():
        beside = _updates(optimizer, smallest, on_host, len(alone), beside=True)
        for number, (one, other) in enumerate(zip(alone, beside, strict=False)):
            if one != other:
                return smallest, number, _DRAWS if draws else _NEEDS_ALL
    return None


@contextmanager
def refused_draws(step: int, others: int, device: torch.device) -> Iterator[None]:
    """Find random numbers of torch that the update of a shard draws, if there are other shards.

    Raises:
        StepDiffers: there are some, which would go on from one shard to the next.
    """
    states = generator_states(device) if others else []
    yield
    if others and generator_states(device) != states:
        raise StepDiffers(
            f"in step {step}, the optimizer or its LR scheduler draws random numbers, which go on "
            "from one parameter or step to the next; a shard has some of them"
        )


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is torch's own, which is separable if it is not refused."""
    hooks = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    return type(optimizer).__module__.startswith("torch.optim.") and not any(hooks)


def _is_dense(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is torch.strided and gradient.numel() > 0


def _updates(
    optimizer: torch.optim.Optimizer, parameter: Tensor, on_host: bool, steps: int, *, beside: bool
) -> Iterator[tuple[int, str]]:
    """Yield after each step a checksum of a parameter's copy, and the options of its group.

    It is alone, or between two copies with large gradients. After the first step it may fail, as
    nobody has trained with such gradients for so long.
    """
    mine = nn.Parameter(parameter.detach().clone())
    assert parameter.grad is not None
    clone = clone_optimizer(optimizer, {id(parameter): mine})
    held = vars(clone)  # what it shares with the original stays as it is
    held.update((name, copy.copy(v)) for name, v in tuple(held.items()) if type(v) in _CONTAINERS)
    (group,) = (g for g in clone.param_groups if g["params"])
    others = [nn.Parameter(mine.detach().clone()) for _ in range(2 if beside else 0)]
    largest = torch.finfo(parameter.grad.dtype).max / 8
    if beside:
        group["params"] = [others[0], mine, others[1]]
        if "param_names" in group:
            (name,) = group["param_names"]
            group["param_names"] = [f"before {name}", name, f"after {name}"]
    for number in range(steps):
        mine.grad = parameter.grad.detach().clone()
        for other in others:
            other.data.copy_(mine.data)
            other.grad = torch.full_like(mine.grad, min(LARGE, largest))
            if mine in clone.state:
                clone.state[other] = deep_copy(clone.state[mine])
        try:
            take_step(clone, None, 0, on_host)
        except Exception:
            if number == 0:
                raise
            return
        options = {name: value for name, value in group.items() if not name.startswith("param")}
        yield checksum(mine.detach()), repr(options)
