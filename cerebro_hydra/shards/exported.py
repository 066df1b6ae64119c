"""A trained model that loads without its source: its evaluation graph, and its weights beside it.

The graph is torch.export's archive: JSON and raw tensors, without sample inputs. The weights are a
safetensors file under the model's own names. Neither holds a pickle, and loading refuses one.
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
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.export.passes import move_to_device_pass

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.autocast import autocasting
from cerebro_hydra.shards.differences import same_bits

GRAPH_FILE = "graph.pt2"
WEIGHTS_FILE = "weights.safetensors"

_AUTOCAST = "autocast"  # its name in the archive: a graph has none of the casts it was traced with
_MODEL = "model"  # where the wrapper keeps the model, so the first part of every name in the graph


class ExportedModel(nn.Module):
    """What `load_exported` gives: `forward(*features)` returns the tuple of predictions.

    Features are tensors, rows first, in the order of the feature columns; any number of rows from
    1. It knows no training: `train` and `eval` change nothing, and gradients are not recorded.
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
    """Features in, plain tensors out: no class of the user's is part of what is exported."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.model = recipe.model
        self._call = recipe.call
        self._predictions = recipe.predictions

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._predictions(self._call(self.model, features)))


def save_exported(recipe: Recipe, features: Sequence[Tensor], folder: str | Path) -> None:
    """Write a recipe's model, as it evaluates, to `graph.pt2` and `weights.safetensors`.

    What was written is loaded again and must give the bits of the model itself, on this batch and
    on one of another size. The model is not changed.

    Args:
        features: one batch of every feature column, rows first, as the model's forward takes it
            (after `collate`); at least 2 rows. Other numbers of rows run on the same graph, and
            other shapes too if the recipe collates and the model's operations let them: the graph
            of a recurrent layer holds for one length.
        folder: is made if it does not exist; files of a former call are overwritten.

    Raises:
        ConfigurationError: the model can't be exported; the message says why.
    """
    if any(x.dim() == 0 or x.shape[0] < 2 for x in features):
        raise ConfigurationError(
            f"features have shapes {[tuple(x.shape) for x in features]}; give at least 2 rows, or "
            "torch.export takes the number of rows for fixed"
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    predictor = _EvaluationModule(recipe)
    with _evaluating(predictor), torch.no_grad():
        with recipe.precision():
            program = _export(recipe, predictor, features)
        _write_weights(program, target / WEIGHTS_FILE)
        _write_graph(recipe, program, target / GRAPH_FILE)
        loaded = load_exported(target)
        for batch in (features, [x[:-1] for x in features]):
            _check(recipe, predictor, loaded, batch)


def load_exported(folder: str | Path, device: str | torch.device = "cpu") -> ExportedModel:
    """Load what `save_exported` wrote, with neither the model's source nor its libraries.

    Args:
        folder: of `save_exported`.
        device: where it computes, and takes its features.

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
                raise ConfigurationError(f"{str(weights)!r} has no {stored!r}, which {graph} needs")
            if stored not in loaded:
                loaded[stored] = _with_strides(file.get_tensor(stored), strides[name])
            tensor = loaded[stored]
            if isinstance(placeholder, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=False)
            program.state_dict[name] = tensor
    device = torch.device(device)
    if device.type != "cpu":
        # Not `Module.to`: the graph itself names the device of what it creates.
        program = move_to_device_pass(program, device)
    return ExportedModel(program, extra[_AUTOCAST] or None, device.type)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Within it the model is in eval mode; afterwards every module is in the mode it was in."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _export(
    recipe: Recipe, predictor: _EvaluationModule, features: Sequence[Tensor]
) -> ExportedProgram:
    all_free = recipe.collate is not None
    shapes = tuple(
        {dim: Dim.AUTO for dim in range(x.dim()) if dim == 0 or all_free} for x in features
    )
    try:
        program = torch.export.export(
            predictor, tuple(x.clone() for x in features), dynamic_shapes=(shapes,), strict=False
        )
    except ConfigurationError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise _failed(recipe, f"{type(error).__name__}: {lines[0] if lines else ''}") from error
    for name, constant in program.constants.items():
        if type(constant) is not Tensor:
            raise _failed(recipe, f"{name} is a {type(constant).__name__}, which only pickles")
    return program


def _check(
    recipe: Recipe, predictor: _EvaluationModule, loaded: ExportedModel, batch: Sequence[Tensor]
) -> None:
    """A forward may read values or sizes in Python, where the graph keeps those of one batch."""
    with recipe.precision():
        expected = predictor(*[x.clone() for x in batch])
    try:
        given = loaded(*[x.clone() for x in batch])
    except Exception as error:
        reason = f"its graph does not run on {len(batch[0])} rows ({error})"
        raise _failed(recipe, reason) from error
    if not all(map(same_bits, given, expected)):
        raise _failed(
            recipe,
            f"its graph gives other bits than itself for {len(batch[0])} rows; look for values or "
            "sizes that its forward reads in Python",
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
    """With one element in place of each weight, and nothing in place of the sample inputs."""
    program.example_inputs = None
    for name, tensor in program.state_dict.items():
        stand_in: Tensor = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        if isinstance(tensor, nn.Parameter):
            stand_in = nn.Parameter(stand_in, requires_grad=False)
        program.state_dict[name] = stand_in
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the stand-ins are one element each
            torch.export.save(program, path, extra_files={_AUTOCAST: recipe.autocast or ""})
    except Exception as error:
        raise _failed(recipe, f"{type(error).__name__}: {error}") from error


def _refuse_pickles(path: Path) -> None:
    """torch.export.load would unpickle sample inputs and some constants; ours has none."""
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
                    "don't load this file"
                )


def _strides(program: ExportedProgram) -> dict[str, tuple[int, ...]]:
    """How each weight lies in memory: kernels may round otherwise on another order."""
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    return {
        str(spec.target): placeholders[spec.arg.name].meta["val"].stride()
        for spec in program.graph_signature.input_specs
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
