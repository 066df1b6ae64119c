"""Makes a program of `torch.export` of a loaded model, for tools that know neither it nor us."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from cerebro_hydra.shards.exported_model import ExportedModel


class _Twin(nn.Module):
    """Computes what a loaded model does, with tensors under names that torch.export takes."""

    def __init__(self, model: ExportedModel) -> None:
        super().__init__()
        self._compute = model.compute
        self._names = [f"tensor_{number}" for number in range(len(model.tensors()))]
        for name, tensor in zip(self._names, model.tensors(), strict=True):
            self.register_buffer(name, tensor.detach())

    def forward(self, *features: Tensor) -> Tensor | tuple[Tensor, ...]:
        made = self._compute(features, [getattr(self, name) for name in self._names])
        return made[0] if len(made) == 1 else made


def torch_program(model: ExportedModel, features: Sequence[Tensor]) -> ExportedProgram:
    """Return a program that takes every feature with any number of rows.

    It gives the prediction, or the tuple of predictions if there are several.

    Args:
        model: the loaded model.
        features: a batch of several rows that the model takes.
    """
    shapes = tuple({0: Dim.AUTO} for _ in features)
    with torch.no_grad():
        return torch.export.export(_Twin(model), tuple(features), dynamic_shapes=(shapes,))
