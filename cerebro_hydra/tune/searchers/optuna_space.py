"""Gives a search space to Optuna: the distribution of each parameter, and what is drawn from it.

Optuna knows a parameter within an option of a choice by its path, such as `optimizer[1].momentum`.
What is no number, text, boolean or None it knows as JSON, and an option with dimensions in it by
its text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.tune.searchers.space import (
    Choice,
    Dimension,
    Integer,
    LogUniform,
    Uniform,
    is_nested,
)


class OptunaSpace:
    """Names and bounds a search space for Optuna.

    Attributes:
        names: the parameters that every candidate has.
        distributions: of every parameter that a candidate may have, by its path.
    """

    def __init__(self, space: Mapping[str, Dimension]) -> None:
        self._space = dict(space)
        self.names = tuple(space)
        found = (each for name, value in space.items() for each in _dimensions(value, name))
        self.distributions = {path: _distribution(dimension) for path, dimension in found}

    def suggested(self, trial: optuna.Trial) -> dict[str, Any]:
        """Return the parameters of a candidate, for which a sampler draws each that it needs.

        Raises:
            ConfigurationError: the sampler draws what the space does not have.
        """

        def draw(path: str, dimension: Dimension) -> Any:
            return _within(path, dimension, _suggest(trial, path, self.distributions[path]))

        return {name: _filled(value, name, draw) for name, value in self._space.items()}

    def check(self, path: str, value: Any) -> None:
        """Refuse a value of a parameter that Optuna knows by this path.

        Raises:
            ConfigurationError: the space has no such parameter, or not this value of it.
        """
        for name, top in self._space.items():
            for each, dimension in _dimensions(top, name):
                if each == path:
                    _within(path, dimension, value)
                    return
        raise ConfigurationError(
            f"search_space has no parameter {path!r}; it has {list(self.distributions)}"
        )

    def labelled(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return what Optuna calls the parameters of a candidate of this space, by their paths."""
        labels: dict[str, Any] = {}
        for name, value in self._space.items():
            labels |= _labels(value, name, params[name]) or {}
        return labels


def _dimensions(value: Any, path: str) -> Iterator[tuple[str, Dimension]]:
    """Return every dimension of a part of the space, with its path."""
    if isinstance(value, Dimension):
        yield path, value
    if isinstance(value, Choice):
        for number, option in enumerate(value.options):
            yield from _dimensions(option, f"{path}[{number}]")
    elif isinstance(value, dict) and is_nested(value):
        for name, each in value.items():
            yield from _dimensions(each, f"{path}.{name}")


def _filled(value: Any, path: str, draw: Callable[[str, Dimension], Any]) -> Any:
    """Return a part of a candidate, for which `draw` gives numbers, and the number of an option."""
    if isinstance(value, Choice):
        number = draw(path, value)
        return _filled(value.options[number], f"{path}[{number}]", draw)
    if isinstance(value, Dimension):
        return draw(path, value)
    if isinstance(value, dict) and is_nested(value):
        return {name: _filled(each, f"{path}.{name}", draw) for name, each in value.items()}
    return value


def _labels(value: Any, path: str, param: Any) -> dict[str, Any] | None:
    """Return what Optuna calls a part of a candidate; None if it is not of this part."""
    if isinstance(value, Choice):
        for number, option in enumerate(value.options):
            within = _labels(option, f"{path}[{number}]", param)
            if within is not None:
                return {path: _options(value)[number], **within}
        return None
    if isinstance(value, Dimension):
        distribution = _distribution(value)
        assert isinstance(distribution, FloatDistribution | IntDistribution)
        # A multiple of a quantum may lie beyond the bounds of what was drawn and rounded.
        return {path: min(max(param, distribution.low), distribution.high)}
    if isinstance(value, dict) and is_nested(value):
        if not isinstance(param, dict) or param.keys() != value.keys():
            return None
        labels: dict[str, Any] = {}
        for name, each in value.items():
            within = _labels(each, f"{path}.{name}", param[name])
            if within is None:
                return None
            labels |= within
        return labels
    return {} if json.dumps(param) == json.dumps(value) else None


def _options(choice: Choice) -> list[Any]:
    """Return what Optuna calls the options of a choice: the same for none that differ."""
    plain = [
        each if each is None or isinstance(each, bool | int | float | str) else _text(each)
        for each in choice.options
    ]
    alike = any(plain.index(each) != number for number, each in enumerate(plain))  # 1 is True
    return [_text(each) for each in choice.options] if alike else plain


def _text(option: Any) -> str:
    return json.dumps(option, default=repr)


def _distribution(dimension: Dimension) -> BaseDistribution:
    match dimension:
        case Choice():
            return CategoricalDistribution(_options(dimension))
        case Integer(low, high, step, log):
            return IntDistribution(low, low + (high - low) // step * step, log=log, step=step)
        case LogUniform(low, high):
            return FloatDistribution(low, high, log=True)
        case Uniform(low, high, _, True):
            return FloatDistribution(10.0**low, 10.0**high, log=True)
        case Uniform(low, high, None):
            return FloatDistribution(low, high)
        case Uniform(low, high, float(quantum)):
            ends = (round(low / quantum), round(high / quantum))
            if quantum.is_integer():
                step = int(quantum)
                return IntDistribution(ends[0] * step, ends[1] * step, step=step)
            exact = Decimal(str(quantum))
            return FloatDistribution(float(ends[0] * exact), float(ends[1] * exact), step=quantum)
    raise AssertionError(dimension)


def _suggest(trial: optuna.Trial, path: str, distribution: BaseDistribution) -> Any:
    match distribution:
        case CategoricalDistribution():
            return trial.suggest_categorical(path, distribution.choices)
        case IntDistribution():
            bounds = (distribution.low, distribution.high)
            return trial.suggest_int(path, *bounds, step=distribution.step, log=distribution.log)
        case FloatDistribution():
            low, high = distribution.low, distribution.high
            return trial.suggest_float(
                path, low, high, step=distribution.step, log=distribution.log
            )
    raise AssertionError(distribution)


def _within(path: str, dimension: Dimension, drawn: Any) -> Any:
    """Return what a trial is given for what was drawn: a number, or the number of an option."""
    if isinstance(dimension, Choice):
        options = _options(dimension)
        if drawn in options:
            return options.index(drawn)
        raise _beyond(path, drawn, options)
    distribution = _distribution(dimension)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    number = isinstance(drawn, int | float) and not isinstance(drawn, bool)
    if not number or not low <= drawn <= high:
        raise _beyond(path, drawn, f"{low!r} to {high!r}")
    if step is not None and abs((steps := (drawn - low) / step) - round(steps)) > 1e-8:
        raise _beyond(path, drawn, f"{low!r} to {high!r} in steps of {step!r}")
    if isinstance(dimension, Integer):
        return int(drawn)
    if isinstance(dimension, Uniform) and dimension.quantum is not None:
        quantum = dimension.quantum
        return round(drawn / quantum) * (int(quantum) if quantum.is_integer() else quantum)
    return float(drawn)


def _beyond(path: str, drawn: Any, there: Any) -> ConfigurationError:
    return ConfigurationError(
        f"{path!r} is {drawn!r} by the sampler or the study, and search_space has {there}; give "
        "them the bounds and options of search_space"
    )
