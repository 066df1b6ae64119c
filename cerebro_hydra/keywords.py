"""Refuses misspelled keywords with the name that was meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec

A = ParamSpec("A")


def check_keywords(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse the first keyword that a function does not have.

    Raises:
        TypeError: it names the function, the keyword and the nearest name, or all names.
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            nearest = get_close_matches(name, names, n=1, cutoff=0.7)
            remedy = f"did you mean {nearest[0]!r}?" if nearest else f"it has {names}"
            raise TypeError(f"{function} has no argument {name!r}; {remedy}")


def keywords_of(kind: type) -> set[str]:
    """Return the keywords of a class, with those that its `__init__` passes on to its bases."""
    names = set[str]()
    for each in kind.__mro__:
        if "__init__" not in vars(each):
            continue
        _, *parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
        names |= {p.name for p in parameters if p.kind not in _COLLECTING}
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    return names


_COLLECTING = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def named_init(init: Callable[A, None]) -> Callable[A, None]:
    """Let an `__init__` refuse a misspelled keyword as `check_keywords` does.

    That of a base class speaks of the class of the object, which has passed the keyword on.
    """
    own = {*inspect.signature(init).parameters}

    @wraps(init)
    def checked(*args: A.args, **kwargs: A.kwargs) -> None:
        if unknown := [name for name in kwargs if name not in own]:
            kind = type(args[0])
            check_keywords(kind.__name__, unknown, keywords_of(kind))
        init(*args, **kwargs)

    return checked
