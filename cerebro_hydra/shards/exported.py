"""Writes and loads exported models, which need no source: a graph and a file of weights.

The graph is the archive of torch.export: JSON and raw tensors, without sample inputs. The weights
are a safetensors file under the model's own names. Neither holds a pickle, and loading refuses one.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.export.passes import move_to_device_pass

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.autocast import autocasting
from cerebro_hydra.shards.differences import same_bits
from cerebro_hydra.shards.trace import dynamic_dims

GRAPH_FILE = "graph.pt2"
WEIGHTS_FILE = "weights.safetensors"

_AUTOCAST = "autocast"  # an extra file of the archive, because the graph itself has no autocast
_MODEL = "model"  # the wrapper's attribute, which begins every name in the graph


class ExportedModel(nn.Module):
    """A loaded model's `forward(*features)` returns the tuple of predictions.

    Features are tensors with rows first, in the order of the feature columns, with any number of
    rows from 1. The model can't be trained: `train` and `eval` change nothing, and gradients are
    not recorded.
    """

    def __init__(self, program: ExportedProgram, autocast: str | None, device: str) -> None:
        super().__init__()
        self._run = program.module(check_guards=False)
        self._autocast = autocast
        self._device = device

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad(), autocasting(self._autocast, self._device):
            return tuple(self._run(*features))

    def train(self, mode: bool = True) -> ExportedModel:
        self.training = False
        return self


class _EvaluationModule(nn.Module):
    """Takes features and returns plain tensors, so that no class of the user is exported."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.model = recipe.model
        self._call = recipe.call
        self._predictions = recipe.predictions

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._predictions(self._call(self.model, features)))


