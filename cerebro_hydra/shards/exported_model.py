"""Runs a stored graph: a loop over calls of known operators, without generated source."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.operators import Operator
from cerebro_hydra.shards.stored_graph import (
    Argument,
    Call,
    Here,
    Ref,
    Size,
    StoredGraph,
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
