"""Finds the `estimator_gen_fn` of a run again: as given, as remembered, or as recorded and trusted.

A run's folder records the function's name. Whoever may write to the folder may write any name
there, and importing one runs code, so a recorded name is used only when the caller says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from cerebro_hydra.errors import CerebroHydraError, ConfigurationError, ReplayError
from cerebro_hydra.foreign_text import named_error_text
from cerebro_hydra.storage.local_paths import path_or_url

Factory = Callable[[Any], Any]

_remembered: dict[str, Factory] = {}


def remember(run_path: str, factory: Factory) -> None:
    """Keep the factory of a run for as long as this process lives; it serves notebooks."""
    _remembered[_place(run_path)] = factory


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


def importable_name(
    run_path: str, recorded: str | None, given: Factory | str | None, trust: bool
) -> str | None:
    """Return the name by which a new process finds what `find` returns, or None.

    Args:
        run_path, recorded, given, trust: see `find`.
    """
    if isinstance(given, str):
        return given
    function = _remembered.get(_place(run_path)) if given is None else given
    if function is not None:
        return name_of(function)
    return recorded if trust else None


def parts_of(name: str) -> tuple[str, str]:
    """Return the module and the qualname of a factory's `module:qualname`.

    Raises:
        ReplayError: the name has another form.
    """
    module, _, qualname = name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *qualname.split(".")]):
        raise ReplayError(
            f"factory {name!r} has another form than module:name, such as "
            "'my_models:estimator_gen_fn'"
        )
    return module, qualname


def import_factory(name: str) -> Factory:
    """Import a factory by `module:qualname`.

    Raises:
        ReplayError: the name has another form, or it can't be imported, or is not callable.
    """
    module, qualname = parts_of(name)
    try:
        found: Any = import_module(module)
    except ImportError as error:
        raise ReplayError(
            f"factory {name!r}: can't import {module!r} ({error}); run from the folder that holds "
            "it, or set PYTHONPATH"
        ) from error
    except CerebroHydraError:  # such as a search that the module starts
        raise
    except (Exception, SystemExit) as error:
        raise ReplayError(
            f"factory {name!r}: the import of {module!r} failed ({named_error_text(error)}); "
            "correct that module, or give another factory"
        ) from error
    for attribute in qualname.split("."):
        found = getattr(found, attribute, None)
    if not callable(found):
        raise ReplayError(f"factory {name!r}: module {module!r} has no function {qualname!r}")
    return found


def refuse_while_imported(factory: Factory) -> None:
    """Refuse a search that the module of its factory starts before its import has ended.

    Agents and replays import that module again, and would start the search again.

    Raises:
        ConfigurationError: the module is still imported.
    """
    name = getattr(factory, "__module__", None)
    spec = getattr(sys.modules.get(name or ""), "__spec__", None)
    if getattr(spec, "_initializing", False):
        raise ConfigurationError(
            f"the module {name!r} starts a search while it is imported, as agents and replays do "
            'again; put the call under `if __name__ == "__main__":`'
        )


def find(
    run_path: str, recorded: str | None, given: Factory | str | None = None, trust: bool = False
) -> Factory:
    """Return the factory of a run: the given, else the remembered, else the recorded one.

    Args:
        run_path: the folder of the run.
        recorded: the name in the folder; nothing is imported by it without `trust`.
        given: the function, or its name, from the caller's own hand.
        trust: whether the caller confirms the recorded name.

    Raises:
        ConfigurationError: only the recorded name is known, and it was not confirmed.
        ReplayError: none of them leads to a function; says how to give one.
    """
    if isinstance(given, str):
        return import_factory(given)
    found = _remembered.get(_place(run_path)) if given is None else given
    if found is not None:
        return found
    if recorded is None:
        raise ReplayError(
            f"the run {run_path!r} has no recorded factory, because its estimator_gen_fn was "
            "defined in a script, a notebook or another function; give it as factory=, or on the "
            "command line as --factory module:name"
        )
    if not trust:
        raise ConfigurationError(
            f"the run {run_path!r} records the factory {recorded!r}, and a name in a file is not "
            f"imported unasked: if it is yours, confirm it with trust=True or --trust; else give "
            "your own as factory= or --factory module:name"
        )
    return import_factory(recorded)


def _place(run_path: str) -> str:
    place = path_or_url("run_path", run_path)
    return os.path.realpath(place) if os.path.isabs(place) else place
