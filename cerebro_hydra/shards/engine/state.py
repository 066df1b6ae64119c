"""Holds the state of one shard: its tensors, which are views into its two segments.

A cursor is the small JSON that travels with a shard's segments.

It has the step, the options of the param groups and the state of the LR scheduler. That of a fork
has the step and how many epochs lie behind it: its options and its LR schedule are those of its own
parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from cerebro_hydra.errors import ConfigurationError, StepDiffers, kind_of
from cerebro_hydra.recipe.grad_scaling import GradScaling
from cerebro_hydra.recipe.lr_schedule import LRSchedule, SchedulerList, schedulers_of
from cerebro_hydra.recipe.optimizer_list import NUMBERS, members_of
from cerebro_hydra.recipe.placement import CPU, stays_on_host
from cerebro_hydra.shards.engine.layout import (
    EXISTS,
    LayoutEntry,
    Memory,
    Segments,
    ShardLayout,
    TrialLayout,
    is_optimizer_state,
)
from cerebro_hydra.shards.engine.optimizer import check_state_keys
from cerebro_hydra.shards.places import Places, Rebound, is_moved


def trains_otherwise(name: str, trains: bool) -> ConfigurationError:
    """Return the error of a parameter that trains now, or does no more."""
    return ConfigurationError(
        f"training changed requires_grad of parameter {name!r} to {trains}, which would not hop; "
        "choose in the factory what trains, or detach a layer's output while its weights shall not"
    )


class ShardState:
    """Holds a shard's parameters (leaves), their moving averages, buffers and optimizer state.

    Training writes to the trainable segment; the frozen one may be shared. Without what updates
    alone need, the shard can do all but be updated.

    Attributes:
        is_whole: whether all of it is here.
        read: what forward and backward read: the parameters, or an older version of them.
        values: where the values of these lie, which is in the segments unless they are older.
        constant: the names of what the frozen segment has.

    Args:
        parameters: a model's own parameters, by name, which are bound to the segments' memory and
            lose what they were bound to. Without them, new parameters are made.

    Raises:
        ValueError: a segment does not have this layout.
    """

    def __init__(
        self,
        layout: ShardLayout,
        segments: Segments,
        parameters: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        frozen, trainable = segments["frozen"], segments["trainable"]
        self.is_whole = trainable.nbytes == layout.trainable.nbytes
        layout.frozen.check(frozen, "frozen")
        layout.trainable.check(trainable, "trainable", None if self.is_whole else layout.split)
        self._layout = layout
        self._bound = parameters
        self.params: dict[str, nn.Parameter] = {}
        self.read = self.params
        self.values: dict[str, Tensor] = {}
        self.constant: set[str] = set()
        self.buffers: dict[str, Tensor] = {}
        self.ema: dict[str, Tensor] = {}
        self._state: dict[str, dict[str, tuple[Tensor, int]]] = {}
        self._num_states = 0
        self._numbers: dict[tuple[str, str], Any] = {}  # as they are in the memory, once known
        self._exists = torch.zeros(0, dtype=torch.uint8)
        self._device = trainable.device
        self._add(layout.frozen.entries, frozen, is_frozen=True)
        for entries, memory in layout.placed(trainable, None):
            self._add(entries, memory, is_frozen=False)
        self._marks: list[int] = self._exists.tolist()
        if not self.is_whole and (optimizer := segments.get("optimizer")) is not None:
            self.complete(optimizer)

    def complete(self, optimizer: Memory) -> None:
        """Take the memory of what updates alone need, which was not there before.

        Raises:
            ValueError: it is not as large as the layout says.
        """
        nbytes = self._layout.trainable.nbytes - self._layout.split
        if optimizer.nbytes != nbytes:
            raise ValueError(
                f"the optimizer's part of a segment has {optimizer.nbytes} bytes, and its layout "
                f"{nbytes}; it belongs to another trial or cut"
            )
        self._add(self._layout.behind_split, optimizer, is_frozen=False)
        self._marks = self._exists.tolist()
        self.is_whole = True

    def _add(self, entries: Iterable[LayoutEntry], memory: Memory, is_frozen: bool) -> None:
        for entry in entries:
            kind, name, view = entry.kind, entry.of, entry.view(memory)
            if is_frozen:
                self.constant.add(name)
            if kind == "param":
                self.values[name] = view
                if self._bound is None:
                    self.params[name] = nn.Parameter(view, requires_grad=not is_frozen)
                else:
                    self.params[name] = self._bound[name]
                    self.params[name].data = view
            elif kind == "buffer":
                self.buffers[name] = view
            elif kind == "ema":
                self.ema[name] = view
            elif is_optimizer_state(entry.name):
                self._state.setdefault(name, {})[entry.key] = view, self._num_states
                self._num_states += 1
                if kind == "number":
                    self._numbers[name, entry.key] = None
            elif entry.name == EXISTS:
                self._exists = view

    def add_to(self, places: Places) -> None:
        """Add where the shard's tensors lie."""
        for name, value in self.values.items():
            kind = "frozen parameter" if name in self.constant else "parameter"
            places.add(f"{kind} {name!r}", value)
        for name, buffer in self.buffers.items():
            places.add(f"buffer {name!r}", buffer)
        for name, states in self._state.items():
            for key, (view, _) in states.items():
                places.add(f"state {key!r} of parameter {name!r}", view)

    def average(self, decay: float, first: bool) -> None:
        """Move the averages towards the parameters, as `torch.optim.swa_utils.AveragedModel` does.

        Args:
            first: whether it is the trial's first step, which sets the averages to the parameters.
        """
        averages = list(self.ema.values())
        current = [self.params[n].detach().to(a.device) for n, a in self.ema.items()]
        if first:
            for average, parameter in zip(averages, current, strict=True):
                average.copy_(parameter)
        elif averages:
            torch._foreach_lerp_(averages, current, 1 - decay)

    def existing_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer state that exists by now, by parameter name and key."""
        return {
            name: found
            for name, states in self._state.items()
            if (found := {key: view for key, (view, mark) in states.items() if self._marks[mark]})
        }

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer's state be the views of the state that exists, and numbers.

        What is kept on the host is copied there from another device, all at once.
        """
        names = {parameter: name for name, parameter in self.params.items()}
        existing: dict[str, dict[str, Any]] = dict(self.existing_optimizer_state())
        numbers = [(n, k) for n, k in self._numbers if k in existing.get(n, {})]
        on_host: list[tuple[dict[str, Any], str]] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (state := existing.get(names.get(parameter, ""))) is not None:
                    optimizer.state[parameter] = state
                    if self._device != CPU:
                        on_host += [(state, key) for key in state if stays_on_host(group, key)]
        if self._device != CPU:
            on_host += [(existing[name], key) for name, key in numbers]
            copies = _together([state[key] for state, key in on_host], CPU)
            for (state, key), copy in zip(on_host, copies, strict=True):
                state[key] = copy
        for name, key in numbers:
            number = self._numbers[name, key] = existing[name][key].item()
            existing[name][key] = number

    def keep_optimizer(
        self, optimizer: torch.optim.Optimizer, rebound: Rebound | None = None
    ) -> None:
        """Copy parameters and state that lie outside of the segment into the segment.

        The optimizer has put them there, or keeps them on the host. What it dropped exists no more.

        Args:
            rebound: is to write them together with others; None writes them at once.

        Raises:
            ConfigurationError: the optimizer made state that its template does not have, or under
                a key that is no parameter, or gave something the memory of another, or a parameter
                trains that was frozen.
        """
        given, rebound = rebound, Rebound([self]) if rebound is None else rebound
        for name, parameter in self.params.items():
            memory = self.values[name]
            if name not in self.constant and is_moved(parameter, memory):
                rebound.add(f"parameter {name!r}", parameter, memory)
                parameter.data = memory
        check_state_keys(optimizer)
        on_host: list[tuple[Tensor, Tensor]] = []
        marks = [0] * len(self._marks)
        for name, parameter in self.params.items():
            state = optimizer.state.get(parameter)
            if not state:
                continue
            views = self._state.get(name, {})
            for key, value in state.items():
                if value is None:
                    continue
                if name in self.constant:
                    raise trains_otherwise(name, True)
                if key not in views:
                    raise ConfigurationError(
                        f"optimizer {type(optimizer).__name__} made state {key!r} for parameter "
                        f"{name!r} after its first two steps, and such state can't hop; make it in "
                        "its first step, as zeros, or choose another optimizer"
                    )
                view, mark = views[key]
                marks[mark] = 1
                self._check_kind(name, key, value, view)
                if (name, key) in self._numbers:
                    if value is not self._numbers[name, key]:
                        view.fill_(value)
                        self._numbers[name, key] = value
                elif value.device != view.device:
                    on_host.append((view, value))
                elif value is not view:
                    told = f"state {key!r} of parameter {name!r}"
                    rebound.add(told, value, view)
                    state[key] = view
        if given is None:
            rebound.write()
        if on_host:
            values = _together([value for _, value in on_host], self._device)
            torch._foreach_copy_([view for view, _ in on_host], values)
        if marks != self._marks:
            self._marks = marks
            self._exists.copy_(torch.tensor(marks, dtype=torch.uint8))

    def _check_kind(self, name: str, key: str, value: Any, view: Tensor) -> None:
        is_number = (name, key) in self._numbers
        fits = NUMBERS.get(type(value)) == view.dtype if is_number else isinstance(value, Tensor)
        if fits and type(value) is int and not -(1 << 63) <= value < 1 << 63:
            raise ConfigurationError(
                f"the optimizer keeps {key!r} of parameter {name!r} as {value}, which has no room "
                "in 64 bits; keep a float"
            )
        if not fits:
            raise ConfigurationError(
                f"the optimizer keeps {key!r} of parameter {name!r} as {kind_of(value)}, and kept "
                f"{kind_of(view.item() if is_number else view)} in its first two steps, for which "
                "memory is laid out; keep it as that"
            )


