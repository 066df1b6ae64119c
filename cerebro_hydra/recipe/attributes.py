"""Keeps the attributes of a model's modules as they are while it is evaluated."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

_CONTAINERS = (dict, OrderedDict, defaultdict, set, list, deque)


def kept_attributes(model: nn.Module) -> AbstractContextManager[None]:
    """Give the modules of a model their attributes back after the body; see `kept_in`."""
    return kept_in(model.modules())


@contextmanager
def kept_in(holders: Iterable[Any]) -> Iterator[None]:
    """Give objects their attributes back after the body.

    Dicts, sets and lists have their entries again; what is written into a tensor or an object
    stays.
    """
    kept = [
        (
            own := vars(holder),
            dict(own),
            {name: value.copy() for name, value in own.items() if type(value) in _CONTAINERS},
        )
        for holder in holders
    ]
    try:
        yield
    finally:
        for own, values, contents in kept:
            own.clear()
            own.update(values)
            for name, content in contents.items():
                container = values[name]
                container.clear()
                if isinstance(container, dict | set):
                    container.update(content)
                else:
                    container.extend(content)
