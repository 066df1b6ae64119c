"""Scales the losses of float16 training with torch's GradScaler, which skips what overflows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss, kind_of
from cerebro_hydra.recipe.placement import on_the_host

SCALED = "float16"
"""The precision of autocast in which small gradients vanish unless the loss is scaled."""

LEAST_SCALE = 1e-4
"""A loss scale below which no gradient is finite that would be of use."""

_COUNTS = ("growth_interval", "_growth_tracker")

_NEVER = 2**31 - 1  # steps without an overflow

_KINDS = (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler)


def checked_scaler(given: Any, autocast: str | None, model: nn.Module) -> Any | None:
    """Return the GradScaler that a trial begins with, or None if its losses are not scaled.

    Raises:
        ConfigurationError: it can't be used, or not with these parameters or this precision.
    """
    if autocast != SCALED:
        if given is not None:
            raise ConfigurationError(
                f"grad_scaler is given and autocast is {autocast!r}, which needs none; leave it "
                f"out, or set autocast={SCALED!r}"
            )
        return None
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ConfigurationError(
                f"autocast is {SCALED!r} and parameter {name!r} is float16, whose gradients a "
                "GradScaler doesn't unscale; keep the model in float32, which autocast casts"
            )
    if given is None:
        return torch.amp.GradScaler("cpu")
    if type(given) not in _KINDS:
        raise ConfigurationError(
            f"grad_scaler is {kind_of(given)}; give a torch.amp.GradScaler, of which each "
            "shard has a copy"
        )
    if not given.is_enabled():
        raise ConfigurationError(
            "grad_scaler is disabled, as one for 'cuda' is where there is no GPU; give "
            "torch.amp.GradScaler('cpu', ...), whose numbers hold on every device"
        )
    scale = given.get_scale()
    if not (math.isfinite(scale) and scale >= LEAST_SCALE):
        raise ConfigurationError(
            f"the scale of grad_scaler is {scale!r}; it is a number from {LEAST_SCALE}, such as "
            "init_scale=65536.0"
        )
    return _copied(given)


def at_scale(scaler: Any, scale: float) -> Any:
    """Return a GradScaler that begins with another scale, which only falls."""
    return _copied(scaler, scale=scale, growth_interval=_NEVER)


def _copied(scaler: Any, **changes: Any) -> Any:
    options = {
        name: int(value) if name in _COUNTS else float(value)
        for name, value in (scaler.state_dict() | changes).items()
    }
    made = torch.amp.GradScaler("cpu")
    made.load_state_dict(options)
    return made


class GradScaling:
    """Scales the loss of a trial, and steps its optimizer or that of one of its shards.

    Attributes:
        skipped: the number of optimizer steps that the trial has skipped.

    Args:
        scaler: what the trial begins with; it stays as it is.
        state: what `state` has given of the trial, for one that goes on.
    """

    def __init__(
        self, scaler: Any, device: torch.device, state: Mapping[str, Any] | None = None
    ) -> None:
        state = state or {}
        place = {name: state[name] for name in ("scale", "_growth_tracker") if name in state}
        self.skipped: int = state.get("skipped", 0)
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type)
        self._scaler.load_state_dict(scaler.state_dict() | place)
        self.scale(torch.zeros((), device=device))  # only so a scaler makes its tensors

    def state(self) -> dict[str, Any]:
        """Return what a cursor has of it."""
        return self._scaler.state_dict() | {"skipped": self.skipped}

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss from which backward begins."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def check(self, gradients: Sequence[Tensor], found: Tensor) -> None:
        """Set `found`, a float32 scalar, to 1 if a gradient of one dtype is NaN or infinite."""
        torch._amp_foreach_non_finite_check_and_unscale_(
            [_dense(each) for each in gradients], found, torch.ones_like(found)
        )

    def unscaled(self, gradient: Tensor, found: Tensor) -> Tensor:
        """Return a copy of a gradient as `unscale` leaves it; see `check`."""
        copied, scale = gradient.clone(), self._scaler._scale
        assert scale is not None
        inverse = scale.double().reciprocal().float()  # as GradScaler.unscale_ has it
        torch._amp_foreach_non_finite_check_and_unscale_([_dense(copied)], found, inverse)
        return copied

    def unscale(self, optimizer: torch.optim.Optimizer, found: bool | None = None) -> None:
        """Unscale the gradients of an optimizer, in place.

        Args:
            found: whether a gradient of the trial is NaN or infinite, where the optimizer may not
                have all of them.
        """
        self._scaler.unscale_(optimizer)
        if found is not None:  # as torch's ShardedGradScaler does after its all-reduce
            marks = {self._device: torch.full((), float(found), device=self._device)}
            self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = marks

    def step(self, optimizer: torch.optim.Optimizer, number: int) -> bool:
        """Step an optimizer after `unscale`; return whether it was not skipped.

        Raises:
            NonFiniteLoss: so many steps were skipped that the scale is of no use any more.
        """
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        scale = self._scaler.get_scale()
        if scale >= before:
            return True
        self.skipped += 1
        if scale < LEAST_SCALE:
            raise NonFiniteLoss(
                f"gradients were NaN or infinite at every loss scale down to {before:.3g} up to "
                f"step {number}; look for what overflows in float16, or try autocast='bfloat16', a "
                "lower learning rate or clip_grad_norm"
            )
        return False


def take_step(
    optimizer: torch.optim.Optimizer,
    scaling: GradScaling | None,
    number: int,
    on_host: bool = False,
) -> bool:
    """Take an optimizer step, whose number counts from 0; return whether it was not skipped.

    Args:
        on_host: whether the kernels of the CPU take it, wherever the parameters are.
    """
    with on_the_host(optimizer) if on_host else nullcontext():
        if scaling is not None:
            return scaling.step(optimizer, number)
        optimizer.step()
        return True


def _dense(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient
