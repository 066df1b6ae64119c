"""Binds a model's own parameters and buffers to the memory of shards, and gives back its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.differences import checksum, same_bits
from cerebro_hydra.shards.layout import Segments, ShardLayout
from cerebro_hydra.shards.state import ShardState


@contextmanager
def bound_model(model: nn.Module) -> Iterator[BoundModel]:
    """Let shards be bound to a model for a while; afterwards it has its own tensors again."""
    bound = BoundModel(model)
    try:
        yield bound
    finally:
        bound.restore()


class BoundModel:
    """Binds a model to shards; whoever refers to its parameters sees the shards' values.

    A tied buffer has several places in the model and goes by its first name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._params = dict(model.named_parameters())
        self._data = {name: p.data for name, p in self._params.items()}
        self._trains = {name: p.requires_grad for name, p in self._params.items()}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        self._own: dict[str, Tensor] = {}
        self._lent: dict[str, Tensor] = {}
        self._unwritten: dict[str, Tensor] = {}  # as they must be after training
        first: dict[int, str] = {}
        modules = dict(model.named_modules(remove_duplicate=False))
        for name, buffer in model.named_buffers(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            original = first.setdefault(id(buffer), name)
            self._places.setdefault(original, []).append((modules[owner], leaf))
            self._own[original] = buffer
        self._versions = {name: t._version for name, t in (self._params | self._own).items()}
        self._bound: dict[str, Tensor] = {}  # the memory of each parameter that trains
        self._frozen: dict[str, int] = {}  # the checksum of each other parameter

    def bind(self, layout: ShardLayout, segments: Segments) -> ShardState:
        """Let the model train on a shard's segments; the returned state has its parameters."""
        for entry in (*layout.frozen.entries, *layout.trainable.entries):
            kind, _, name = entry.name.partition(":")
            if kind == "param" and self._params[name].data_ptr() != self._data[name].data_ptr():
                raise RuntimeError(
                    f"the forward assigned to parameter {name!r} before it entered its module"
                )
        state = ShardState(layout, segments, parameters=self._params)
        frozen = {entry.name.partition(":")[2] for entry in layout.frozen.entries}
        for name, parameter in state.params.items():
            parameter.grad = None
            if name in frozen:
                self._frozen[name] = checksum(parameter)
            else:
                self._bound[name] = parameter.data
        # Other trials share the frozen bytes, so a forward that writes to them gets a copy.
        self.lend_buffers({n: b.clone() if n in frozen else b for n, b in state.buffers.items()})
        self._unwritten |= {n: b for n, b in state.buffers.items() if n in frozen}
        return state

    def bind_evaluated(self, layout: ShardLayout, segments: Segments) -> None:
        """Let the model evaluate a shard, with averages if there are any and copies of buffers."""
        state = ShardState(layout, segments)
        for name, tensor in state.evaluated.items():
            self._params[name].data = tensor.detach()
        self.lend_buffers({name: buffer.clone() for name, buffer in state.buffers.items()})

    def restore(self) -> None:
        """Give the model its own parameters and buffers back, without gradients."""
        for name, parameter in self._params.items():
            parameter.data = self._data[name]
            parameter.grad = None
        self._bound.clear()
        self._put({name: self._own[name] for name in self._lent})
        self._lent.clear()

    def collect_written(self) -> None:
        """Copy what the forward assigned anew into the memory that was lent."""
        for name, memory in self._bound.items():
            parameter = self._params[name]
            if parameter.data_ptr() != memory.data_ptr():
                memory.copy_(parameter.data)
                parameter.data = memory
        for name, lent in self._lent.items():
            found = self._current(name)
            if found is not lent:
                lent.copy_(found.detach())
                self._put({name: lent})

    def check_unwritten(self) -> None:
        """Check that training wrote to no tensor that it did not write to in the first steps.

        Raises:
            ConfigurationError: it wrote to a buffer or frozen parameter, or changed what trains,
                which would not hop.
        """
        for name, parameter in self._params.items():
            if parameter.requires_grad != self._trains[name]:
                raise ConfigurationError(
                    f"the forward changed requires_grad of parameter {name!r} to "
                    f"{parameter.requires_grad}, which would not hop; choose in the factory what "
                    "trains, or detach a layer's output while its weights shall not"
                )
        for name, before in self._frozen.items():
            parameter = self._params[name]
            # Writing to `.data` counts no version.
            if parameter._version != self._versions[name] or checksum(parameter) != before:
                raise _written_late("frozen parameter", name)
        for name, own in self._own.items():
            if name in self._unwritten:
                unchanged = same_bits(self._current(name), self._unwritten[name])
            elif name in self._lent:
                continue
            else:
                unchanged = self._current(name) is own and own._version == self._versions[name]
            if not unchanged:
                raise _written_late("buffer", name)

    def _current(self, name: str) -> Tensor:
        ((module, leaf), *_) = self._places[name]
        buffer = module._buffers[leaf]
        assert buffer is not None
        return buffer

    def buffers_in(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the buffers of a module and its children, by their names in the model."""
        inside = set(map(id, module.modules()))
        return {
            name: lent
            for name, lent in self._lent.items()
            if any(id(owner) in inside for owner, _ in self._places[name])
        }

    @contextmanager
    def replaced_buffers(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the model use other tensors as buffers for a while."""
        self._put(tensors)
        try:
            yield
        finally:
            self._put({name: self._lent[name] for name in tensors})

    def lend_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Let the model use other tensors as buffers until it is restored."""
        self._lent |= tensors
        self._put(tensors)

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            for module, leaf in self._places[name]:
                module._buffers[leaf] = tensor


def _written_late(kind: str, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"the forward wrote to {kind} {name!r}, as it did not in the trial's first steps; let it "
        f"write to that {kind} in every forward, or never"
    )
