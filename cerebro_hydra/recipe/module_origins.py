"""Says who wrote a module: the user, this package, Python, or whoever else's is installed."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path

import torch

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_OURS = __name__.partition(".")[0]


@functools.lru_cache(1000)
def is_installed(package: str) -> bool:
    """Return whether a package is not the user's own code: installed, built in or of Python.

    Where Spark brings an environment along, it is in no folder that this Python knows as its own.
    """
    module = sys.modules.get(package)
    if module is None or package == "__main__":
        return False
    places = list(getattr(module, "__path__", ())) or [getattr(module, "__file__", None)]
    if places == [None]:
        return package in sys.builtin_module_names
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    roots.add(Path(torch.__file__).parents[1])  # what lies beside torch was installed like it
    paths = [Path(place) for place in places if place]
    named = any(_INSTALLED.intersection(path.parts) for path in paths)
    return named or any(path.is_relative_to(root) for path in paths for root in roots)


def is_own(module: str | None) -> bool:
    """Return whether the user wrote a module: it is none of Python's, of ours, or installed."""
    package = str(module).partition(".")[0]
    of_python = package in sys.stdlib_module_names and package != "__main__"
    return not (of_python or is_ours(module) or is_installed(package))


def is_ours(module: str | None) -> bool:
    """Return whether a module is one of this package."""
    return str(module).partition(".")[0] == _OURS
