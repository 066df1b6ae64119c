"""Search spaces: what each hyper-parameter may be, and all combinations of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from cerebro_hydra.errors import ConfigurationError


@dataclass(frozen=True)
class Choice:
    """One of several values, each as good a guess as the others."""

    options: tuple[Any, ...]


def hp_choice(options: Iterable[Any]) -> Choice:
    """Let a hyper-parameter be one of `options`, tried in the given order.

    Options are what JSON holds: numbers, strings, booleans, None, lists and dictionaries of them,
    because a trial is sent to workers and kept in the run folder as JSON. Tuples arrive as lists.

    Raises:
        ConfigurationError: there are no options, or they have no order, or one is not JSON.
    """
    if isinstance(options, str | bytes | Mapping | set | frozenset) or not isinstance(
        options, Iterable
    ):
        raise ConfigurationError(
            f"hp_choice got {options!r}, a {type(options).__name__}; give a list of options, "
            "such as hp_choice([0.1, 0.01])"
        )
    values = tuple(_as_json(option) for option in options)
    if not values:
        raise ConfigurationError("hp_choice got no options; give at least one")
    return Choice(values)


def _as_json(option: Any) -> Any:
    """The option as a worker will see it, so that the driver's factory sees the same."""
    try:
        return json.loads(json.dumps(option, default=_from_numpy))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"hp_choice got the option {option!r}, a {type(option).__name__}, which JSON can't "
            "hold; give its name as a string and look it up in estimator_gen_fn"
        ) from error


def _from_numpy(value: Any) -> Any:
    # np.arange and np.linspace make scalars and arrays that JSON does not know.
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError


def check_space(search_space: Any) -> dict[str, Choice]:
    """Return the search space as a dictionary in its own order.

    Raises:
        ConfigurationError: it is no dictionary, or empty, or a value is not made by an `hp_`
            function.
    """
    if not isinstance(search_space, Mapping):
        raise ConfigurationError(
            f"search_space is {search_space!r}, a {type(search_space).__name__}; give a "
            'dictionary such as {"lr": hp_choice([0.1, 0.01])}'
        )
    if not search_space:
        raise ConfigurationError(
            'search_space is empty; give at least one parameter, such as {"lr": hp_choice([0.1])}'
        )
    for name, values in search_space.items():
        if not isinstance(name, str):
            raise ConfigurationError(
                f"search_space has the key {name!r}, a {type(name).__name__}; names are strings"
            )
        if not isinstance(values, Choice):
            hint = values if isinstance(values, list | tuple) else [values]
            raise ConfigurationError(
                f"search_space[{name!r}] is {values!r}; write hp_choice({list(hint)!r})"
            )
    return dict(search_space)


def grid(search_space: Mapping[str, Choice]) -> list[dict[str, Any]]:
    """All combinations; the last parameter changes fastest, as in nested loops."""
    names = list(search_space)
    options = (search_space[name].options for name in names)
    return [dict(zip(names, values, strict=True)) for values in product(*options)]
