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


def named_init(init: Callable[A, None]) -> Callable[A, None]:
    """Let an `__init__` refuse a misspelled keyword as `check_keywords` does.

    That of a base class speaks of the class of the object, which has passed the keyword on.
    """
    known = [*inspect.signature(init).parameters][1:]

    @wraps(init)
    def checked(*args: A.args, **kwargs: A.kwargs) -> None:
        check_keywords(type(args[0]).__name__, kwargs, known)
        init(*args, **kwargs)

    return checked
