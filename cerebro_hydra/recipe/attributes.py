"""Keeps the attributes of a model's modules as they are while it is evaluated."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_CONTAINERS = (dict, OrderedDict, defaultdict, set, list, deque)


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Give the modules of a model their attributes back after the body.

    Dicts, sets and lists have their entries again; what is written into a tensor or an object
    stays.
    """
    kept = [
        (
            own := vars(module),
            dict(own),
            {name: value.copy() for name, value in own.items() if type(value) in _CONTAINERS},
        )
        for module in model.modules()
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
