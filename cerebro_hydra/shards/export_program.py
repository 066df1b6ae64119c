"""Exports a module's graph, and gives the reason in one line where that fails."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram


class ExportFailed(Exception):
    """A module can't be exported; holds the name and the first line of torch's error."""


def export_program(
    module: nn.Module, args: Any, kwargs: dict[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    """Run `torch.export`, which prints nothing of the graph if it fails.

    Raises:
        ExportFailed: `torch.export` or the module's forward raised an error.
    """
    try:
        with _printing_no_graph(module):
            return torch.export.export(
                module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
            )
    except ExportFailed:
        raise
    except Exception as error:
        raise ExportFailed(first_line(error)) from error


@contextmanager
def _printing_no_graph(module: nn.Module) -> Iterator[None]:
    """Hide a forward's RuntimeErrors from torch.

    `torch.export` prints the whole graph to stderr for each RuntimeError that says
    "data-dependent", so what leaves the forward is an error of ours, with torch's as its cause.
    """
    forward = module.forward
    own = vars(module).get("forward")

    @functools.wraps(forward)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            raise ExportFailed(first_line(error)) from error

    module.forward = guarded
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def first_line(error: Exception) -> str:
    """Return the name of an error, and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
