"""Binds a model's own parameters and buffers to the memory of shards, and gives back its own.

What a microbatch reads while the shard that has it may be off the device, it holds copies of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal
from weakref import ref

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.shards.cut.small_buffers import is_small
from cerebro_hydra.shards.cut.values import StandIns, TensorKey, absent_value
from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.shards.engine.differences import checksum, checksums, same_bits
from cerebro_hydra.shards.engine.layout import Segments, ShardLayout
from cerebro_hydra.shards.engine.state import ShardState, trains_otherwise
from cerebro_hydra.shards.places import (
    BoundMark,
    Places,
    Rebound,
    StepNotes,
    TensorMark,
    is_moved,
    made_anew,
)

IF_PERSISTENT = ", or register it with persistent=True"
"""What lets a small buffer hop that no checkpoint holds."""

_KINDS: Mapping[str, Literal["parameter", "buffer"]] = {"param": "parameter", "buffer": "buffer"}
"""Kinds of tensors by what the entries of a layout begin with."""


@contextmanager
def bound_model(model: nn.Module, shards: Sequence[ShardLayout] = ()) -> Iterator[BoundModel]:
    """Let shards be bound to a model for a while; afterwards it has its own tensors again."""
    bound = BoundModel(model, shards)
    try:
        yield bound
    finally:
        bound.restore()


class BoundModel:
    """Binds a model to shards; whoever refers to its parameters sees the shards' values.

    A tied buffer has several places in the model and goes by its first name.

    Args:
        shards: those that train. While one is away, the model has stand-ins for its parameters and
            for the buffers that its training changes; it has its own of those that stay as they
            are. Without shards nobody asks what was written to while its shard was away.
    """

    def __init__(self, model: nn.Module, shards: Sequence[ShardLayout] = ()) -> None:
        self._params = dict(model.named_parameters())
        self._data = {name: p.data for name, p in self._params.items()}
        self._away = dict(self._data)  # the values while no shard is bound to them
        for parameter in self._params.values():
            parameter.grad = None
        self._trains = {name: p.requires_grad for name, p in self._params.items()}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        self._own: dict[str, Tensor] = {}  # or what stands for it
        self._lent: dict[str, Tensor] = {}
        self._lent_memory: dict[str, Tensor] = {}  # of each, which code may give other memory
        self._here: list[ShardState] = []
        self._notes = StepNotes()
        self._unwritten: dict[str, Tensor] = {}  # as they must be after training
        first: dict[int, str] = {}
        modules = dict(model.named_modules(remove_duplicate=False))
        for name, buffer in model.named_buffers(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            original = first.setdefault(id(buffer), name)
            self._places.setdefault(original, []).append((modules[owner], leaf))
            self._own[original] = buffer
        self._original = dict(self._own)
        self._absent: dict[str, Tensor] = {}  # what stands for parameters
        self._bound: dict[str, Tensor] = {}  # the memory of each parameter that trains
        self._frozen: dict[str, int] = {}  # the checksum of each other parameter
        self._homes = {  # of each parameter
            name: (modules[name.rpartition(".")[0]], name.rpartition(".")[2])
            for name in self._params
        }
        self._keys = [self._keys_in(shard) for shard in shards]
        self._stand_ins = [self._stand_ins_for(shard) for shard in shards]
        # What the model has of each tensor whose shard is away, if it is no copy.
        self._marks: dict[TensorKey, TensorMark] = {}
        for stand_ins in self._stand_ins:
            for (kind, name), tensor in stand_ins.tensors.items():
                if kind == "parameter":
                    self._absent[name] = tensor
                    self._send_away(name)
                else:
                    self._own[name] = tensor
                    self._put({name: tensor})
        shown = {key for each in self._stand_ins for key in each.tensors}
        kept = [key for keys in self._keys for key in keys if key[0] == "buffer"]
        self._marks |= {key: TensorMark.on(self._own[key[1]]) for key in kept}
        self._versions = {name: t._version for name, t in (self._params | self._own).items()}
        self.elsewhere = self.places_of(shards)
        """Where the model has what no operation may use until its shard comes."""
        self._contents = contents({key: self._own[key[1]] for key in kept if key not in shown})

    @staticmethod
    def _keys_in(shard: ShardLayout) -> list[TensorKey]:
        """Return the parameters and buffers of a shard."""
        entries = (*shard.frozen.entries, *shard.trainable.entries)
        named = (entry.name.partition(":")[::2] for entry in entries)
        return [(_KINDS[kind], name) for kind, name in named if kind in _KINDS]

    def places_of(self, shards: Iterable[ShardLayout]) -> Places:
        """Return where the model has, at present, parameters and buffers that training may change.

        Others it has as they are, wherever their shard is.
        """
        found = Places()
        for shard in shards:
            constant = {entry.name for entry in shard.frozen.entries}
            for kind, name in self._keys_in(shard):
                if kind == "parameter":
                    found.add(f"{kind} {name!r}", self._params[name])
                elif f"{kind}:{name}" not in constant:
                    found.add(f"{kind} {name!r}", self._own[name])
        return found

    def _stand_ins_for(self, shard: ShardLayout) -> StandIns[TensorKey]:
        """Return stand-ins for all parameters of a shard, and for its buffers that move."""
        constant = {entry.name for entry in shard.frozen.entries}
        found: dict[TensorKey, Tensor] = {}
        for kind, name in self._keys_in(shard):
            tensor = self._params[name] if kind == "parameter" else self._own[name]
            moves = f"buffer:{name}" not in constant and tensor.is_floating_point()
            if kind == "parameter" or moves:
                found[kind, name] = tensor
        return StandIns(found)

    def _absent_value(self, name: str) -> Tensor:
        stand_in = self._absent.get(name)
        return absent_value(self._params[name]) if stand_in is None else stand_in

    def _send_away(self, name: str) -> None:
        """Let the model have nothing of a parameter but what stands for it."""
        parameter = self._params[name]
        parameter.data = self._away[name] = self._absent_value(name)
        self._bound.pop(name, None)
        self._marks["parameter", name] = TensorMark.on(parameter)

    def written_while_away(self, k: int, content: bool) -> TensorKey | None:
        """Return a tensor of a shard that is away to which somebody has written, if there is one.

        Args:
            k: the number of the shard.
            content: whether bytes are looked at, too; for those of a device it is waited for.
        """
        if not self._keys:
            return None
        for key in self._keys[k]:
            kind, name = key
            mark = self._marks.get(key)
            if kind == "buffer":
                if name in self._lent:
                    continue  # a copy, of which others know
                if mark is None or self._found(name) is not mark.tensor or mark.is_written:
                    return key
            elif mark is not None:
                if mark.is_written:
                    return key
            elif self._params[name].data_ptr() != self._away[name].data_ptr():
                return key  # it was a copy
        return self._stand_ins[k].written() if content else None

    def written_apart(self) -> TensorKey | None:
        """Return a tensor to which somebody wrote while its shard was away, if there is one.

        All bytes are looked at: of what stands for tensors of shards, which may be here by now, and
        of the model's own buffers that no training changes.
        """
        for stand_ins in self._stand_ins:
            if (key := stand_ins.written()) is not None:
                return key
        now = contents({key: self._own[key[1]] for key in self._contents})
        for key, before in self._contents.items():
            if now[key] != before:
                return key
        return None

    def written_idle(self) -> TensorKey | None:
        """Return a tensor to which somebody wrote, of a model that no shard is ever bound to."""
        for k in range(len(self._keys)):
            if (key := self.written_while_away(k, content=False)) is not None:
                return key
        for name, own in self._own.items():
            if self._found(name) is not own or own._version != self._versions[name]:
                return "buffer", name
        replaced = self._replaced()
        return self.written_apart() if replaced is None else ("parameter", replaced)

    def _replaced(self) -> str | None:
        """Return a parameter in whose place the model has another tensor."""
        for name, (module, leaf) in self._homes.items():
            if module._parameters.get(leaf) is not self._params[name]:
                return name
        return None

    def bind(self, layout: ShardLayout, segments: Segments) -> ShardState:
        """Let the model train on a shard's segments; the returned state has its parameters."""
        state = self.bind_params(layout, segments)
        # Other trials share the frozen bytes, so a forward that writes to them gets a copy.
        buffers, constant = state.buffers, state.constant
        self.lend_buffers({n: b.clone() if n in constant else b for n, b in buffers.items()})
        self._unwritten |= {n: b for n, b in buffers.items() if n in constant}
        return state

    def bind_params(self, layout: ShardLayout, segments: Segments) -> ShardState:
        """Bind a shard, without its buffers."""
        state = ShardState(layout, segments, parameters=self._params)
        self._here.append(state)
        for name, value in state.values.items():
            self._marks.pop(("parameter", name), None)
            if name not in state.constant:
                self._bound[name] = value
            elif name not in self._frozen:
                self._frozen[name] = checksum(value)
        return state

    def use_copies(self, copies: Mapping[str, Tensor]) -> None:
        """Let the model use copies that stay while their shard leaves its memory."""
        for name in copies.keys() & self._params.keys():
            self._away[name] = copies[name].detach()
            self._marks.pop(("parameter", name), None)
            self._point(name, self._away[name])
        self.lend_buffers({n: copy for n, copy in copies.items() if n in self._own})

    def end_copies(self, names: Collection[str], state: ShardState | None = None) -> None:
        """Let the model use copies no more, but the shard's memory if it is there."""
        for name in self._params.keys() & names:
            if state is None:
                self._send_away(name)
            else:
                self._away[name] = self._absent_value(name)
                self._point(name, state.values[name])
        for name in self._lent.keys() & names:
            self._put({name: self._own[name]})
            del self._lent[name], self._lent_memory[name]

    def gone_gradient(self, name: str) -> Tensor | None:
        """Return what stands for the gradient of a parameter after its update; it reads as NaN."""
        return self._absent.get(name)

    def absent(self) -> set[str]:
        """Return the parameters whose shard is away, and of which there is no copy."""
        return {name for kind, name in self._marks if kind == "parameter"}

    def check_here(self, module: nn.Module, unit: str) -> None:
        """Check that the parameters of a module are there, which runs with another shard.

        Raises:
            StepDiffers: the shard that has them is away.
        """
        if (name := self.away(module)) is not None:
            raise StepDiffers(
                f"the forward enters {unit!r} while another shard runs, and parameter {name!r} "
                "has left the device; set recompute=False, or cut elsewhere"
            )

    def away(self, module: nn.Module) -> str | None:
        """Return a parameter of a module whose shard is away, None if all are here."""
        mine = set(map(id, module.parameters()))
        named = ((n, p) for n, p in self._params.items() if ("parameter", n) in self._marks)
        return next((name for name, parameter in named if id(parameter) in mine), None)

    def _point(self, name: str, value: Tensor) -> None:
        self._params[name].data = value
        if name in self._bound:
            self._bound[name] = value

    def unbind(self, state: ShardState, copied: Collection[str]) -> None:
        """Let the model refer to a shard's memory no more; it goes on with what was copied."""
        self._here = [each for each in self._here if each is not state]
        for name in state.values.keys() - copied:
            self._send_away(name)

    def bind_values(self, state: ShardState) -> None:
        """Let the model read the values of a shard's parameters."""
        for name, value in state.values.items():
            self._params[name].data = value

    def restore(self) -> None:
        """Give the model its own parameters and buffers back, without gradients."""
        for name, parameter in self._params.items():
            parameter.data = self._data[name]
            parameter.grad = None
        self._bound.clear()
        self._marks.clear()
        self._away = dict(self._data)
        stand_ins, self._own = self._own, self._original
        self._put({n: o for n, o in self._own.items() if n in self._lent or o is not stand_ins[n]})
        for name, lent in self._lent.items():  # whoever kept it must not write to what is published
            lent.data = self._own[name].data
            vars(self._own[name]).update(vars(lent))  # what it was given is looked at afterwards
        self._lent.clear()
        self._lent_memory.clear()
        self._here.clear()

    def collect_written(
        self, state: ShardState | None = None, optimizer: Optimizer | None = None
    ) -> None:
        """Copy what the trial's code assigned anew into the memory that was lent.

        Autograd may have saved what that memory held, so no backward through it may come after.

        Args:
            state: the shard whose tensors are collected; None collects those of all.
            optimizer: that of all shards, whose state is kept, too.

        Raises:
            ConfigurationError: one was given another shape or type, or memory of another one.
            StepDiffers: it was given that of another one, while shards are collected one by one.
        """
        rebound = Rebound([*self._here, self], self._notes)
        for name in self._bound if state is None else self._bound.keys() & state.values.keys():
            parameter, memory = self._params[name], self._bound[name]
            if is_moved(parameter, memory):
                rebound.add(f"parameter {name!r}", parameter, memory)
                parameter.data = memory
        for name in self._lent if state is None else self._lent.keys() & state.buffers.keys():
            lent, found, memory = self._lent[name], self._current(name), self._lent_memory[name]
            if found is not lent or is_moved(found, memory):
                rebound.add(f"buffer {name!r}", found, memory)
                self._put({name: lent})
            else:
                self._notes.check(f"buffer {name!r}", memory)
            if is_moved(lent, memory):
                lent.data = memory
        if optimizer is not None:
            for each in self._here:
                each.keep_optimizer(optimizer, rebound)
        rebound.write(StepDiffers if len(self._keys) > 1 else ConfigurationError)

    def add_to(self, places: Places) -> None:
        """Add where copies lie that the model has in place of a shard's tensors."""
        for name, parameter in self._params.items():
            if ("parameter", name) not in self._marks:
                kind = "parameter" if name in self._bound else "frozen parameter"
                places.add(f"{kind} {name!r}", self._bound.get(name, parameter.data))
        for name, memory in self._lent_memory.items():
            places.add(f"buffer {name!r}", memory)

    def begin_step(self) -> None:
        """Begin an optimizer step."""
        self._notes.begin_step()

    def end_step(self) -> None:
        """Check what a step has used of shards that are elsewhere, and see `StepNotes`.

        Raises:
            StepDiffers: it has used some.
        """
        if self.elsewhere.used is not None:
            raise StepDiffers(self.elsewhere.used)
        self._notes.end_step()

    def keys_of(self, state: ShardState, buffers: bool = True) -> Iterator[TensorKey]:
        """Yield which tensors a shard has, but parameters that training leaves alone.

        Args:
            buffers: whether buffers are wanted, too.
        """
        yield from (("parameter", name) for name in state.values if name not in state.constant)
        yield from (("buffer", name) for name in state.buffers if buffers)

    def current(self, key: TensorKey) -> Tensor:
        """Return the tensor that the model has at present."""
        kind, name = key
        return self._params[name] if kind == "parameter" else self._current(name)

    def check_unwritten(self) -> None:
        """Check that training wrote to no tensor that it did not write to in the first steps.

        Raises:
            ConfigurationError: it wrote to a buffer or frozen parameter, or changed what trains,
                which would not hop.
        """
        self.check_trains(self._params)
        if (replaced := self._replaced()) is not None:
            raise ConfigurationError(
                f"training put another tensor in the place of parameter {replaced!r}, which would "
                "not hop; write to the parameter in place, or register a buffer"
            )
        self.check_frozen(self._frozen)
        for name, own in self._own.items():
            found, remedy = self._current(name), ""
            if name in self._unwritten:
                unchanged = same_bits(found, self._unwritten[name])
            elif name in self._lent or ("buffer", name) in self._marks:
                continue
            else:  # no shard has it, because no checkpoint holds it
                if found.shape != own.shape:
                    raise made_anew(f"buffer {name!r}", own, found)
                remedy = IF_PERSISTENT if is_small(own) else ""
                unchanged = found is own and own._version == self._versions[name]
            if not unchanged:
                raise written_late("buffer", name, remedy)

    def check_trains(self, names: Iterable[str]) -> None:
        """Check that these parameters train, or are frozen, as in the trial's first steps.

        Raises:
            ConfigurationError: training changed that, which would not hop.
        """
        for name in names:
            trains = self._params[name].requires_grad
            if trains != self._trains[name]:
                raise trains_otherwise(name, trains)

    def check_frozen(self, names: Iterable[str]) -> None:
        """Check that training wrote to none of these parameters; see `check_unwritten`."""
        for name in names:
            parameter, before = self._params[name], self._frozen.get(name)
            if before is None or parameter.data_ptr() == self._away[name].data_ptr():
                continue
            # Writing to `.data` counts no version.
            if parameter._version != self._versions[name] or checksum(parameter) != before:
                raise written_late("frozen parameter", name)

    def _found(self, name: str) -> Tensor | None:
        """Return what the model has as a buffer, None if that was deleted."""
        ((module, leaf), *_) = self._places[name]
        return module._buffers.get(leaf)

    def _current(self, name: str) -> Tensor:
        if (buffer := self._found(name)) is None:
            raise ConfigurationError(
                f"training took buffer {name!r} away, which other workers would still have; let "
                "another buffer say whether it is used"
            )
        return buffer

    def buffers_in(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the buffers of a module and its children, by their names in the model."""
        inside = set(map(id, module.modules()))
        return {
            name: self._current(name)
            for name in self._lent
            if any(id(owner) in inside for owner, _ in self._places[name])
        }

    def parameters_in(self, module: nn.Module) -> list[str]:
        """Return the names of the parameters of a module and its children."""
        inside = set(map(id, module.parameters()))
        return [name for name, parameter in self._params.items() if id(parameter) in inside]

    def marks_of(self, names: Iterable[str]) -> dict[str, BoundMark]:
        """Return marks on the parameters among these that train and are here."""
        bound = {name: self._bound[name] for name in names if name in self._bound}
        return {n: BoundMark(ref(m), TensorMark.on(self._params[n])) for n, m in bound.items()}

    def is_there_still(self, name: str, mark: BoundMark) -> bool:
        """Return whether a parameter's shard has not left since it was marked."""
        memory = mark.memory()
        return memory is not None and self._bound.get(name) is memory

    @contextmanager
    def replaced_buffers(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the model use other tensors as buffers for a while."""
        before = {name: self._current(name) for name in tensors}
        self._put(tensors)
        try:
            yield
        finally:
            self._put(before)

    def lend_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Let the model use other tensors as buffers until it is restored."""
        self._lent |= tensors
        self._lent_memory |= {name: tensor.detach() for name, tensor in tensors.items()}
        self._put(tensors)

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            for module, leaf in self._places[name]:
                module._buffers[leaf] = tensor


def contents(tensors: Mapping[TensorKey, Tensor]) -> dict[TensorKey, str | int]:
    """Return what tells the contents of tensors: digests, or checksums of those on a device."""
    found: dict[TensorKey, str | int] = {
        key: tensor_digest(each) for key, each in tensors.items() if each.is_cpu
    }
    elsewhere = {key: each for key, each in tensors.items() if not each.is_cpu}
    return found | dict(zip(elsewhere, checksums(elsewhere.values()), strict=True))


class ShardMarks:
    """Knows what a model has of a shard that others must leave alone, beside what stands for it.

    That is its memory, from its update until the next window, and copies of what it has while it
    is away. What is written there would be lost, or would come in another order than in plain
    training.

    Args:
        gone: copies of buffers that the model had before.
        content: whether bytes are looked at, too.
    """

    def __init__(
        self,
        bound: BoundModel,
        keys: Iterable[TensorKey],
        gone: Mapping[str, Tensor],
        content: bool,
    ) -> None:
        self._bound = bound
        self._marks = {key: TensorMark.on(bound.current(key)) for key in keys}
        self._gone: dict[TensorKey, TensorMark] = {
            ("buffer", name): TensorMark.on(each) for name, each in gone.items()
        }
        self._contents = contents(self._tensors(self._marks)) if content else {}
        self._gone_contents = contents(self._tensors(self._gone)) if content else {}

    @staticmethod
    def _tensors(marks: Mapping[TensorKey, TensorMark]) -> dict[TensorKey, Tensor]:
        return {key: mark.tensor for key, mark in marks.items()}

    def left(self) -> None:
        """Look at parameters no more, because the model has what stands for them."""
        for key in [key for key in self._marks if key[0] == "parameter"]:
            del self._marks[key]
            self._contents.pop(key, None)

    def written(self) -> TensorKey | None:
        """Return a tensor that was written to, or None."""
        return (
            self._first_written(self._marks, self._contents)
            or self._first_written(self._gone, self._gone_contents)
            or next(
                (key for key, mark in self._marks.items() if self._is_replaced(key, mark)), None
            )
        )

    def _is_replaced(self, key: TensorKey, mark: TensorMark) -> bool:
        return key[0] == "buffer" and self._bound.current(key) is not mark.tensor

    @staticmethod
    def _first_written(
        marks: Mapping[TensorKey, TensorMark], before: Mapping[TensorKey, str | int]
    ) -> TensorKey | None:
        for key, mark in marks.items():
            if mark.is_written:
                return key
        if not before:
            return None
        now = contents({key: marks[key].tensor for key in before})
        return next((key for key, content in before.items() if now[key] != content), None)


class HeldTensors:
    """Holds copies of shared parameters and of all buffers for the time of a microbatch.

    A view of them that the forward keeps stays good, wherever the shard is.

    Args:
        shared: the parameters that may be read while another shard than theirs runs.
    """

    def __init__(self, shared: Collection[str]) -> None:
        self._shared = shared
        self.copies: dict[str, Tensor] = {}

    def hold(self, state: ShardState) -> Mapping[str, Tensor]:
        """Copy what is to be held of a shard, if it is not held yet, and return the copies."""
        for name in state.values.keys() & self._shared:
            if name not in self.copies:
                trains = state.params[name].requires_grad
                self.copies[name] = state.values[name].clone().requires_grad_(trains)
        for name, buffer in state.buffers.items():
            if name not in self.copies:
                self.copies[name] = buffer.clone()
        return {name: self.copies[name] for name in self.names_of(state)}

    def names_of(self, state: ShardState) -> set[str]:
        """Return what is held of a shard."""
        return self.copies.keys() & (state.values.keys() | state.buffers.keys())

    def drop(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Hold the copies of these names no more, and return them."""
        return {name: self.copies.pop(name) for name in names if name in self.copies}

    def write_back(self, state: ShardState, by_modules: bool) -> None:
        """Copy to a shard's memory what the forward wrote to the copies.

        Args:
            by_modules: whether the model's own code runs, which may write to parameters that train.

        Raises:
            ConfigurationError: it wrote to a buffer that it left alone in the first steps.
        """
        for name in self.names_of(state):
            copy, buffer = self.copies[name], state.buffers.get(name)
            if buffer is None:
                if name not in state.constant and (by_modules or not copy.requires_grad):
                    state.values[name].copy_(copy.detach())
            elif name not in state.constant:
                buffer.copy_(copy)
            elif not same_bits(copy, buffer):
                raise written_late("buffer", name)


def storages(state: ShardState) -> dict[str, StorageWeakRef]:
    """Return the memory of each parameter's value."""
    return {name: StorageWeakRef(v.untyped_storage()) for name, v in state.values.items()}


def check_released(memory: Mapping[str, StorageWeakRef]) -> None:
    """Check that nobody refers to the memory of parameters any more.

    Raises:
        StepDiffers: the forward keeps a view of one.
    """
    for name, storage in memory.items():
        if not storage.expired():
            raise StepDiffers(
                f"the forward keeps a view of parameter {name!r}, whose shard has to leave the "
                "device before the forward is over; set recompute=False, or cut elsewhere"
            )


def written_late(kind: str, name: str, remedy: str = "") -> ConfigurationError:
    """Return the error of a forward or hook that writes to a tensor only after the first steps."""
    if kind == "buffer":
        remedy = f", such as by `buffer += 0`{remedy}"
    return ConfigurationError(
        f"a forward or hook wrote to {kind} {name!r}, as none did in the trial's first steps; let "
        f"it write to that {kind} in every step{remedy}, or never"
    )
