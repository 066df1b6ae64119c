"""Search spaces: the values of each hyper-parameter, all combinations, and random draws."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import inf, isfinite, log10
from random import Random
from typing import Any

import numpy as np

from cerebro_hydra.errors import ConfigurationError, kind_of

_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile("".join(f"(?:{_NUMBER}{unit})?" for unit in "dhms"))
_UNITS = (86_400, 3_600, 60, 1)

_LARGEST_EXPONENT = 300  # of what a float can hold


@dataclass(frozen=True)
class Choice:
    """Draws one of several values, each as likely as the others.

    An option may be a dictionary with further dimensions in it, which are drawn if it is taken.
    """

    options: tuple[Any, ...]

    def sample(self, random: Random) -> Any:
        """Draw an option, and what is in it."""
        return _drawn(random.choice(self.options), random)


@dataclass(frozen=True)
class Uniform:
    """A number between two bounds, which are exponents of 10 if `log`; rounded to `quantum`."""

    low: float
    high: float
    quantum: float | None = None
    log: bool = False

    def sample(self, random: Random) -> float:
        """Draw a number; an int where `quantum` is whole."""
        value = random.uniform(self.low, self.high)
        if self.log:
            value = 10.0**value
        if self.quantum is None:
            return value
        quantum = int(self.quantum) if self.quantum.is_integer() else self.quantum
        return round(value / quantum) * quantum


@dataclass(frozen=True)
class LogUniform:
    """A number between two bounds, whose logarithm is uniform."""

    low: float
    high: float

    def sample(self, random: Random) -> float:
        """Draw a number."""
        value: float = 10.0 ** random.uniform(log10(self.low), log10(self.high))
        return min(max(value, self.low), self.high)


@dataclass(frozen=True)
class Integer:
    """A whole number of a range that includes both ends; its logarithm is uniform if `log`."""

    low: int
    high: int
    step: int = 1
    log: bool = False

    @property
    def options(self) -> tuple[int, ...]:
        """Return every number that can be drawn."""
        return tuple(range(self.low, self.high + 1, self.step))

    def sample(self, random: Random) -> int:
        """Draw a number."""
        if not self.log:
            return random.choice(range(self.low, self.high + 1, self.step))
        # Half a number more on both sides, so that the ends are as likely as their share.
        value = round(10.0 ** random.uniform(log10(self.low - 0.5), log10(self.high + 0.5)))
        return min(max(value, self.low), self.high)


Dimension = Choice | Uniform | LogUniform | Integer


def _drawn(option: Any, random: Random) -> Any:
    if isinstance(option, Dimension):
        return option.sample(random)
    if isinstance(option, dict):
        return {name: _drawn(value, random) for name, value in option.items()}
    return option


def hp_uniform(min: float, max: float) -> Uniform:
    """Draw a number from `min` to `max`, each as likely as the others.

    Raises:
        ConfigurationError: a bound is not a finite number, or `min` is not below `max`.
    """
    return _checked("hp_uniform", Uniform(min, max))


def hp_quniform(min: float, max: float, q: float) -> Uniform:
    """Draw as `hp_uniform` does, and round to a multiple of `q`; a whole `q` gives whole numbers.

    Raises:
        ConfigurationError: as `hp_uniform`, or `q` is not above 0, or not below `max - min`.
    """
    return _checked("hp_quniform", Uniform(min, max, q))


def hp_loguniform(min: float, max: float) -> Uniform:
    """Draw 10 to the power of a number from `min` to `max`; (-4, -1) gives 0.0001 to 0.1.

    The bounds are exponents, as in Cerebro. A warning says so where they look like the numbers
    themselves, which `hp_log` takes.

    Raises:
        ConfigurationError: as `hp_uniform`, or 10 to that power is beyond what a float holds.
    """
    dimension = _checked("hp_loguniform", Uniform(min, max, log=True))
    if 0 < dimension.low < dimension.high <= 1:
        warnings.warn(
            f"hp_loguniform({min!r}, {max!r}) takes exponents of 10, as Cerebro's does, and will "
            f"draw from {10**dimension.low:.4g} to {10**dimension.high:.4g}; for values from "
            f"{min!r} to {max!r} write hp_log({min!r}, {max!r})",
            stacklevel=2,
        )
    return dimension


def hp_log(min: float, max: float) -> LogUniform:
    """Draw a number from `min` to `max` with a uniform logarithm, such as hp_log(1e-4, 1e-1).

    Raises:
        ConfigurationError: a bound is not a finite number above 0, or `min` is not below `max`.
    """
    for name, value in {"min": min, "max": max}.items():
        if not _is_number(value) or value <= 0:
            raise ConfigurationError(
                f"hp_log got {name}={value!r}; give a finite number above 0, such as "
                "hp_log(1e-4, 1e-1); hp_loguniform takes exponents"
            )
    if min >= max:
        raise ConfigurationError(f"hp_log got min={min!r} and max={max!r}; min is below max")
    return LogUniform(float(min), float(max))


def hp_int(low: int, high: int, step: int = 1, log: bool = False) -> Integer:
    """Draw a whole number from `low` to `high`, both included; a grid goes through all of them.

    Args:
        step: the distance of neighbours; the largest number is at most `high`.
        log: draw numbers whose logarithm is uniform; then `step` is 1 and `low` is above 0.

    Raises:
        ConfigurationError: an argument is not a whole number, `low` is not below `high`, or `log`
            comes with another step or a `low` that has no logarithm.
    """
    for name, value in {"low": low, "high": high, "step": step}.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ConfigurationError(f"hp_int got {name}={value!r}; give a whole number")
    if low >= high:
        raise ConfigurationError(f"hp_int got low={low!r} and high={high!r}; low is below high")
    if not 1 <= step <= high - low:
        raise ConfigurationError(
            f"hp_int got step={step!r}; it lies between 1 and {high - low}, or every draw would "
            "be the same"
        )
    if log and step != 1:
        raise ConfigurationError(f"hp_int got log=True and step={step!r}; with log the step is 1")
    if log and low < 1:
        raise ConfigurationError(f"hp_int got log=True and low={low!r}; with log, low is 1 or more")
    return Integer(int(low), int(high), int(step), bool(log))


def hp_qloguniform(min: float, max: float, q: float) -> Uniform:
    """Draw as `hp_loguniform` does, and round to a multiple of `q`.

    Raises:
        ConfigurationError: as `hp_loguniform`, or `q` is not above 0, or not below the largest
            value.
    """
    return _checked("hp_qloguniform", Uniform(min, max, q, log=True))


def _checked(function: str, dimension: Uniform) -> Uniform:
    given: dict[str, Any] = {"min": dimension.low, "max": dimension.high}
    if dimension.quantum is not None:
        given["q"] = dimension.quantum
    for name, value in given.items():
        if not _is_number(value):
            raise ConfigurationError(f"{function} got {name}={value!r}; give a finite number")
    low, high = float(dimension.low), float(dimension.high)
    if low >= high:
        hint = "; they are exponents of 10" if dimension.log else ""
        raise ConfigurationError(
            f"{function} got min={dimension.low!r} and max={dimension.high!r}; min is below "
            f"max{hint}"
        )
    if dimension.log and max(-low, high) > _LARGEST_EXPONENT:
        raise ConfigurationError(
            f"{function} got min={dimension.low!r} and max={dimension.high!r}; they are exponents "
            f"of 10 and lie between -{_LARGEST_EXPONENT} and {_LARGEST_EXPONENT}: "
            f"{function}(-4, -1, ...) is 0.0001 to 0.1"
        )
    if dimension.quantum is None:
        return Uniform(low, high, log=dimension.log)
    quantum = float(dimension.quantum)
    span = 10.0**high if dimension.log else high - low
    if not 0 < quantum < span:
        raise ConfigurationError(
            f"{function} got q={dimension.quantum!r}; it lies between 0 and {span:g}, or every "
            "draw would be the same"
        )
    return Uniform(low, high, quantum, dimension.log)


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return number and isfinite(value)


def hp_choice(options: Iterable[Any]) -> Choice:
    """Let a hyper-parameter be one of `options`, tried in the given order.

    A trial is sent to workers and kept in the run folder as JSON, so options are numbers, strings,
    booleans, None, and lists and dictionaries of them. Tuples arrive as lists. A dictionary may
    have dimensions in it, for parameters that only this option has:

        hp_choice([{"name": "adam"}, {"name": "sgd", "momentum": hp_uniform(0, 0.9)}])

    Raises:
        ConfigurationError: there are no options, or they have no order, or one is not JSON.
    """
    if isinstance(options, str | bytes | Mapping | set | frozenset) or not isinstance(
        options, Iterable
    ):
        raise ConfigurationError(
            f"hp_choice got {options!r}, {kind_of(options)}; give a list of options, "
            "such as hp_choice([0.1, 0.01])"
        )
    values = tuple(_as_option(option) for option in options)
    if not values:
        raise ConfigurationError("hp_choice got no options; give at least one")
    return Choice(values)


def _as_option(option: Any) -> Any:
    """Return an option as JSON, but for the dimensions that dictionaries in it have."""
    if isinstance(option, Dimension):
        raise ConfigurationError(
            f"hp_choice got the option {option!r}, which has no name of its own; put it into a "
            'dictionary, such as {"momentum": hp_uniform(0, 0.9)}'
        )
    if not is_nested(option):
        return as_json("hp_choice got the option", option)
    return {
        _name("hp_choice got an option that", name): (
            value if isinstance(value, Dimension) else _as_option(value)
        )
        for name, value in option.items()
    }


def is_nested(option: Any) -> bool:
    """Return whether an option of a choice has dimensions in it."""
    if isinstance(option, Mapping):
        return any(isinstance(each, Dimension) or is_nested(each) for each in option.values())
    return False


def _name(what: str, name: Any) -> str:
    if not isinstance(name, str):
        raise ConfigurationError(f"{what} has the key {name!r}, {kind_of(name)}; names are strings")
    return name


def as_json(what: str, option: Any) -> Any:
    """Return the option as a worker will see it, so that the driver's factory sees the same.

    Raises:
        ConfigurationError: JSON can't hold it; the message begins with `what`.
    """
    try:
        return json.loads(json.dumps(option, default=_from_numpy))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{what} {option!r}, {kind_of(option)}, which JSON can't "
            "hold; give its name as a string and look it up in estimator_gen_fn"
        ) from error


def _from_numpy(value: Any) -> Any:
    # np.arange and np.linspace make scalars and arrays that JSON does not know.
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError


def check_space(search_space: Any) -> dict[str, Dimension]:
    """Return the search space as a dictionary in its own order.

    Raises:
        ConfigurationError: it is not a dictionary, is empty, or has a value that no `hp_` function
            made.
    """
    if not isinstance(search_space, Mapping):
        raise ConfigurationError(
            f"search_space is {search_space!r}, {kind_of(search_space)}; give a "
            'dictionary such as {"lr": hp_choice([0.1, 0.01])}'
        )
    if not search_space:
        raise ConfigurationError(
            'search_space is empty; give at least one parameter, such as {"lr": hp_choice([0.1])}'
        )
    for name, values in search_space.items():
        _name("search_space", name)
        if not isinstance(values, Dimension):
            hint = values if isinstance(values, list | tuple) else [values]
            raise ConfigurationError(
                f"search_space[{name!r}] is {values!r}; write hp_choice({list(hint)!r})"
            )
    return dict(search_space)


def space_to_json(search_space: Mapping[str, Dimension]) -> dict[str, Any]:
    """Return a search space as JSON, which `space_from_json` reads."""
    return {name: _dimension_to_json(each) for name, each in search_space.items()}


def _dimension_to_json(value: Any) -> Any:
    match value:
        case Choice(options):
            return {"Choice": [_dimension_to_json(option) for option in options]}
        case Uniform() | LogUniform() | Integer():
            return {type(value).__name__: asdict(value)}
        case dict() if is_nested(value):
            return {"parts": {name: _dimension_to_json(each) for name, each in value.items()}}
    return {"value": value}


def space_from_json(document: Mapping[str, Any]) -> dict[str, Dimension]:
    """Return a search space from JSON that anybody may have written.

    Raises:
        ValueError: it is none.
    """
    try:
        return check_space({n: _dimension_from_json(each) for n, each in document.items()})
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"it is no search space: {error!r}") from error


def _dimension_from_json(document: Mapping[str, Any]) -> Any:
    ((kind, given),) = document.items()
    match kind:
        case "Choice":
            return hp_choice([_dimension_from_json(option) for option in given])
        case "Uniform":
            return _checked("hp_uniform", Uniform(**given))
        case "LogUniform":
            return hp_log(given["low"], given["high"])
        case "Integer":
            return hp_int(**given)
        case "parts":
            return {name: _dimension_from_json(each) for name, each in given.items()}
        case "value":
            return given
    raise KeyError(kind)


def grid(search_space: Mapping[str, Dimension]) -> list[dict[str, Any]]:
    """Return all combinations; the last parameter changes fastest, as in nested loops.

    Raises:
        ConfigurationError: a parameter has infinitely many values.
    """
    return _combinations(search_space, "search_space")


def _combinations(space: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    values = [_values(value, f"{where}[{name!r}]") for name, value in space.items()]
    return [dict(zip(space, each, strict=True)) for each in product(*values)]


def _values(value: Any, where: str) -> Sequence[Any]:
    """Return what a parameter may be, or the only thing that a part of an option is."""
    match value:
        case Integer():
            return value.options
        case Choice(options):
            return [each for option in options for each in _values(option, where)]
        case Uniform() | LogUniform():
            raise ConfigurationError(
                f"{where} is {value!r}, which a grid can't go through; give "
                "hp_choice([...]) or hp_int(low, high), or use RandomSearch"
            )
        case dict() if is_nested(value):
            return _combinations(value, where)
    return [value]


def draws(
    search_space: Mapping[str, Dimension], count: int, random: Random
) -> list[dict[str, Any]]:
    """Draw random combinations one after the other from one generator.

    With the same seed, a longer list begins with the shorter one.
    """
    return [
        {name: dimension.sample(random) for name, dimension in search_space.items()}
        for _ in range(count)
    ]


def whole(name: str, value: Any, least: int) -> int:
    """Return the value of an argument, which must be a whole number.

    Raises:
        ConfigurationError: it is something else, or below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} is {value!r}; it is a whole number from {least}")
    return value


def seconds(name: str, value: Any) -> float | None:
    """Return the value of an argument, which must be a number of seconds, or None.

    Raises:
        ConfigurationError: it is something else.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise ConfigurationError(f"{name} is {value!r}; it is a number of seconds, or None")
    return float(value)


def duration(name: str, value: Any) -> float | None:
    """Return the seconds of an argument: a number, or a text such as "90s", "30m" or "1h30m".

    Raises:
        ConfigurationError: it is something else.
    """
    if not isinstance(value, str):
        return seconds(name, value)
    found = _DURATION.fullmatch(value.replace(" ", ""))
    parts = (
        [float(part or 0) * unit for part, unit in zip(found.groups(), _UNITS, strict=True)]
        if found
        else []
    )
    if not sum(parts):
        raise ConfigurationError(
            f'{name} is {value!r}; give seconds, or a text such as "90s", "30m", "2h" or "1h30m"'
        )
    return sum(parts)


def share(name: str, value: Any) -> float:
    """Return the value of an argument, which must be a number from 0 to 1.

    Raises:
        ConfigurationError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigurationError(f"{name} is {value!r}; it is a number from 0 to 1")
    return float(value)
