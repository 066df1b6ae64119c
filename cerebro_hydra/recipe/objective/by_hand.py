"""Stands for a Trainer in modules that step their optimizers themselves, as Lightning's may."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cerebro_hydra.errors import ConfigurationError

Helpers = dict[str, Callable[..., Any]]


def helpers_by_hand(optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> Helpers:
    """Return the methods of a `LightningModule` that ask its Trainer, by name.

    Args:
        schedulers: those of the optimizers that have one, in their order.
    """
    trained: dict[Tensor, bool] = {}

    def toggle_optimizer(optimizer: Optimizer) -> None:
        for parameter in _parameters(optimizers):
            trained.setdefault(parameter, parameter.requires_grad)
            parameter.requires_grad_(False)
        for parameter in _parameters([optimizer]):
            parameter.requires_grad_(trained[parameter])

    def untoggle_optimizer(optimizer: Optimizer) -> None:
        for parameter in _parameters(optimizers):
            parameter.requires_grad_(trained.pop(parameter, parameter.requires_grad))

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    return {
        "optimizers": lambda use_pl_optimizer=True: _one_or_all(optimizers),
        "lr_schedulers": lambda: _one_or_all(schedulers) if schedulers else None,
        "manual_backward": manual_backward,
        "toggle_optimizer": toggle_optimizer,
        "untoggle_optimizer": untoggle_optimizer,
        "clip_gradients": _clip_gradients,
    }


def _one_or_all(given: Sequence[Any]) -> Any:
    return given[0] if len(given) == 1 else list(given)


def _parameters(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _clip_gradients(
    optimizer: Optimizer,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    clips = {None: nn.utils.clip_grad_norm_, "norm": nn.utils.clip_grad_norm_}
    clips["value"] = nn.utils.clip_grad_value_  # type: ignore[assignment]
    if gradient_clip_algorithm not in clips:
        raise ConfigurationError(
            f"gradient_clip_algorithm is {gradient_clip_algorithm!r}; it is 'norm' or 'value'"
        )
    if gradient_clip_val:
        clips[gradient_clip_algorithm](_parameters([optimizer]), gradient_clip_val)
