"""Writes and loads exported models, which need no source: a graph and two files of tensors.

```
graph.json              calls of known operators, and the digests of all three files
weights.safetensors     parameters and buffers, under the model's own names
constants.safetensors   the other tensors of the graph
```

Tensors lie at multiples of `ALIGNMENT`, in memory and in their files, where `pad:N` fills the gaps.

None of them is executable, and loading evaluates nothing: `graph.py` has the whole grammar.

A loop runs the graph over calls of known operators, without generated source. Tools that know
neither it nor us can have a program of `torch.export`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut.export import ExportFailed, export_program
from cerebro_hydra.shards.cut.trace import ConstantValues, dynamic_dims
from cerebro_hydra.shards.export.check import difference
from cerebro_hydra.shards.export.graph import (
    Argument,
    Call,
    GraphDocument,
    Here,
    InvalidGraph,
    Ref,
    Size,
    StoredGraph,
    StoredTensor,
    dense_strides,
    read_graph,
)
from cerebro_hydra.shards.export.operators import Operator
from cerebro_hydra.shards.export.tensors import NotTheTensors, placed, read_tensors, write_tensors
from cerebro_hydra.storage.digest import decode_format, encode_format, file_digest

GRAPH_FILE = "graph.json"
WEIGHTS_FILE = "weights.safetensors"
CONSTANTS_FILE = "constants.safetensors"
EXPORTED_FILES = (GRAPH_FILE, WEIGHTS_FILE, CONSTANTS_FILE)

_FORMAT = 3
_LARGEST_GRAPH = 64 * 2**20
_MODEL = "model."  # the wrapper's attribute, which begins the name of each weight in the graph


class _EvaluationModule(nn.Module):
    """Takes features and returns plain tensors, so that no class of the user is exported."""

    def __init__(self, recipe: Recipe, collated: bool) -> None:
        super().__init__()
        self.model = recipe.model
        self._prepared = recipe.cast if collated else lambda x: recipe.collated(x, (), None)[0]
        self._recipe = recipe  # its call may be known only after the first collate

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        prepared = self._prepared(features)
        return tuple(self._recipe.predictions(self._recipe.call(self.model, prepared)))


def save_exported(
    recipe: Recipe,
    features: Sequence[Tensor],
    folder: str | Path,
    collated: bool = True,
    kept: Callable[[], AbstractContextManager[object]] = nullcontext,
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
        kept: gives back what the user's code keeps outside of the model while it is exported, such
            as a cache, which gets tensors without values then.

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
        with recipe.precision(), kept():
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
    state = recipe.model.state_dict(keep_vars=True).items()
    own = {name: tensor for name, tensor in state if isinstance(tensor, Tensor)}
    # Another pass of torch.export makes plain operators of what torch.vmap leaves in a graph.
    for passes in (lambda: program, lambda: program.run_decompositions({})):
        try:
            document = GraphDocument.of(passes(), _MODEL, recipe.autocast, own)
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


_Slots = int | tuple[int, ...]
"""Where an argument lies: one slot, or several that together are a list."""


class _Step(NamedTuple):
    """A call whose arguments and result lie in slots."""

    operator: Operator
    args: tuple[_Slots, ...]
    kwargs: tuple[tuple[str, _Slots], ...]
    result: int
    dead: tuple[int, ...]  # slots that no later step reads


class ExportedModel(nn.Module):
    """A loaded model's `forward(*features)` returns the tuple of predictions.

    Features are tensors with rows first, in the order of the feature columns, with any number of
    rows from 1. The model computes where its weights and the features are. It can't be trained:
    `train` and `eval` change nothing, and gradients are not recorded.

    Attributes:
        weights: holds the parameters and buffers under the names of the model that was saved.
        constants: holds the tensors that were no weights of it.
    """

    def __init__(self, graph: StoredGraph, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._features = graph.features
        self.weights, self.constants = nn.Module(), nn.Module()
        self._tensors: list[tuple[dict[str, Any], str]] = []
        for stored, tensor in zip(graph.tensors, tensors, strict=True):
            owner = self.constants if stored.kind == "constant" else self.weights
            # Names have dots, which `register_buffer` takes for modules within modules.
            own: dict[str, Any] = owner._buffers
            if stored.kind in ("parameter", "frozen"):
                # By what requires gradients torch chooses kernels, even where none are recorded.
                trains = stored.kind == "parameter"
                own, tensor = owner._parameters, nn.Parameter(tensor, requires_grad=trains)
            own[stored.name] = tensor
            self._tensors.append((own, stored.name))
        self._state = graph.state
        self._plan = _Plan(graph)
        super().train(False)

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        """Return the predictions.

        Raises:
            ConfigurationError: a feature has a shape for which the graph does not hold.
        """
        _check_shapes(self._features, features)
        with torch.no_grad():
            return self.compute(features, self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return weights and constants, in the order in which `compute` takes them."""
        return [own[name] for own, name in self._tensors]

    def original_state(self) -> dict[str, Tensor]:
        """Return the state dict of the model that was saved, under its names and in its order."""
        tensors = self.tensors()
        return {name: tensors[number].detach() for name, number in self._state}

    def compute(self, features: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the predictions with other tensors in the place of its own; checks nothing."""
        return self._plan.run(features, tensors)

    def train(self, mode: bool = True) -> ExportedModel:
        self.training = False
        return self


class _Plan:
    """Gives every value of a graph a slot: the device, features, tensors, constants, results."""

    def __init__(self, graph: StoredGraph) -> None:
        calls = [call for region in graph.regions for call in region.calls]
        self._start = {"feature": 1}
        self._start["tensor"] = 1 + len(graph.features)
        self._start["call"] = self._start["tensor"] + len(graph.tensors)
        self._slots: list[Any] = [None] * (self._start["call"] + len(calls))
        self._outputs = tuple(self._slot(ref) for ref in graph.outputs)
        steps = self._without_dead_values([self._step(i, call) for i, call in enumerate(calls)])
        self._regions: list[tuple[torch.dtype | None, list[_Step]]] = []
        for region in graph.regions:
            self._regions.append((region.autocast, steps[: len(region.calls)]))
            steps = steps[len(region.calls) :]

    def run(self, features: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        device = features[0].device
        slots = self._slots.copy()
        slots[: self._start["call"]] = (device, *features, *tensors)
        for autocast, steps in self._regions:
            with _autocasting(autocast, device):
                for step in steps:
                    args = [
                        slots[each] if isinstance(each, int) else [slots[i] for i in each]
                        for each in step.args
                    ]
                    kwargs = {
                        key: slots[each] if isinstance(each, int) else [slots[i] for i in each]
                        for key, each in step.kwargs
                    }
                    try:
                        slots[step.result] = step.operator.run(*args, **kwargs)
                    except Exception as error:
                        number = step.result - self._start["call"]
                        error.add_note(f"in call {number}, {step.operator.name}")
                        raise
                    for slot in step.dead:
                        slots[slot] = None
        return tuple(slots[slot] for slot in self._outputs)

    def _step(self, number: int, call: Call) -> _Step:
        args = tuple(self._slot(each) for each in call.args)
        kwargs = tuple((key, self._slot(each)) for key, each in call.kwargs)
        result = self._start["call"] + number
        return _Step(call.operator, args, kwargs, result, ())

    def _slot(self, argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return self._start[argument.to] + argument.number
        if isinstance(argument, Here):
            return 0
        if isinstance(argument, list) and any(isinstance(each, Ref) for each in argument):
            return tuple(self._slot(each) for each in argument)
        self._slots.append(argument)
        return len(self._slots) - 1

    def _without_dead_values(self, steps: list[_Step]) -> list[_Step]:
        """Let each step drop the results of calls that nothing after it reads."""
        kept, first = set(self._outputs), self._start["call"]
        results = range(first, first + len(steps))
        done: list[_Step] = []
        for step in reversed(steps):
            read = {step.result}
            for each in (*step.args, *(each for _, each in step.kwargs)):
                read.update((each,) if isinstance(each, int) else each)
            dead = tuple(sorted(slot for slot in read - kept if slot in results))
            kept |= read
            done.append(step._replace(dead=dead))
        return done[::-1]


def _autocasting(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    if dtype is None:
        return nullcontext()
    # Without its cache, a weight's cast doesn't depend on what else ran before.
    return torch.autocast(device.type, dtype, cache_enabled=False)


def _check_shapes(
    expected: Sequence[Sequence[int | Size | None]], features: Sequence[Tensor]
) -> None:
    if len(features) != len(expected):
        raise ConfigurationError(
            f"there are {len(features)} features, and the model was saved with {len(expected)}; "
            "give one tensor per feature column"
        )
    known: dict[int, int] = {}
    for number, (feature, sizes) in enumerate(zip(features, expected, strict=True)):
        shape = tuple(feature.shape)
        if len(shape) != len(sizes):
            raise ConfigurationError(
                f"features[{number}] has shape {shape}; give {len(sizes)} dimensions"
            )
        for dim, (size, found) in enumerate(zip(sizes, shape, strict=True)):
            if wanted := _wanted(size, found, known):
                raise ConfigurationError(
                    f"features[{number}] has shape {shape}, and the graph holds for a shape[{dim}] "
                    f"of {wanted}; give that size"
                )


def _wanted(size: int | Size | None, found: int, known: dict[int, int]) -> str | None:
    """Return what a size should have been, or None if it is right."""
    if size is None:
        return None
    if not isinstance(size, Size):
        return str(size) if found != size else None
    if found != known.setdefault(size.symbol, found):
        return str(known[size.symbol])
    if size.least is not None and found < size.least:
        return f"at least {size.least}"
    if size.most is not None and found > size.most:
        return f"at most {size.most}"
    return None


class _Twin(nn.Module):
    """Computes what a loaded model does, with tensors under names that torch.export takes."""

    def __init__(self, model: ExportedModel) -> None:
        super().__init__()
        self._compute = model.compute
        self._names = [f"tensor_{number}" for number in range(len(model.tensors()))]
        for name, tensor in zip(self._names, model.tensors(), strict=True):
            self.register_buffer(name, tensor.detach())

    def forward(self, *features: Tensor) -> Tensor | tuple[Tensor, ...]:
        made = self._compute(features, [getattr(self, name) for name in self._names])
        return made[0] if len(made) == 1 else made


def torch_program(model: ExportedModel, features: Sequence[Tensor]) -> ExportedProgram:
    """Return a program that takes every feature with any number of rows.

    It gives the prediction, or the tuple of predictions if there are several.

    Args:
        model: the loaded model.
        features: a batch of several rows that the model takes.
    """
    shapes = tuple({0: Dim.AUTO} for _ in features)
    with torch.no_grad():
        return torch.export.export(_Twin(model), tuple(features), dynamic_shapes=(shapes,))
