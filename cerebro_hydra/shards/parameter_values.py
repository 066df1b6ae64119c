"""Lets a model's own parameters have other values for a while."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


def absent_value(parameter: nn.Parameter) -> Tensor:
    """Return a value without memory of its own: it reads as NaN, and writing to it is an error."""
    nothing = math.nan if parameter.is_floating_point() or parameter.is_complex() else 0
    return parameter.data.new_full((), nothing).expand(parameter.shape)


class ParameterValues:
    """Holds values for the parameters of a model, which has them while they are used.

    Args:
        value: returns the value of each parameter by its name.
    """

    def __init__(self, model: nn.Module, value: Callable[[str, nn.Parameter], Tensor]) -> None:
        self._values = {p: value(name, p) for name, p in model.named_parameters()}

    @classmethod
    def initial(cls, model: nn.Module) -> ParameterValues:
        """Return copies of the present values."""
        return cls(model, lambda _, parameter: parameter.detach().clone())

    @classmethod
    def absent(cls, model: nn.Module) -> ParameterValues:
        """Return the values of a worker before shards come."""
        return cls(model, lambda _, parameter: absent_value(parameter))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Give the parameters these values, and afterwards their own, without gradients."""
        own = self._exchanged(self._values)
        try:
            yield
        finally:
            self._values = self._exchanged(own)
            for parameter in own:
                parameter.grad = None

    @staticmethod
    def _exchanged(values: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Give parameters other values, and return those that they had."""
        before = {parameter: parameter.data for parameter in values}
        for parameter, value in values.items():
            parameter.data = value
        return before
