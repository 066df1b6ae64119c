"""Finds the buffers and frozen parameters to which training writes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from cerebro_hydra.shards.differences import same_bits


class WrittenTensors:
    """Watches the tensors of a model that no optimizer changes.

    Args:
        initial: the state before training, named as a checkpoint names it, in memory of its own.
    """

    def __init__(self, model: nn.Module, initial: Mapping[str, Tensor]) -> None:
        self._model = model
        self._initial = initial
        self._before = {name: (t, t._version) for name, t in _unoptimized(model).items()}

    def names(self) -> tuple[str, ...]:
        """Return what has been written since, in place, by `.data` or by another tensor."""
        now = _unoptimized(self._model)
        return tuple(name.partition(":")[2] for name, t in now.items() if self._is_written(name, t))

    def _is_written(self, name: str, tensor: Tensor) -> bool:
        before, version = self._before.get(name, (None, 0))
        if tensor is not before or tensor._version != version:
            return True
        return not same_bits(tensor, self._initial[name])


def _unoptimized(model: nn.Module) -> dict[str, Tensor]:
    found = {f"buffer:{name}": buffer for name, buffer in model.named_buffers()}
    frozen = {f"param:{n}": p for n, p in model.named_parameters() if not p.requires_grad}
    return found | frozen
