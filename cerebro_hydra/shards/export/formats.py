"""Writes trained models for programs that know nothing of us: `torch.export` archives and ONNX.

What is written is loaded again and compared before it lies where it was asked for.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.shards.cut.export import first_line
from cerebro_hydra.shards.engine.differences import same_bits
from cerebro_hydra.shards.export.check import beyond
from cerebro_hydra.shards.export.program import ExportedModel, torch_program

ONNX_TOLERANCE = 1e-4
"""How far ONNX may be from torch, relative to the largest prediction of a batch."""

_ONE_FILE = 2**31 - 2**20  # protobuf's limit, less what the graph takes
_Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def write_torch(model: ExportedModel, features: Sequence[Tensor], path: Path) -> None:
    """Write a program of `torch.export`, which must give the same bits as the model.

    It takes the features by position, with any number of rows, and gives the prediction, or the
    tuple of predictions if there are several.

    Args:
        features: a batch of at least 3 rows that the model takes.

    Raises:
        ConfigurationError: it can't be written so, or gives other bits.
    """
    with _finished(path) as file:
        with _explained("torch"):
            torch.export.save(torch_program(model, features), file)
            program = torch.export.load(file).module()
        _compare("torch", model, lambda batch: _tuple(program(*batch)), features, 0.0)


def write_onnx(
    model: ExportedModel,
    features: Sequence[Tensor],
    path: Path,
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> None:
    """Write an ONNX model, whose predictions must be those of the model within `ONNX_TOLERANCE`.

    It takes any number of rows. Weights of more than 2 GiB lie in a second file, `<path>.data`.

    Args:
        features: a batch of at least 3 rows that the model takes.
        inputs, outputs: the names of features and predictions in the file.

    Raises:
        SetupError: a package is missing.
        ConfigurationError: an operator has no form in ONNX, or predictions differ.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"format 'onnx' needs {error.name}; install it with pip install 'cerebro-hydra[onnx]'"
        ) from error
    with _finished(path) as file:
        with _explained("onnx"):
            program = torch_program(model, features)
            _export_onnx(program, file, inputs, outputs, _nbytes(model))
            session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        taken = {each.name for each in session.get_inputs()}  # what no prediction needs is left out

        def run(batch: Sequence[Tensor]) -> Sequence[Tensor]:
            given = {n: x.numpy() for n, x in zip(inputs, batch, strict=True) if n in taken}
            return [torch.from_numpy(array) for array in session.run(None, given)]

        _compare("onnx", model, run, features, ONNX_TOLERANCE)


def _export_onnx(
    program: ExportedProgram,
    file: Path,
    inputs: Sequence[str],
    outputs: Sequence[str],
    nbytes: int,
) -> None:
    log = logging.getLogger("torch.onnx")  # it warns of every library that is not installed
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            made = torch.onnx.export(
                program, input_names=inputs, output_names=outputs, dynamo=True, verbose=False
            )
        assert made is not None
        made.save(str(file), external_data=nbytes > _ONE_FILE)
    finally:
        log.setLevel(level)


def _nbytes(model: ExportedModel) -> int:
    return sum(tensor.nbytes for tensor in model.tensors())


@contextmanager
def _finished(path: Path) -> Iterator[Path]:
    """Give the path of a file in a new folder; its files move to `path` when the body has ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as folder:
        yield Path(folder, path.name)
        for made in sorted(os.listdir(folder), reverse=True):  # the model after its data
            os.replace(Path(folder, made), path.parent / made)


@contextmanager
def _explained(form: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigurationError(
            f"the model can't be exported as {form!r}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _compare(
    form: str, model: ExportedModel, run: _Run, features: Sequence[Tensor], tolerance: float
) -> None:
    """Compare with the model on this batch, on fewer rows, and on one.

    Raises:
        ConfigurationError: predictions differ.
    """
    for rows in (len(features[0]), len(features[0]) - 1, 1):
        batch = [column[:rows] for column in features]
        expected = model(*batch)
        with _explained(form):
            found = tuple(run(batch))
        same = len(found) == len(expected) and all(map(same_bits, found, expected))
        if not same and (told := beyond(found, expected, tolerance)) is not None:
            raise ConfigurationError(
                f"the model can't be exported as {form!r}: it gives other predictions for {rows} "
                f"rows{told}"
            )


def _tuple(given: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (given,) if isinstance(given, Tensor) else tuple(given)
