"""Finds the buffers and frozen parameters to which training writes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from cerebro_hydra.shards.differences import same_bits


class WrittenTensors:
    """Remembers the tensors of a model that no optimizer changes, before the model trains."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: (t, t._version) for name, t in _unoptimized(model)}

    def names(self, initial: nn.Module, trained: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Return what training has written to, whether in place, by `.data` or by another tensor.

        Args:
            initial: an equal model that has not trained.
            trained: the state after training, named as a checkpoint names it.
        """
        values = dict(_unoptimized(initial))

        def is_written(name: str, tensor: Tensor) -> bool:
            if name not in self._before or name not in values:
                return True
            before, version = self._before[name]
            if tensor is not before or tensor._version != version:
                return True
            now = trained.get(f"param:{name}", tensor)
            return not same_bits(now, values[name])

        return tuple(name for name, tensor in _unoptimized(self._model) if is_written(name, tensor))


def _unoptimized(model: nn.Module) -> list[tuple[str, Tensor]]:
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    return [*model.named_buffers(), *frozen]
