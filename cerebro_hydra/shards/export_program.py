"""Exports a module's graph, and gives the reason in one line where that fails."""

from __future__ import annotations

import functools
import logging
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from cerebro_hydra.shards.plain_answers import PlainAnswers

_NOT_USERS = (
    "<",
    str(Path(torch.__file__).parent),
    sysconfig.get_paths()["stdlib"],
    str(Path(__file__).parent),
)
"""What the files of torch, of Python and of this room begin with, and code without a file."""


class ExportFailed(Exception):
    """A module can't be exported; says torch's error in one line, and the line that raised it."""


def export_program(
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any] | None,
    dynamic_shapes: Any,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> ExportedProgram:
    """Run `torch.export` without its warnings and graphs; `within` is for forward.

    The forward is not told that it is traced, so that the graph holds what runs plainly. A forward
    that can't be traced so, because it then reads values, is told and traced once more.

    Raises:
        ExportFailed: `torch.export` or the module's forward raised an error.
    """
    answers = PlainAnswers()
    try:
        with answers.given():
            return _export(module, args, kwargs, dynamic_shapes, within)
    except ExportFailed:
        if not answers.asked:
            raise
    return _export(module, args, kwargs, dynamic_shapes, within)


def _export(
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any] | None,
    dynamic_shapes: Any,
    within: Callable[[], AbstractContextManager[Any]],
) -> ExportedProgram:
    try:
        with _silent_torch(), _printing_no_graph(module, within):
            return torch.export.export(
                module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
            )
    except ExportFailed:
        raise
    except Exception as error:
        raise ExportFailed(_told(error)) from error


@contextmanager
def _silent_torch() -> Iterator[None]:
    """Drop torch's warnings and errors of this thread, and Python's warnings, for a while.

    They hold tracebacks and parts of the graph. Lower levels are only logged if a user asks, and
    what the model itself warns of is heard when it is not traced.
    """
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno < logging.WARNING

    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(passes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(passes)


@contextmanager
def _printing_no_graph(
    module: nn.Module, within: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Hide a forward's RuntimeErrors from torch.

    `torch.export` prints the whole graph to stderr for each RuntimeError that says
    "data-dependent", so what leaves the forward is an error of ours, with torch's as its cause.
    """
    forward = module.forward
    own = vars(module).get("forward")

    @functools.wraps(forward)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            with within():
                return forward(*args, **kwargs)
        except RuntimeError as error:
            raise ExportFailed(_told(error)) from error

    module.forward = guarded
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _told(error: Exception) -> str:
    """Return an error in one line, with the last line outside of torch that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_USERS)]
    if not own:
        return first_line(error)
    return f"{first_line(error)}, at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}"


def first_line(error: Exception) -> str:
    """Return the name of an error, and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
