"""Runs training steps that step their optimizers themselves, and refuses what can't be with them.

Such a step is `training_step(model, batch, optimizers)`; it runs as a whole, so that its trial is
one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.checked_parts import check_optimizer
from cerebro_hydra.recipe.objective.step_module import StepBatch, StepModule, step_by_hand
from cerebro_hydra.recipe.optimizer_list import OptimizerList, members_of, shared_parameter

OwnStep = Callable[..., Any]
"""Is called with (model, batch, optimizers), or is `step_by_hand`."""

_REFUSED: Mapping[str, tuple[Sequence[Any], str]] = {
    "shards": ((1, "auto", [], [[]]), "it runs as a whole, in one shard; leave shards out"),
    "schedule": (("sequential",), "a schedule is for shards; leave it out"),
    "accumulate": ((1,), "it is given one batch; let it part that, and step after several parts"),
    "clip_grad_norm": ((None,), "call torch.nn.utils.clip_grad_norm_ in it, before a step"),
    "clip_grad_value": ((None,), "call torch.nn.utils.clip_grad_value_ in it, before a step"),
    "autocast": ((None,), "write `with torch.autocast(...)` in it, and in the model's forward"),
    "grad_scaler": ((None,), "nothing scales its losses; train in bfloat16 or float32"),
    "replicas": ((1,), "gradients of replicas are summed before a step, which it takes itself"),
    "recompute": (("auto", False), "call torch.utils.checkpoint in the model in its place"),
    "optimizer_on": (("device",), "the step itself calls its optimizers"),
}
"""Options that such a step has no use for: what they may be, and what to do instead."""


def check_own_step(step: Any, options: Mapping[str, Any]) -> None:
    """Refuse what can't be together with a step of one's own.

    Raises:
        ConfigurationError: it is no function, or an option is for other steps.
    """
    if not callable(step):
        raise ConfigurationError(
            f"training_step is {step!r}; give a function (model, batch, optimizers) that calls "
            "backward and the optimizers' step, and returns the loss"
        )
    for name, (allowed, instead) in _REFUSED.items():
        if (value := options[name]) not in allowed:
            raise ConfigurationError(f"training_step is given and {name} is {value!r}: {instead}")


def joined_optimizers(given: Any, model: nn.Module, step: Any, loss: Any = None) -> Optimizer:
    """Return the optimizer of a trial: a list of them as one, if a step of its own steps them.

    Args:
        loss: of the trial, whose parameters no optimizer may have.

    Raises:
        ConfigurationError: one can't be used, two have a parameter in common, or nothing says when
            each of several steps.
    """
    if isinstance(given, OptimizerList):
        return given
    several = list(given) if isinstance(given, list | tuple) else [given]
    if step is None:
        if isinstance(given, list | tuple):
            raise ConfigurationError(
                f"optimizer is a list of {len(several)}, and nothing says when each of them steps; "
                "give training_step=, a function (model, batch, optimizers) that does it, or one "
                "optimizer with several param groups"
            )
        check_optimizer(given, model, loss)
        return cast(Optimizer, given)
    if not several:
        raise ConfigurationError("optimizer is an empty list; give training_step one at least")
    for each in several:
        check_optimizer(each, model, loss)
    if (both := shared_parameter(several)) is not None:
        name = next(name for name, p in model.named_parameters() if p is both)
        raise ConfigurationError(
            f"parameter {name!r} is in two optimizers, and a parameter has one state that hops; "
            "leave it out of one of them, or step one optimizer twice"
        )
    return OptimizerList(several)


def run_own_step(
    step: OwnStep,
    model: nn.Module,
    optimizer: Optimizer,
    schedulers: Sequence[Any],
    batch: StepBatch,
) -> float:
    """Take a step, and return its loss.

    Raises:
        ConfigurationError: it gives no loss, or adds a param group.
    """
    members = members_of(optimizer)
    if step is step_by_hand:
        returned = step_by_hand(cast(StepModule, model), batch, members, schedulers)
    else:
        returned = step(model, batch, list(members))
    if isinstance(returned, Mapping):
        returned = returned.get("loss")
    if isinstance(returned, Tensor) and returned.numel() == 1:
        return float(returned.detach())
    if isinstance(returned, bool) or not isinstance(returned, int | float):
        form = f"shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else repr(returned)
        raise ConfigurationError(
            f"training_step returned {form} as the loss; let it return a number or a scalar "
            "tensor, or a dict with it under 'loss'"
        )
    return float(returned)
