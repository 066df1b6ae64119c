"""Checks the numbers that a user gives to a search."""

from __future__ import annotations

from math import inf
from typing import Any

from cerebro_hydra.errors import ConfigurationError


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


def share(name: str, value: Any) -> float:
    """Return the value of an argument, which must be a number from 0 to 1.

    Raises:
        ConfigurationError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigurationError(f"{name} is {value!r}; it is a number from 0 to 1")
    return float(value)
