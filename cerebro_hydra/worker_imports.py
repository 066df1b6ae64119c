"""Keeps Python processes from importing what lies in the folder that they start in.

Spark starts its workers with `python -m`, and torch tries the CPU by `python -c`. Both look in the
current folder before anywhere else, whoever may write there; on local Spark it is the driver's.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cerebro_hydra.temporary_folders import temporary_folder

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

_T = TypeVar("_T")

SAFE_PATH = "PYTHONSAFEPATH"
"""Python's own variable: if it is set, the current folder is no place to import from."""

_setting_safe_path = threading.Lock()
_with_safe_path = list[None]()
"""Has an item for each thread that has set the variable."""
_as_given = list[str | None]()
"""What the variable was before the first of them, if there is one."""

_taking_variables = threading.Lock()
"""Held while a SparkContext has the variables of one job."""


def driver_path() -> str:
    """Return a PYTHONPATH by which others on this machine import from where this process does."""
    folders = [str(Path(entry or ".").resolve()) for entry in sys.path]
    root = str(Path(__file__).resolve().parents[1])
    if root not in folders:
        folders.insert(0, root)
    current = str(Path.cwd())
    if current in folders[1:]:  # added after the installed ones, to find what was named there
        folders.insert(folders.index(current), _no_customization())
    return os.pathsep.join(dict.fromkeys(f for f in folders if os.path.isdir(f)))


@contextmanager
def safe_path() -> Iterator[None]:
    """Let Python processes that are begun meanwhile import nothing from the current folder.

    Threads may do so at the same time.
    """
    with _setting_safe_path:
        if not _with_safe_path:
            _as_given.append(os.environ.get(SAFE_PATH))
            os.environ[SAFE_PATH] = _as_given[0] or "1"
        _with_safe_path.append(None)
    try:
        yield
    finally:
        with _setting_safe_path:
            _with_safe_path.pop()
            if not _with_safe_path:
                del os.environ[SAFE_PATH]
                if (kept := _as_given.pop()) is not None:
                    os.environ[SAFE_PATH] = kept


@contextmanager
def importing_from_current_folder(module: str) -> Iterator[None]:
    """Import a module from the current folder if it lies there alone, with what it needs.

    That folder comes after all else. Otherwise it is no place to import from, for whoever writes
    there may name files as packages that aren't installed and that others try to import. Python
    processes begun meanwhile don't look there, such as those in which torch tries what this CPU
    can.

    Args:
        module: its name, with dots.
    """
    if not _is_found(module):
        current = os.getcwd()
        if PathFinder.find_spec(module.partition(".")[0], [current]) is not None:
            sys.path += [_no_customization(), current]
    with safe_path():
        yield


def _is_found(module: str) -> bool:
    """Say whether the path has a module, or the package that it would be in; imports nothing."""
    root, *inner = module.split(".")
    try:
        spec = find_spec(root)
    except ValueError:  # it is imported, and without a spec, as __main__ is
        return True
    while inner and spec is not None and _is_namespace(spec):
        spec = PathFinder.find_spec(inner.pop(0), spec.submodule_search_locations)
    return spec is not None and not _is_namespace(spec)


def _is_namespace(spec: ModuleSpec) -> bool:
    """Say whether this is a mere folder, to which another part of the path may add."""
    return spec.origin is None and spec.submodule_search_locations is not None


@functools.cache
def _no_customization() -> str:
    """Return a folder of modules that Python looks for as it starts, which do nothing."""
    folder = temporary_folder("imports")
    atexit.register(folder.cleanup)
    for name in ("sitecustomize", "usercustomize"):
        Path(folder.name, f"{name}.py").touch()
    return folder.name


@contextmanager
def own_workers(
    context: SparkContext, variables: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Give the Python workers of what is built in the block variables, and a safe path.

    On a master of this machine they import from where the driver does, in its order, if they are
    of its Python; elsewhere from what is installed and shipped there. Who has set PYTHONSAFEPATH
    for the session decides instead. Spark keeps Python workers by their variables, so that other
    jobs keep theirs.
    """
    wanted = {**_safe_path(context), **(variables or {})}
    if not wanted:
        yield
        return
    with _taking_variables:
        kept = context.environment
        context.environment = {**kept, **wanted}
        try:
            yield
        finally:
            context.environment = kept


def by_own_workers(rdd: RDD[_T], variables: Mapping[str, str] | None = None) -> RDD[_T]:
    """Let such workers compute an RDD; see `own_workers`."""
    with own_workers(rdd.context, variables):
        rdd._jrdd  # noqa: B018  # it takes the variables now
    return rdd


def _safe_path(context: SparkContext) -> dict[str, str]:
    if SAFE_PATH in context.environment:
        return {}
    variables = {SAFE_PATH: "1"}
    if re.fullmatch(r"local(\[.*\])?", str(context.master)):
        python = shutil.which(context.pythonExec)
        if python is not None and os.path.dirname(python) == os.path.dirname(sys.executable):
            own = context.environment.get("PYTHONPATH")
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [own, driver_path()]))
    return variables
