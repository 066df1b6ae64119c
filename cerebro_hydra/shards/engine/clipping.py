"""Clips gradients shard by shard, with the bits of `clip_grad_norm_` and `clip_grad_value_`.

The global norm needs the gradients of all shards, which may never be in one place. So each shard
leaves the norms of its own, and their total is taken in the order of `model.parameters()`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.engine.state import ShardState

Norms = Mapping[str, float]
"""The 2-norm of each gradient of a shard, by parameter."""


class Clipping:
    """Clips the gradients of the shards of one window, as the recipe asks for."""

    def __init__(self, recipe: Recipe, cut_model: CutModel) -> None:
        self._limit, self._largest = recipe.clip_grad_norm, recipe.clip_grad_value
        self._device = recipe.device
        self._dtypes = {p.name: p.dtype for p in cut_model.params}  # in their order
        self._num_shards = cut_model.num_shards
        self._norms: dict[int, dict[str, Tensor]] = {}  # of shards that are away
        self._coefficient: Tensor | None = None

    @property
    def by_norm(self) -> bool:
        """Return whether a gradient is scaled by the norm of all."""
        return self._limit is not None

    def begin_window(self) -> None:
        """Forget the gradients of the window before."""
        self._norms.clear()
        self._coefficient = None

    def note(self, k: int, params: Mapping[str, Tensor]) -> None:
        """Remember the norms of a shard that goes away; those after its last backward count."""
        self._norms[k] = grad_norms(params)

    def add(self, norms: Mapping[int, Norms]) -> None:
        """Take the norms of gradients of shards whose last backward was in another process."""
        for k, each in norms.items():
            self._norms[k] = {
                name: torch.tensor(norm, dtype=self._dtypes[name].to_real(), device=self._device)
                for name, norm in each.items()
            }

    def clip(self, k: int, here: Mapping[int, ShardState]) -> None:
        """Clip the gradients of a shard before its update.

        Args:
            here: the shards that are here, among them this one.

        Raises:
            ValueError: the norms of a shard's gradients are not known.
        """
        if self._limit is not None:
            if self._coefficient is None:  # the first update after the barrier
                self._coefficient = self._found(self._limit, here)
            scale_grads(here[k].params, self._coefficient)
        if self._largest is not None:
            torch.nn.utils.clip_grad_value_(here[k].params.values(), self._largest)

    def _found(self, limit: float, here: Mapping[int, ShardState]) -> Tensor:
        self._norms |= {k: grad_norms(state.params) for k, state in here.items()}
        if missing := set(range(self._num_shards)) - self._norms.keys():
            raise ValueError(f"the norms of the gradients of shards {missing} are unknown")
        norms: dict[str, Tensor] = {}
        for each in self._norms.values():
            norms |= each
        return clip_coefficient(norms, self._dtypes, limit)


def grad_norms(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the 2-norm of each gradient that exists."""
    norms: dict[str, Tensor] = {}
    for grads in _grads_by_dtype(params):
        norms |= zip(grads, torch._foreach_norm([*grads.values()], 2.0), strict=True)
    return norms


def floats(norms: Mapping[str, Tensor]) -> dict[str, float]:
    """Return norms as numbers of Python, for which a device is waited for once."""
    if not norms:
        return {}
    values = torch.stack([norm.double() for norm in norms.values()]).tolist()
    return dict(zip(norms, values, strict=True))


def clip_coefficient(
    norms: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], limit: float
) -> Tensor:
    """Return the factor for every gradient that brings the total norm down to `limit`.

    Args:
        norms: the norms of all shards together.
        dtypes: every parameter's in `model.parameters()` order; on both the sum depends.
    """
    present = [norms[name] for name in dtypes if name in norms]
    if not present:
        return torch.tensor(1.0)
    # Gradients of several dtypes are summed dtype by dtype, in an order that only torch defines;
    # the norm of a complex one is real.
    like = [torch.empty(0, dtype=dtypes[n], device=norms[n].device) for n in dtypes if n in norms]
    groups = _group_tensors_by_device_and_dtype([like, present])  # type: ignore[list-item]
    ordered = [
        norm for (_, of_a_dtype), _ in groups.values() for norm in of_a_dtype if norm is not None
    ]
    device = present[0].device
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in ordered]), 2.0)
    return torch.clamp(limit / (total + 1e-6), max=1.0)


def scale_grads(params: Mapping[str, Tensor], coefficient: Tensor) -> None:
    """Multiply every gradient by the coefficient."""
    for grads in _grads_by_dtype(params):
        torch._foreach_mul_([*grads.values()], coefficient)


def _grads_by_dtype(params: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    groups: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, parameter in params.items():
        if parameter.grad is not None:
            groups.setdefault(parameter.grad.dtype, {})[name] = parameter.grad
    return list(groups.values())
