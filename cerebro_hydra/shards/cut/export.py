"""Exports a module's graph, and gives the reason in one line where that fails.

Guards are the conditions on input shapes under which an exported graph is its model's.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import re
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from cerebro_hydra.foreign_text import class_name, error_text
from cerebro_hydra.recipe import ForwardCall
from cerebro_hydra.shards.cut.sample import Sample

_NOT_USERS = (
    "<",
    str(Path(torch.__file__).parent),
    sysconfig.get_paths()["stdlib"],
    str(Path(__file__).parents[1]),
)
"""What the files of torch, of Python and of this room begin with, and code without a file."""

_SIZE = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]")


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
    lines = error_text(error).strip().splitlines()
    return f"{class_name(error)}: {lines[0] if lines else ''}"


@dataclass(frozen=True)
class Guards:
    """Holds the conditions on the arguments of a forward.

    `conditions` come from `torch.export`. `shapes` has the sizes of each input, with None where a
    size may differ between batches. `fixes_rows` says whether the number of rows may not.
    """

    conditions: tuple[str, ...]
    shapes: tuple[tuple[int | None, ...], ...]
    fixes_rows: bool
    signature: inspect.Signature
    call: ForwardCall

    @classmethod
    def of(cls, model: nn.Module, call: ForwardCall, program: ExportedProgram) -> Guards:
        """Return the conditions under which an exported program equals its model."""
        placeholders = program.graph.find_nodes(op="placeholder")
        inputs = [
            node.meta["val"].shape
            for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True)
            if spec.kind is InputKind.USER_INPUT and isinstance(node.meta["val"], Tensor)
        ]
        shapes = tuple(
            tuple(size if isinstance(size, int) else None for size in shape) for shape in inputs
        )
        fixes_rows = any(_is_fixed(shape[0]) for shape in inputs if shape)
        conditions = tuple(program._guards_code or ())
        return cls(conditions, shapes, fixes_rows, inspect.signature(model.forward), call)

    def violated(self, inputs: Sequence[Tensor]) -> str | None:
        """Return the first condition that a batch does not meet, or None."""
        for number, (tensor, sizes) in enumerate(zip(inputs, self.shapes, strict=True)):
            for dim, (size, fixed) in enumerate(zip(tensor.shape, sizes, strict=True)):
                if dim and fixed is not None and size != fixed:
                    return f"dimension {dim} of input {number} is {fixed}"
                if dim and fixed is None and size < 2:  # a size of one would broadcast
                    return f"dimension {dim} of input {number} is at least 2"
        args, kwargs = self.call.arguments(inputs)
        bound = self.signature.bind(*args, **kwargs).arguments
        names = {"L": dict(bound), "torch": torch, "math": math}
        for condition in self.conditions:
            if not eval(condition, names):
                return _SIZE.sub(r"\1.shape[\2]", condition)
        return None


def _is_fixed(size: int | torch.SymInt) -> bool:
    """Return whether a size is one number, which torch.export may have found out late."""
    return isinstance(size, int) or bool(size.node.expr.is_number)


def length_held_fixed(model: nn.Module, sample: Sample, guards: Guards) -> int | None:
    """Return a size other than the rows that the graph demands and the model does not, or None.

    The graph of a recurrent layer holds for one length of sequences, though the layer takes any.
    The one width of a linear layer is demanded by the layer itself.
    """
    sizes = {size for tensor in sample.inputs for size in tensor.shape[1:]}
    for size in sorted(sizes, reverse=True):
        if size < 3:
            continue
        shorter = [_shortened(tensor, size) for tensor in sample.inputs]
        if guards.violated(shorter) is None:
            continue
        try:
            with torch.no_grad(), sample.precision():
                sample.call(model, shorter)
        except Exception:
            continue
        return size
    return None


def _shortened(tensor: Tensor, size: int) -> Tensor:
    for dim in range(1, tensor.dim()):
        if tensor.shape[dim] == size:
            tensor = tensor.narrow(dim, 0, size - 1)
    return tensor.contiguous()


_one_at_a_time = threading.RLock()


class PlainAnswers:
    """Tells code outside of torch that nothing is traced; torch itself has the true answers.

    Attributes:
        asked: whether such code asked.
    """

    def __init__(self) -> None:
        self.asked = False
        self._answers = False

    @contextmanager
    def given(self) -> Iterator[None]:
        """Answer so for a while, in which no other thread traces."""
        import torch._dynamo  # which torch.export imports; only now, because it takes seconds

        with _one_at_a_time, ExitStack() as stack:
            for module, names in (
                (torch.compiler, ("is_compiling", "is_exporting")),
                (torch._dynamo, ("is_compiling",)),
            ):
                plain = {name: self._no_instead_of(vars(module)[name]) for name in names}
                stack.enter_context(self._seen(module, **plain))
            fake = self._nothing_instead_of(torch._subclasses.FakeTensor)
            stack.enter_context(self._seen(torch._subclasses, FakeTensor=fake))
            self._answers = True
            try:
                yield
            finally:
                self._answers = False

    def _no_instead_of(self, asks: Callable[[], bool]) -> Callable[[], bool]:
        """Return what says no while plain answers are given; a module may keep it for later."""

        def answer() -> bool:
            return False if self._answers else asks()

        return answer

    def _nothing_instead_of(self, kind: type) -> type:
        """Return a class that nothing is an instance of for so long, and its likeness after it."""

        class Likeness(type):
            def __instancecheck__(cls, instance: object) -> bool:
                return not self._answers and isinstance(instance, kind)

        return Likeness("FakeTensor", (), {})

    @contextmanager
    def _seen(self, module: ModuleType, **plain: Any) -> Iterator[None]:
        """Let code outside of torch see these attributes in place of a module's own."""
        before = module.__class__
        seen = {name: self._attribute(name, value) for name, value in plain.items()}
        module.__class__ = type(before.__name__, (before,), seen)
        try:
            yield
        finally:
            module.__class__ = before

    def _attribute(self, name: str, plain: Any) -> property:
        def get(module: ModuleType) -> Any:
            asker = sys._getframe(1).f_globals.get("__name__", "")
            if asker.partition(".")[0] == "torch":
                return vars(module)[name]
            self.asked = True
            return plain

        return property(get)
