"""Writes and loads exported models, which need no source: a graph and two files of tensors.

```
graph.json              calls of known operators, and the digests of all three files
weights.safetensors     parameters and buffers, under the model's own names
constants.safetensors   the other tensors of the graph
```

Tensors lie at multiples of `ALIGNMENT`, in memory and in their files, where `pad:N` fills the gaps.

None of them is executable, and loading evaluates nothing: `stored_graph` is the whole grammar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.archive_tensors import (
    NotTheTensors,
    placed,
    read_tensors,
    write_tensors,
)
from cerebro_hydra.shards.constant_values import ConstantValues
from cerebro_hydra.shards.export_check import difference
from cerebro_hydra.shards.export_program import ExportFailed, export_program
from cerebro_hydra.shards.exported_model import ExportedModel
from cerebro_hydra.shards.graph_document import GraphDocument
from cerebro_hydra.shards.stored_graph import (
    InvalidGraph,
    StoredTensor,
    dense_strides,
    read_graph,
)
from cerebro_hydra.shards.trace import dynamic_dims
from cerebro_hydra.storage.digest import file_digest
from cerebro_hydra.storage.digested_json import decode_format, encode_format

GRAPH_FILE = "graph.json"
WEIGHTS_FILE = "weights.safetensors"
CONSTANTS_FILE = "constants.safetensors"
EXPORTED_FILES = (GRAPH_FILE, WEIGHTS_FILE, CONSTANTS_FILE)

_FORMAT = 2
_LARGEST_GRAPH = 64 * 2**20
_MODEL = "model."  # the wrapper's attribute, which begins the name of each weight in the graph


class _EvaluationModule(nn.Module):
    """Takes features and returns plain tensors, so that no class of the user is exported."""

    def __init__(self, recipe: Recipe, collated: bool) -> None:
        super().__init__()
        self.model = recipe.model
        self._prepared = recipe.cast if collated else lambda x: recipe.collated(x, (), None)[0]
        self._call = recipe.call
        self._predictions = recipe.predictions

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._predictions(self._call(self.model, self._prepared(features))))


def save_exported(
    recipe: Recipe, features: Sequence[Tensor], folder: str | Path, collated: bool = True
) -> None:
    """Write a recipe's model, as it evaluates, to the three files of an exported model.

    The written files are loaded again and must give the same bits as the model, on this batch and
    on one with another number of rows. The model is not changed. Where bits depend on addresses,
    because MKL was called before its mode could be set, a warning tells of a difference in
    rounding.

    Args:
        features: one batch of every feature column with at least 2 rows, rows first. Other numbers
            of rows run on the same graph. So do other shapes if the recipe has collated them and
            the model's operations allow it; the graph of a recurrent layer holds for one length.
        folder: is made if it does not exist. Files of an earlier call are overwritten.
        collated: whether `features` are as the model's forward takes them, after `collate`. If not,
            the graph begins with what `collate` does in evaluation.

    Raises:
        ConfigurationError: the model can't be exported; the message says why.
    """
    if any(x.dim() == 0 or x.shape[0] < 2 for x in features):
        raise ConfigurationError(
            f"features have shapes {[tuple(x.shape) for x in features]}; give at least 2 rows, or "
            "torch.export fixes the number of rows"
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    module = _EvaluationModule(recipe, collated)
    any_shape = collated and recipe.collate is not None
    with _evaluating(module), torch.no_grad():
        with recipe.precision():
            program = _export(recipe, module, features, any_shape)
        _write(_document(recipe, program), target)
        loaded = load_exported(target)
        for batch in (features, [x[:-1] for x in features]):
            if (reason := difference(recipe, module, loaded, batch)) is not None:
                raise _failed(recipe, reason)


def load_exported(folder: str | Path, device: str | torch.device = "cpu") -> ExportedModel:
    """Load an exported model, without the model's source and its libraries.

    Args:
        folder: the folder that `save_exported` wrote to.
        device: the device that computes and on which features are given.

    Raises:
        ConfigurationError: a file is missing, or holds what `save_exported` never writes.
        StoreError: a file is not as it was written.
    """
    paths = {name: Path(folder, name) for name in EXPORTED_FILES}
    for path in paths.values():
        if not path.is_file():
            raise ConfigurationError(f"{str(path)!r} is no file; give the folder of save_exported")
    document = _read_document(paths[GRAPH_FILE])
    try:
        digests = _digests(document)
        for name, digest in digests.items():
            if file_digest(paths[name]) != digest:
                raise StoreError(
                    f"{str(paths[name])!r} is not the file that was saved with {GRAPH_FILE}, or "
                    "was damaged; save the model again"
                )
        graph = read_graph(document)
        tensors = _read_tensors(graph.tensors, paths)
    except (InvalidGraph, NotTheTensors) as error:
        raise ConfigurationError(
            f"{str(folder)!r} holds what save_exported never writes ({error}); do not load it"
        ) from error
    return ExportedModel(graph, tensors).to(device)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Keep the model in eval mode, then put every module back into its mode."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _export(
    recipe: Recipe, module: _EvaluationModule, features: Sequence[Tensor], any_shape: bool
) -> ExportedProgram:
    shapes = tuple(dynamic_dims(x, any_shape) for x in features)
    arguments = tuple(x.clone() for x in features)
    # torch takes torch.cond only where no values are watched.
    for within in (ConstantValues, nullcontext):
        try:
            return export_program(module, arguments, None, (shapes,), within)
        except ExportFailed as error:
            if isinstance(error.__cause__, ConfigurationError):
                raise error.__cause__ from None
            failed = error
    raise _failed(recipe, str(failed)) from failed


def _document(recipe: Recipe, program: ExportedProgram) -> GraphDocument:
    """Return a program's document, which can be read again."""
    reason: InvalidGraph | None = None
    # Another pass of torch.export makes plain operators of what torch.vmap leaves in a graph.
    for passes in (lambda: program, lambda: program.run_decompositions({})):
        try:
            document = GraphDocument.of(passes(), _MODEL, recipe.autocast)
            read_graph(document.fields())
            return document
        except InvalidGraph as error:
            reason = reason or error
    raise _failed(recipe, str(reason)) from reason