def save_exported(recipe: Recipe, features: Sequence[Tensor], folder: str | Path) -> None:
    """Write a recipe's model, as it evaluates, to `graph.pt2` and `weights.safetensors`.

    The written files are loaded again and must give the same bits as the model, on this batch and
    on one with another number of rows. The model is not changed.

    Args:
        features: one batch of every feature column with at least 2 rows, rows first, as the
            model's forward takes it, after `collate`. Other numbers of rows run on the same graph.
            So do other shapes if the recipe collates and the model's operations allow it; the
            graph of a recurrent layer holds for one length.
        folder: is made if it does not exist. Files of an earlier call are overwritten.

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
    module = _EvaluationModule(recipe)
    with _evaluating(module), torch.no_grad():
        with recipe.precision():
            program = _export(recipe, module, features)
        _write_weights(program, target / WEIGHTS_FILE)
        _write_graph(recipe, program, target / GRAPH_FILE)
        loaded = load_exported(target)
        for batch in (features, [x[:-1] for x in features]):
            _check(recipe, module, loaded, batch)


def load_exported(folder: str | Path, device: str | torch.device = "cpu") -> ExportedModel:
    """Load an exported model, without the model's source and its libraries.

    Args:
        folder: the folder that `save_exported` wrote to.
        device: the device that computes and on which features are given.

    Raises:
        ConfigurationError: a file is missing, belongs to another model or holds a pickle.
    """
    graph, weights = Path(folder) / GRAPH_FILE, Path(folder) / WEIGHTS_FILE
    for path in (graph, weights):
        if not path.is_file():
            raise ConfigurationError(f"{str(path)!r} is no file; give the folder of save_exported")
    _refuse_pickles(graph)
    extra = {_AUTOCAST: ""}
    program = torch.export.load(graph, extra_files=extra)
    strides = _strides(program)
    with safetensors.safe_open(weights, "pt") as file:  # type: ignore[no-untyped-call]
        names = set(file.keys())
        shared: Mapping[str, str] = file.metadata() or {}
        loaded: dict[str, Tensor] = {}
        for name, placeholder in program.state_dict.items():
            stored = name.removeprefix(f"{_MODEL}.")
            stored = shared.get(stored, stored)
            if stored not in names:
                raise ConfigurationError(
                    f"{str(weights)!r} has no {stored!r}, which {str(graph)!r} needs; give two "
                    "files of one export"
                )
            if stored not in loaded:
                loaded[stored] = _with_strides(file.get_tensor(stored), strides[name])
            tensor = loaded[stored]
            if isinstance(placeholder, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=False)
            program.state_dict[name] = tensor
    device = torch.device(device)
    if device.type != "cpu":
        # `Module.to` would not do, because the graph names the device of each tensor it creates.
        program = move_to_device_pass(program, device)
    return ExportedModel(program, extra[_AUTOCAST] or None, device.type)


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
    recipe: Recipe, module: _EvaluationModule, features: Sequence[Tensor]
) -> ExportedProgram:
    shapes = tuple(dynamic_dims(x, recipe.collate is not None) for x in features)
    try:
        program = torch.export.export(
            module, tuple(x.clone() for x in features), dynamic_shapes=(shapes,), strict=False
        )
    except ConfigurationError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise _failed(recipe, f"{type(error).__name__}: {lines[0] if lines else ''}") from error
    for name, constant in program.constants.items():
        if type(constant) is not Tensor:
            raise _failed(
                recipe, f"{name} is a {type(constant).__name__}, which only a pickle can hold"
            )
    return program


def _check(
    recipe: Recipe, module: _EvaluationModule, loaded: ExportedModel, batch: Sequence[Tensor]
) -> None:
    """Refuse a graph that gives other bits than its model.

    A forward may read values or sizes in Python, where the graph keeps those of one batch.
    """
    with recipe.precision():
        expected = module(*[x.clone() for x in batch])
    try:
        predictions = loaded(*[x.clone() for x in batch])
    except Exception as error:
        reason = f"its graph does not run on {len(batch[0])} rows ({error})"
        raise _failed(recipe, reason) from error
    if not all(map(same_bits, predictions, expected)):
        raise _failed(
            recipe,
            f"its graph gives other bits than the model for {len(batch[0])} rows; look for values "
            "or sizes that its forward reads in Python",
        )


def _write_weights(program: ExportedProgram, path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in program.state_dict.items():
        name = name.removeprefix(f"{_MODEL}.")
        original = first.setdefault(id(tensor), name)
        if original != name:
            shared[name] = original
        else:
            tensors[name] = tensor.detach().contiguous()
    safetensors.torch.save_file(tensors, path, metadata=shared)


def _write_graph(recipe: Recipe, program: ExportedProgram, path: Path) -> None:
    """Write the graph with one element in place of each weight, and without sample inputs."""
    program.example_inputs = None
    for name, tensor in program.state_dict.items():
        stand_in: Tensor = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        if isinstance(tensor, nn.Parameter):
            stand_in = nn.Parameter(stand_in, requires_grad=False)
        program.state_dict[name] = stand_in
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # each stand-in has one element
            torch.export.save(program, path, extra_files={_AUTOCAST: recipe.autocast or ""})
    except Exception as error:
        raise _failed(recipe, f"{type(error).__name__}: {error}") from error


def _refuse_pickles(path: Path) -> None:
    """Refuse an archive with pickled sample inputs or constants, which torch would unpickle."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename
            pickled = "/sample_inputs/" in name and info.file_size > 0
            if name.endswith("_config.json"):
                config: dict[str, Any] = json.loads(archive.read(info))["config"]
                pickled = any(each["use_pickle"] for each in config.values())
            elif name.endswith((".pt", ".pkl")):
                pickled |= info.file_size > 0
            if pickled:
                raise ConfigurationError(
                    f"{name} in {str(path)!r} is a pickle, which save_exported never writes; "
                    "do not load this file"
                )


def _strides(program: ExportedProgram) -> dict[str, tuple[int, ...]]:
    """Return the strides of each weight, because kernels may round otherwise on other strides."""
    placeholders = program.graph.find_nodes(op="placeholder")
    return {
        str(spec.target): node.meta["val"].stride()
        for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
    }


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def _failed(recipe: Recipe, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(recipe.model).__name__} can't be exported to load without its source: {reason}"
    )
