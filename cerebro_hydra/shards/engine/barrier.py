"""Brings together what the updates of a window must know of the gradients of all shards.

Clipping by the global norm needs the norms of all gradients, and all shards skip a float16 step if
a gradient of one is NaN or infinite. Shards may never be in one place, so each leaves what is known
of its own. Gradients have then the bits of `GradScaler.unscale_`, `clip_grad_norm_` and
`clip_grad_value_`: the total norm is taken in the order of `model.parameters()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.grad_scaling import GradScaling
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.engine.state import ShardState


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """Holds what the updates of other shards must know of one shard's gradients.

    Args:
        norms: the 2-norm of each, unscaled, by parameter; none if nothing is clipped by it.
        overflow: whether one is NaN or infinite, as far as losses are scaled.
    """

    norms: Mapping[str, float] = field(default_factory=dict)
    overflow: bool = False


@dataclass(frozen=True, slots=True)
class _Measured:
    """Holds the same on the device, which need not be waited for."""

    norms: Mapping[str, Tensor]
    found: Tensor


class Barrier:
    """Unscales and clips the gradients of the shards of one window, as the recipe asks for."""

    def __init__(self, recipe: Recipe, cut_model: CutModel) -> None:
        self._needed, self._scales = recipe.barrier, recipe.scaler is not None
        self._limit, self._largest = recipe.clip_grad_norm, recipe.clip_grad_value
        self._sums_dense = recipe.replicas != 1
        self._device = recipe.device
        self._dtypes = {p.name: p.dtype for p in cut_model.params}  # in their order
        self._num_shards = cut_model.num_shards
        self._known: dict[int, _Measured] = {}  # of shards that are away
        self._coefficient: Tensor | None = None
        self._overflow: bool | None = None

    def begin_window(self) -> None:
        """Forget the gradients of the window before."""
        self._known.clear()
        self._coefficient = self._overflow = None

    def note(self, k: int, params: Mapping[str, Tensor], scaling: GradScaling | None) -> None:
        """Remember what others must know of a shard that goes away.

        What is noted after its last backward counts.
        """
        if self._needed:
            self._known[k] = self._measure(params, scaling)

    def facts(self, params: Mapping[str, Tensor], scaling: GradScaling | None) -> GradientFacts:
        """Return what others must know of a shard, for which its device is waited for."""
        measured = self._measure(params, scaling)
        return GradientFacts(floats(measured.norms), self._scales and bool(measured.found))

    def add(self, facts: Mapping[int, GradientFacts]) -> None:
        """Take what is known of shards whose last backward was in another process."""
        for k, each in facts.items():
            norms = {
                name: torch.tensor(norm, dtype=self._dtypes[name].to_real(), device=self._device)
                for name, norm in each.norms.items()
            }
            self._known[k] = _Measured(norms, torch.tensor(float(each.overflow)))

    def apply(
        self,
        k: int,
        here: Mapping[int, ShardState],
        optimizer: torch.optim.Optimizer,
        scaling: GradScaling | None,
    ) -> None:
        """Unscale and clip the gradients of a shard before its update.

        Args:
            here: the shards that are here, among them this one; each before its update has
                gradients as its backwards left them.
            optimizer: of the shard.

        Raises:
            ValueError: nothing is known of a shard's gradients.
        """
        if self._needed and self._overflow is None:  # the first update after the barrier
            self._meet(here, scaling)
        params = here[k].params
        if scaling is not None:
            scaling.unscale(optimizer, self._overflow)
        if self._coefficient is not None:
            scale_grads(params, self._coefficient)
        if self._largest is not None:
            torch.nn.utils.clip_grad_value_(params.values(), self._largest)

    def _meet(self, here: Mapping[int, ShardState], scaling: GradScaling | None) -> None:
        self._known |= {k: self._measure(state.params, scaling) for k, state in here.items()}
        if missing := set(range(self._num_shards)) - self._known.keys():
            raise ValueError(f"nothing is known of the gradients of shards {missing}")
        self._overflow = self._scales and any(bool(each.found) for each in self._known.values())
        if self._limit is not None:
            norms: dict[str, Tensor] = {}
            for each in self._known.values():
                norms |= each.norms
            self._coefficient = clip_coefficient(norms, self._dtypes, self._limit)

    def _measure(self, params: Mapping[str, Tensor], scaling: GradScaling | None) -> _Measured:
        found = torch.zeros((), device=self._device)
        if self._sums_dense:
            _check_dense(params)
        if scaling is None:
            return _Measured({} if self._limit is None else grad_norms(params), found)
        norms: dict[str, Tensor] = {}
        for grads in _grads_by_dtype(params):
            if self._limit is None:
                scaling.check([*grads.values()], found)
                continue
            for name, gradient in grads.items():  # one after the other, for each is copied
                norms |= _norms({name: scaling.unscaled(gradient, found)})
        return _Measured(norms, found)


def _check_dense(params: Mapping[str, Tensor]) -> None:
    """Refuse what replicas can't sum, at admission, which has no other ranks."""
    for name, parameter in params.items():
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ConfigurationError(
                f"the gradient of parameter {name!r} is sparse, and replicas sum dense ones; set "
                "sparse=False in its embedding, or leave replicas out"
            )


def grad_norms(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the 2-norm of each gradient that exists."""
    norms: dict[str, Tensor] = {}
    for grads in _grads_by_dtype(params):
        norms |= _norms(grads)
    return norms


def _norms(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(grads, torch._foreach_norm([*grads.values()], 2.0), strict=True))


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
