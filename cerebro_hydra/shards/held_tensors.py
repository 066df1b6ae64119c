"""Holds copies of what a microbatch reads while the shard that has it may be off the device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.differences import same_bits
from cerebro_hydra.shards.state import ShardState


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

    def drop(self, names: Iterable[str]) -> list[str]:
        """Hold the copies of these names no more, and return those that there were."""
        return [name for name in names if self.copies.pop(name, None) is not None]

    def write_back(self, state: ShardState) -> None:
        """Copy to a shard's memory what the forward wrote to the copies.

        Raises:
            ConfigurationError: it wrote to a buffer that it left alone in the first steps.
        """
        for name in self.names_of(state):
            copy, buffer = self.copies[name], state.buffers.get(name)
            if buffer is None:
                if name not in state.constant and not copy.requires_grad:
                    state.values[name].copy_(copy)
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
        ConfigurationError: the forward keeps a view of one.
    """
    for name, storage in memory.items():
        if not storage.expired():
            raise ConfigurationError(
                f"the forward keeps a view of parameter {name!r}, whose shard has to leave the "
                "device before the forward is over; set recompute=False, or cut elsewhere"
            )


def written_late(kind: str, name: str) -> ConfigurationError:
    """Return the error of a forward that writes to a tensor only after the first steps."""
    return ConfigurationError(
        f"the forward wrote to {kind} {name!r}, as it did not in the trial's first steps; let it "
        f"write to that {kind} in every forward, or never"
    )
