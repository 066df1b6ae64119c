"""Refuses training steps of one's own that don't train, or that go on with what can't hop."""

from __future__ import annotations

import torch

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import PlainTrainer
from cerebro_hydra.shards.admission.effects import ExampleBatch
from cerebro_hydra.shards.cut.sample import Example
from cerebro_hydra.shards.cut.values import AttributeValues, ParameterValues
from cerebro_hydra.shards.engine.differences import same_bits


def check_own_step(trainer: PlainTrainer, example: Example) -> None:
    """Take two steps, and a third one with the gradients of the second, spoilt.

    The model has its own state again afterwards.

    Args:
        trainer: is not to be used afterwards.

    Raises:
        ConfigurationError: no parameter moves, one trains no more, or gradients are added to those
            of the step before, which are in no state that hops.
    """
    model, state = trainer.recipe.model, trainer.recipe.optimizer.state
    parameters, known = dict(model.named_parameters()), len(state)
    with ParameterValues.initial(model).in_use(), AttributeValues(model).in_use():
        before = {name: p.detach().clone() for name, p in parameters.items()}
        trains = {name: p.requires_grad for name, p in parameters.items()}
        for _ in range(2):
            trainer.step([ExampleBatch.of(example)])
        for name, parameter in parameters.items():
            if parameter.requires_grad != trains[name]:
                raise ConfigurationError(
                    f"training_step leaves requires_grad of parameter {name!r} as "
                    f"{parameter.requires_grad}, and it was {trains[name]}; set it back before the "
                    "step ends, as that does not hop"
                )
        moved = any(not same_bits(p, before[name]) for name, p in parameters.items())
        if not moved and len(state) == known:
            raise ConfigurationError(
                "training_step changes no parameter; it calls backward of its losses, and step of "
                "the optimizers that it is given"
            )
        whole = {name for name, p in parameters.items() if not p.isnan().any()}
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad = torch.full_like(parameter, torch.nan)
        trainer.run_own_step(ExampleBatch.of(example))
        state.clear()
        for name in (name for name in parameters if name in whole):
            if parameters[name].isnan().any():
                raise ConfigurationError(
                    f"training_step adds to gradients that the step before has left, as those of "
                    f"parameter {name!r}, and gradients don't hop; call zero_grad of an optimizer "
                    "before the backward of what it steps"
                )
