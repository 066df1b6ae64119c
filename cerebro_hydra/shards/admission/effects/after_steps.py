"""Takes steps of a model from the state that its first steps have left, and its own step anew."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import PlainTrainer, RandomKey, Recipe
from cerebro_hydra.recipe.randomness import unit_hooks
from cerebro_hydra.shards.cut.sample import Example, copy_example
from cerebro_hydra.shards.cut.second_names import SecondNames, on_copies
from cerebro_hydra.shards.cut.values import AttributeValues, ParameterValues
from cerebro_hydra.shards.engine.bound_model import bound_model
from cerebro_hydra.shards.engine.differences import checksum, same_bits
from cerebro_hydra.shards.engine.microbatch import Microbatch
from cerebro_hydra.shards.engine.optimizer import clone_optimizer

STEPS_PER_EPOCH = 1000
"""For LR schedulers that ask; the real number is not known yet."""

_LEAST_SPOILT, _MOST_SPOILT = 4, 16  # steps whose gradients before are spoilt; more while some stay


class ExampleBatch(NamedTuple):
    """Holds a copy of an example, as a trainer takes it."""

    features: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    rows: int

    @classmethod
    def of(cls, example: Example) -> ExampleBatch:
        """Copy an example."""
        features, labels = copy_example(example)
        return cls(features, labels, int((labels or features)[0].shape[0]))


@dataclass(frozen=True)
class AfterSteps:
    """Holds what a trial's first steps have left, and what one more of them takes.

    Attributes:
        trained: the state, named as a checkpoint names it.
        history: the attributes that training has left; the model has its own.
        example: the batch of the first two steps.
        key: of the first one.
    """

    trained: Mapping[str, Tensor]
    history: AttributeValues
    example: Example
    key: RandomKey

    @contextmanager
    def in_use(
        self, model: nn.Module, attributes: AttributeValues, size: float = 1.0
    ) -> Iterator[None]:
        """Let the body run a model from this state, with other attributes; it changes nothing else.

        Args:
            size: what the weights are multiplied by.
        """

        def value(name: str, parameter: nn.Parameter) -> Tensor:
            own = self.trained[f"param:{name}"].clone()
            return own * size if own.is_floating_point() else own

        with (
            ParameterValues(model, value).in_use(),
            attributes.in_use(),
            bound_model(model) as bound,
        ):
            buffers = model.named_buffers()
            bound.lend_buffers({n: self.trained[f"buffer:{n}"].clone() for n, _ in buffers})
            yield

    def copied_history(self, model: nn.Module) -> AttributeValues:
        """Return the attributes that training has left, for steps that are to change no other."""
        with self.history.in_use():
            return AttributeValues(model)

    def of_other_rows(self) -> AfterSteps:
        """Return the same with an example of that shape, whose rows have another order and mean."""

        def of_others(column: Tensor) -> Tensor:
            rows = column.flip(0)
            rows[len(rows) // 2 :] = rows[:1]
            return rows

        features, labels = (tuple(map(of_others, part)) for part in self.example)
        return replace(self, example=(features, labels))

    def of_larger_rows(self) -> AfterSteps:
        """Return the same with such an example whose features are twice as large, but integers."""
        others = self.of_other_rows()
        features, labels = others.example
        twice = tuple(each * 2 if each.is_floating_point() else each for each in features)
        return replace(others, example=(twice, labels))

    def of_fewer_rows(self) -> AfterSteps:
        """Return the same with half of the example, such as a last batch."""
        rows = max(int(column.shape[0]) // 2 for part in self.example for column in part)
        features, labels = (tuple(c[: max(rows, 1)] for c in part) for part in self.example)
        return replace(self, example=(features, labels))

    def of_another_step(self) -> AfterSteps:
        """Return the same with other random numbers."""
        key = self.key
        return replace(self, key=replace(key, step=key.step + 1))


def forward_and_backward(recipe: Recipe, example: Example, key: RandomKey) -> float:
    """Compute a batch's loss, and its gradients; the user's own step also moves parameters."""
    model = recipe.model.train()
    if recipe.training_step is not None:
        return plain_trainer(recipe, key.trial_seed).run_own_step(ExampleBatch.of(example))
    with recipe.compiled(model), unit_hooks(model, key.reseed):
        batch = Microbatch.collated(recipe, copy_example(example), key, weight=None)
        with recipe.precision():
            loss = batch.loss_of(recipe.call(model, batch.inputs))
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def bits_of_step(recipe: Recipe, after: AfterSteps) -> list[str]:
    """Return the loss of a forward and a backward, and checksums of the gradients."""
    loss = forward_and_backward(recipe, after.example, after.key)
    gradients = [p.grad for p in recipe.model.parameters() if p.grad is not None]
    return [repr(loss), *(str(checksum(each.to_dense())) for each in gradients)]


def plain_trainer(recipe: Recipe, trial_seed: int) -> PlainTrainer:
    """Return what trains the recipe's own model with a copy of its optimizer."""
    twin = copy.copy(recipe)
    own = {id(parameter): parameter for parameter in recipe.model.parameters()}
    twin.optimizer = clone_optimizer(recipe.optimizer, own)
    return PlainTrainer(twin, trial_seed, STEPS_PER_EPOCH)


def check_own_step(trainer: PlainTrainer, example: Example, kept: list[SecondNames]) -> None:
    """Take two steps, and more of them, each with the gradients of the one before, spoilt.

    One that gathers gradients for several batches may use them some steps later. The model has its
    own state again afterwards.

    Args:
        trainer: is not to be used afterwards.
        kept: as of `on_copies`.

    Raises:
        ConfigurationError: no parameter moves, one trains no more, or gradients are added to those
            of the step before, which are in no state that hops.
    """
    model, state = trainer.recipe.model, trainer.recipe.optimizer.state
    parameters, known = dict(model.named_parameters()), len(state)
    with on_copies(model, kept):
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
        whole = [name for name, p in parameters.items() if not p.isnan().any()]
        for taken in range(_MOST_SPOILT):
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad = torch.full_like(parameter, torch.nan)
            trainer.run_own_step(ExampleBatch.of(example))
            trainer.steps += 1
            if (
                spoilt := next((n for n in whole if parameters[n].isnan().any()), None)
            ) is not None:
                raise ConfigurationError(
                    f"training_step adds to gradients that the step before has left, as those of "
                    f"parameter {spoilt!r}, and gradients don't hop; call zero_grad of an "
                    "optimizer before the backward of what it steps"
                )
            left = (p.grad for p in parameters.values() if p.grad is not None)
            if taken + 1 >= _LEAST_SPOILT and not any(each.isnan().any() for each in left):
                break
        state.clear()
