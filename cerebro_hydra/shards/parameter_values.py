"""Lets a model's own parameters have other values for a while."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


def absent_value(parameter: nn.Parameter) -> Tensor:
    """Return a value without memory of its own: it reads as NaN, and writing to it is an error."""
    nothing = math.nan if parameter.is_floating_point() or parameter.is_complex() else 0
    return parameter.data.new_full((), nothing).expand(parameter.shape)


class ParameterValues:
    """Holds values for the parameters of a recipe's model, which all of its copies share.

    A loss, or a function that the model holds, may refer to the parameters of the recipe's model.
    It sees what trains only if the copies that admission trains have these very parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._values = list(values)

    @classmethod
    def initial(cls, model: nn.Module) -> ParameterValues:
        """Return copies of the present values."""
        parameters = list(model.parameters())
        return cls(parameters, [p.detach().clone() for p in parameters])

    @classmethod
    def absent(cls, model: nn.Module) -> ParameterValues:
        """Return the values of a worker before shards come."""
        parameters = list(model.parameters())
        return cls(parameters, [absent_value(p) for p in parameters])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the values, as they are after the last use, in the order of the parameters."""
        return tuple(self._values)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Give the parameters these values, and afterwards their own, without gradients."""
        own = [p.data for p in self._parameters]
        self._assign(self._values)
        try:
            yield
        finally:
            self._values = [p.data for p in self._parameters]
            self._assign(own)
            for parameter in self._parameters:
                parameter.grad = None

    def _assign(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value