class WeightVersions:
    """Holds the versions of a shard's trained parameters while the shard is bound to memory.

    Version v is what v updates of the sub-epoch have made. A shard whose tasks read weights that
    are up to n updates old, as by PipeDream and 2BW, has n + 1 places for versions, and version v
    is in place v mod (n + 1). Place 0 is the shard's own segment, which has version 0 at the begin;
    the others are memory beside it, each laid out by `GradientLayout`. An update copies the newest
    version into the place of the oldest one, which nobody reads any more, and steps there. So
    nothing is written to weights that autograd has saved for a backward to come.

    Args:
        state: its parameters are always the newest version; what it `reads` is the chosen one.
        memory: has the places beside the segment, as they were left.
        staleness: how many updates older the weights are that tasks read.
        newest: the number of updates that were made of the shard in the sub-epoch.
    """

    def __init__(
        self, shard: ShardLayout, state: ShardState, memory: Memory, staleness: int, newest: int
    ) -> None:
        layout = shard.gradients
        parts = memory.split(layout.nbytes)
        assert len(parts) == staleness, f"{len(parts)} versions beside a segment, not {staleness}"
        own = {entry.name: state.values[entry.name] for entry in layout.entries}
        beside = [{entry.name: entry.view(part) for entry in layout.entries} for part in parts]
        self._state, self._places = state, [own, *beside]
        self._newest = newest
        self._read: dict[str, nn.Parameter] = {}
        self._leaves: dict[int, dict[str, nn.Parameter]] = {}  # of versions that were read here
        self._point()

    def read(self, version: int) -> None:
        """Let the tasks that come next read a version.

        Raises:
            ValueError: it is not made yet, or is gone.
        """
        oldest = max(0, self._newest + 1 - len(self._places))
        if not oldest <= version <= self._newest:
            raise ValueError(
                f"weight version {version} is not here, but {oldest} to {self._newest} are"
            )
        place = self._place(version)
        if version not in self._leaves:  # autograd counts what is written to each on its own
            self._leaves[version] = {n: nn.Parameter(view.data) for n, view in place.items()}
        self._read = self._leaves[version]
        self._state.read = {**self._state.params, **self._read}
        self._state.values |= place

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Let gradients of what is read be those of the parameters, which an update takes."""
        params, read = self._state.params, self._read
        for name, leaf in read.items():
            leaf.grad, params[name].grad = params[name].grad, None
        try:
            yield
        finally:
            for name, leaf in read.items():
                params[name].grad, leaf.grad = leaf.grad, None

    def begin_next(self) -> None:
        """Let the parameters be a copy of the newest version, in which an update may step."""
        before = self._place(self._newest)
        self._newest += 1
        self._leaves.pop(self._newest - len(self._places), None)
        self._read, self._state.read = {}, self._state.params
        after = self._place(self._newest)
        if after is not before:
            torch._foreach_copy_([*after.values()], [*before.values()])
            self._point()

    def settle(self) -> None:
        """Have the newest version in the shard's segment, after the last update."""
        own, newest = self._places[0], self._place(self._newest)
        if newest is not own:
            torch._foreach_copy_([*own.values()], [*newest.values()])

    def _place(self, version: int) -> dict[str, Tensor]:
        return self._places[version % len(self._places)]

    def _point(self) -> None:
        self._state.values |= (newest := self._place(self._newest))
        for name, view in newest.items():
            self._state.params[name].data = view


