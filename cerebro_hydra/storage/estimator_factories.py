"""Finds the `estimator_gen_fn` of a run again: as given, as remembered, or by its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from cerebro_hydra.errors import ReplayError

Factory = Callable[[Any], Any]

_remembered: dict[str, Factory] = {}


def remember(run_path: str, factory: Factory) -> None:
    """Keep the factory of a run for as long as this process lives; it serves notebooks."""
    _remembered[os.path.realpath(run_path)] = factory


def name_of(factory: Factory) -> str | None:
    """Return the `module:qualname` by which a new process can import the factory, or None.

    None for lambdas, nested functions and what a script or notebook itself defines (`__main__`).
    """
    module = getattr(factory, "__module__", None)
    qualname = getattr(factory, "__qualname__", None)
    if not module or not qualname or module == "__main__":
        return None
    name = f"{module}:{qualname}"
    try:
        return name if import_factory(name) is factory else None
    except ReplayError:
        return None


def import_factory(name: str) -> Factory:
    """Import a factory by `module:qualname`.

    Raises:
        ReplayError: the name has another form, or it can't be imported, or is not callable.
    """
    module, separator, qualname = name.partition(":")
    if not (module and separator and qualname):
        raise ReplayError(
            f"factory {name!r} has another form than module:name, such as "
            "'my_models:estimator_gen_fn'"
        )
    try:
        found: Any = import_module(module)
    except ImportError as error:
        raise ReplayError(
            f"factory {name!r}: can't import {module!r} ({error}); run from the folder that holds "
            "it, or set PYTHONPATH"
        ) from error
    for attribute in qualname.split("."):
        found = getattr(found, attribute, None)
    if not callable(found):
        raise ReplayError(f"factory {name!r}: module {module!r} has no function {qualname!r}")
    return found


def find(run_path: str, recorded: str | None, given: Factory | str | None = None) -> Factory:
    """Return the factory of a run: the given, else the remembered, else the recorded one.

    Raises:
        ReplayError: none of them leads to a function; says how to give one.
    """
    for each in (given, _remembered.get(os.path.realpath(run_path)), recorded):
        if each is not None:
            return import_factory(each) if isinstance(each, str) else each
    raise ReplayError(
        f"the run {run_path!r} has no recorded factory, because its estimator_gen_fn was defined "
        "in a script, a notebook or another function; give it as factory=, or on the command line "
        "as --factory module:name"
    )