def _write(document: GraphDocument, folder: Path) -> None:
    files: dict[str, dict[str, Tensor]] = {WEIGHTS_FILE: {}, CONSTANTS_FILE: {}}
    for described, tensor in zip(document.descriptions, document.tensors, strict=True):
        files[_file_of(described["kind"])][described["name"]] = tensor
    for name, tensors in files.items():
        write_tensors(folder / name, tensors)
    digests = {name: file_digest(folder / name) for name in files}
    content = encode_format({"files": digests, **document.fields()}, _FORMAT)
    (folder / GRAPH_FILE).write_bytes(content)


def _read_document(path: Path) -> dict[str, Any]:
    """Return the graph's document with the digests of the other files."""
    if path.stat().st_size > _LARGEST_GRAPH:
        raise ConfigurationError(
            f"{str(path)!r} has more than {_LARGEST_GRAPH} bytes, which no graph needs; do not "
            "load it"
        )
    return decode_format(str(path), path.read_bytes(), _FORMAT)


def _digests(document: dict[str, Any]) -> dict[str, str]:
    """Take the digests of the other files out of a graph's document."""
    digests = document.pop("files", None)
    if not isinstance(digests, dict) or digests.keys() != {WEIGHTS_FILE, CONSTANTS_FILE}:
        raise InvalidGraph(f"files must be the digests of {WEIGHTS_FILE} and {CONSTANTS_FILE}")
    return digests


def _read_tensors(stored: Sequence[StoredTensor], paths: Mapping[str, Path]) -> list[Tensor]:
    """Return the tensors that a graph needs; every tensor of the files must be one of them."""
    needed: dict[str, list[str]] = {WEIGHTS_FILE: [], CONSTANTS_FILE: []}
    for each in stored:
        needed[_file_of(each.kind)].append(each.name)
    found = {name: read_tensors(paths[name], names) for name, names in needed.items()}
    tensors = []
    for each in stored:
        tensor = found[_file_of(each.kind)][each.name]
        if tensor.dtype != each.dtype or tuple(tensor.shape) != each.shape:
            raise InvalidGraph(f"{each.name} has another type or shape than in {GRAPH_FILE}")
        tensors.append(placed(tensor, dense_strides(tensor.shape, each.order)))
    return tensors


def _file_of(kind: str) -> str:
    return CONSTANTS_FILE if kind == "constant" else WEIGHTS_FILE


def _failed(recipe: Recipe, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(recipe.model).__name__} can't be exported to load without its source: {reason}"
    )