def _together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of few elements on a device, in one copy for each of their types."""
    flat: dict[torch.dtype, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        flat[dtype] = torch.cat([t.reshape(-1) for t in tensors if t.dtype == dtype]).to(device)
    found = []
    for tensor in tensors:
        part, flat[tensor.dtype] = flat[tensor.dtype].tensor_split([tensor.numel()])
        found.append(part.view(tensor.shape))
    return found


def beside_state_dict(scheduler: Any | None) -> dict[str, Any]:
    """Return the plain attributes of an LR scheduler that its `state_dict` leaves out, as JSON.

    They are named with its class, of several schedulers with the number of each.
    """
    found = {}
    for number, each in enumerate(schedulers_of(scheduler)):
        kind, given = type(each).__name__, each.state_dict()
        which = f"{number} ({kind})" if isinstance(scheduler, SchedulerList) else kind
        for name, value in vars(each).items():
            if name not in given:
                with suppress(ConfigurationError):  # no plain value, such as the optimizer
                    found[f"{which} changes its attribute {name!r}"] = encode(value, name)
    return found


def check_in_state_dict(scheduler: Any | None, before: Mapping[str, Any]) -> None:
    """Check that an LR scheduler has changed nothing that would be lost with the next hop.

    Args:
        before: what `beside_state_dict` gave when it was made.

    Raises:
        ConfigurationError: it has; the message names the attribute.
    """
    for told, value in beside_state_dict(scheduler).items():
        if value != before.get(told):
            raise ConfigurationError(
                f"LR scheduler {told}, which its state_dict leaves out, so a hop loses it; let its "
                "state_dict return it"
            )


SAMPLED = 16
"""Words of each parameter that are looked at in each step; a write to all of it changes some."""


class WordSamples:
    """Holds some words of each trained parameter of shards, so that it is seen if they change."""

    def __init__(self, layout: TrialLayout) -> None:
        self._layout = layout
        self._places: dict[int, tuple[Tensor, Sequence[str]]] = {}  # of the words of each shard
        self._taken: dict[int, Tensor] = {}

    def __contains__(self, k: int) -> bool:
        """Return whether words of a shard were taken."""
        return k in self._taken

    def take(self, k: int, memory: Memory) -> None:
        """Take the words of a shard from its trainable segment."""
        self._taken[k] = self._words(k, memory)

    def changed(self, k: int, memory: Memory) -> tuple[Literal["parameter"], str] | None:
        """Return a parameter of a shard whose words are others than those taken, or None."""
        now, before = self._words(k, memory), self._taken[k]
        if torch.equal(now, before):
            return None
        return "parameter", self._places[k][1][int((now != before).nonzero()[0])]

    def pop(self, k: int, default: None) -> None:
        """Let go of the words of a shard, if there are any."""
        self._taken.pop(k, default)

    def clear(self) -> None:
        """Let go of all words."""
        self._taken.clear()

    def _words(self, k: int, memory: Memory) -> Tensor:
        words = memory[: memory.numel() // 8 * 8].view(torch.int64)
        if k not in self._places:
            names: dict[int, str] = {}
            for entry in self._layout.shards[k].trainable.entries:
                kind, _, name = entry.name.partition(":")
                first, count = entry.offset // 8, max(1, entry.nbytes // 8)
                for number in range(min(count, SAMPLED)) if kind == "param" else ():
                    names[first + number * count // SAMPLED] = name
            names = {at: name for at, name in names.items() if at < len(words)}
            self._places[k] = torch.tensor(list(names), dtype=torch.int64), list(names.values())
        return words.index_select(0, self._places[k][0])


_TAG = "!"  # the key that marks a value which JSON lacks


def make_cursor(
    step: int,
    optimizer: torch.optim.Optimizer,
    scheduler: Any | None,
    scaling: GradScaling | None,
) -> dict:
    """Return what a shard needs beside its segments to go on at `step`.

    Raises:
        ConfigurationError: an option or the scheduler's state has a value that is not plain.
    """
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    state = None if scheduler is None else scheduler.state_dict()
    scaler = {} if scaling is None else {"scaler": scaling.state()}
    return {
        "step": step,
        "groups": [encode(group, f"param group {i}") for i, group in enumerate(groups)],
        "scheduler": None if state is None else encode(state, type(scheduler).__name__),
        **scaler,
    }


def restore_cursor(
    cursor: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    scheduler: Any | None,
    scaling: GradScaling | None,
    schedule: LRSchedule,
) -> None:
    """Bring a new optimizer and scheduler to the point at which the cursor was made.

    Args:
        scaling: what goes on with the cursor's scaler.
    """
    if "groups" not in cursor:
        skipped = 0 if scaling is None else scaling.skipped
        schedule.advance(scheduler, cursor["step"] - skipped, cursor["epochs"])
        return
    for group, options in zip(optimizer.param_groups, cursor["groups"], strict=True):
        group.update(decode(options))
    if scheduler is not None:
        _load(scheduler, decode(cursor["scheduler"]))
        # The optimizer stepped on another worker; without this mark torch would warn.
        for each in members_of(optimizer):
            each._opt_called = True  # type: ignore[attr-defined]


class _Inner(NamedTuple):
    """Holds the state of a scheduler that another one has among its own."""

    state: dict[str, Any]


def _load(scheduler: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, _Inner):
            state[name] = inner = vars(scheduler)[name]
            _load(inner, value.state)
    scheduler.load_state_dict(state)


def encode(value: Any, where: str) -> Any:
    """Return a plain Python value as JSON that `decode` turns back into an equal value.

    A scheduler that another one has becomes its state.

    Raises:
        ConfigurationError: the value is not plain; the message says `where` it is.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "of": repr(float(value))}
    if type(value) is list:
        return [encode(each, where) for each in value]
    if type(value) is tuple:
        return {_TAG: "tuple", "of": [encode(each, where) for each in value]}
    if type(value) in (dict, Counter):
        plain = type(value) is dict and all(isinstance(k, str) and k != _TAG for k in value)
        if plain:
            return {key: encode(each, f"{where}[{key!r}]") for key, each in value.items()}
        pairs = [[encode(k, where), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {_TAG: "counter" if type(value) is Counter else "dict", "of": pairs}
    if isinstance(value, LRScheduler):
        return {_TAG: "scheduler", "of": encode(value.state_dict(), where)}
    raise ConfigurationError(
        f"{where} is {kind_of(value)}, which can't travel as JSON; "
        "use plain numbers, strings, lists and dicts in optimizer options and LR schedulers"
    )


def decode(value: Any) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case None:
            return {key: decode(each) for key, each in value.items()}
        case "float":
            return float(value["of"])
        case "tuple":
            return tuple(decode(each) for each in value["of"])
        case "scheduler":
            return _Inner(decode(value["of"]))
        case "counter":
            return Counter({decode(k): decode(v) for k, v in value["of"]})
        case _:
            return {decode(k): decode(v) for k, v in value["of"]}


class EarlyGradients:
    """Finds gradients that a forward gives itself, where they would be lost, or added elsewhere.

    A shard that leaves after its forward leaves its gradients behind, which only backward changes.

    Attributes:
        resting: the shards whose gradients stay at their parameters, so that a forward may add.

    Args:
        params: the parameters of each shard that was here.
        model: has them, those that are frozen before a sub-epoch as such.
    """

    def __init__(self, params: Mapping[int, Mapping[str, nn.Parameter]], model: nn.Module) -> None:
        self._frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        self.resting: set[int] = set()
        self._params = params
        self._runs = self._follows = False
        self._noted: dict[int, dict[str, tuple[Tensor, int]]] = {}

    def begin(self, here: Iterable[int], follows: bool) -> None:
        """Note the gradients before a forward, which may follow others of its window."""
        self._runs, self._follows = True, follows
        for k in here:
            self.note(k)

    def note(self, k: int) -> None:
        """Note the gradients of a shard as they are, while a forward runs."""
        if self._runs:
            self._noted[k] = self._found(k)

    def forget(self, k: int) -> None:
        """Refer to no gradient of a shard any more."""
        self._noted.pop(k, None)

    def check(self, step: int, k: int, memory: Memory | None) -> None:
        """Check a shard that comes, leaves or gets memory for its gradients.

        Raises:
            StepDiffers: the forward gave one of its parameters a gradient.
            ConfigurationError: one that was frozen has a gradient.
        """
        if not self._runs or not (memory is not None or self._follows) or k in self.resting:
            return
        noted = self._noted.get(k, {})
        for name, (gradient, version) in self._found(k).items():
            before = noted.get(name)
            if before is None or before[0] is not gradient or before[1] != version:
                if name in self._frozen:
                    raise trains_otherwise(name, True)
                raise StepDiffers(
                    f"in step {step}, the forward gives parameter {name!r} a gradient, while those "
                    "of its shard are elsewhere; it takes gradients itself, or assigns them: leave "
                    "them to the backward, or return what the forward adds as a part of the loss"
                )

    def end(self, step: int, memory: Mapping[int, Memory | None]) -> None:
        """End the forward, after a check of the shards that have no memory for gradients."""
        for k in (k for k, each in memory.items() if each is None):
            self.check(step, k, None)
        self._runs = False
        self._noted.clear()

    def end_backward(self, k: int, memory: Memory | None) -> None:
        """Note that gradients of a shard stay where they are, if they have no other memory."""
        if memory is None:
            self.resting.add(k)

    def _found(self, k: int) -> dict[str, tuple[Tensor, int]]:
        gradients = ((name, p.grad) for name, p in self._params.get(k, {}).items())
        return {name: (each, each._version) for name, each in gradients if each is not None}
