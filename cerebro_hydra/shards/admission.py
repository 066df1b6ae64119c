"""Before a trial trains: cut its model, and prove on real batches that the cut keeps every bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.balance import balance
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut_spec import CutSpec
from cerebro_hydra.shards.engine import Engine
from cerebro_hydra.shards.layout import Segments, TrialLayout, initial_segments
from cerebro_hydra.shards.module_program import layer_starts
from cerebro_hydra.shards.reference_steps import Example, ReferenceSteps, fresh
from cerebro_hydra.shards.report import CutReport
from cerebro_hydra.shards.state import ShardState
from cerebro_hydra.shards.state_template import StateTemplate
from cerebro_hydra.shards.structure import Structure, StructureCache
from cerebro_hydra.shards.trace import CutFailed

__all__ = ["Admission", "CutReport", "StateTemplate", "admit"]

STEPS_PER_BATCH_SIZE = 2
_STEPS_PER_EPOCH = 1000  # for LR schedulers that ask; the real number is not known yet


@dataclass(frozen=True)
class Admission:
    """An admitted trial: its cut, what that gives, its optimizer state, where all of it lies."""

    spec: CutSpec
    report: CutReport
    template: StateTemplate
    layout: TrialLayout


@dataclass(frozen=True)
class _Batch:
    features: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    rows: int


def admit(
    recipe: Recipe,
    examples: Sequence[Example],
    trial_seed: int,
    cache: StructureCache | None = None,
) -> Admission:
    """Choose a cut and hold it against plain training: two steps at every batch size.

    Loss, parameters, buffers and optimizer state must agree in every bit, with graphs kept and
    recomputed, and through a hop. Where a cut fails, coarser ones follow: the layers of a
    `Sequential`, then one shard; the report says why. The recipe is not changed.

    Args:
        examples: real batches (features, labels), one for each batch size that will occur.

    Raises:
        ConfigurationError: model, loss or optimizer don't work on the batches, `shards` names a
            place where no cut is possible, or training differs even uncut.
    """
    if not examples:
        raise ConfigurationError("admission needs a batch to try the model on; there are no rows")
    cache = cache or StructureCache()
    reference = ReferenceSteps(recipe, trial_seed, _STEPS_PER_EPOCH)
    microbatches = min(recipe.accumulate, 2)
    losses = [
        reference.step(example, microbatches)
        for example in examples
        for _ in range(STEPS_PER_BATCH_SIZE)
    ]
    template = StateTemplate.learn(reference.model, reference.optimizer)
    features = max((f for f, _ in examples), key=lambda f: f[0].shape[0] if f[0].dim() else 0)

    reasons: list[str] = []
    for spec, note in _candidates(recipe, features, cache, reasons):
        try:
            structure = cache.get(recipe.model, spec, features)
            layout = TrialLayout.make(recipe, structure, template)
            difference = _difference(
                recipe, structure, layout, examples, trial_seed, microbatches, losses, reference
            )
        except ConfigurationError:
            raise
        except Exception as error:
            difference = f"{type(error).__name__}: {error}"
        if difference is None:
            fallback = "; ".join([*reasons, *([note] if note else [])]) or None
            report = CutReport.of(structure, layout, fallback)
            return Admission(spec, report, template, layout)
        reasons.append(f"cut by {spec.mode}, training differs from the uncut model: {difference}")
    raise ConfigurationError(
        "the model can't be trained reproducibly: " + "; ".join(reasons) + ". Look for random "
        "numbers from outside of torch's CPU generator, or state outside of parameters and buffers"
    )


def _candidates(
    recipe: Recipe, features: tuple[Tensor, ...], cache: StructureCache, reasons: list[str]
) -> Iterator[tuple[CutSpec, str | None]]:
    """Cuts to try, the finest first; why one can't be tried goes into `reasons`."""
    if recipe.shards == 1 or recipe.shards == []:
        yield CutSpec("whole"), None
        return
    try:
        traced = cache.trace(recipe.model, features)
        yield _choose(recipe, "export", traced.legal, traced.costs)
    except CutFailed as error:
        reasons.append(str(error))
    try:
        starts = layer_starts(recipe.model)
        yield _choose(recipe, "layers", starts, _layer_costs(recipe, starts))
    except CutFailed as error:
        reasons.append(f"{error}, so it is one shard")
    yield CutSpec("whole"), None


def _choose(
    recipe: Recipe, mode: Any, legal: tuple[str, ...], costs: Sequence[float]
) -> tuple[CutSpec, str | None]:
    if isinstance(recipe.shards, int):
        number = min(recipe.shards, len(costs))
        groups = balance(costs, number)
        at = tuple(legal[group.start - 1] for group in groups[1:])
        note = None
        if number < recipe.shards:
            note = f"{recipe.shards} shards were asked for, the model has units for {number}"
        return CutSpec(mode, at), note
    chosen = {_start(name, legal) for name in recipe.shards}
    return CutSpec(mode, tuple(unit for unit in legal if unit in chosen)), None


def _start(name: str, legal: tuple[str, ...]) -> str:
    """The legal cut that a module name means: its own, or that of its first unit."""
    inside = [
        unit for unit in legal
        if unit == name or (path := unit.rpartition("@")[0]) == name or path.startswith(f"{name}.")
    ]  # fmt: skip
    if not inside:
        places = [unit.removesuffix("@0") for unit in legal]
        raise ConfigurationError(
            f"shards names {name!r}, where this model can't be cut; places are {places}"
        )
    return inside[0]


def _layer_costs(recipe: Recipe, starts: tuple[str, ...]) -> list[float]:
    heads = {unit.split("@")[0].split(".")[0] for unit in starts}
    costs = [0.0]
    for name, child in recipe.model.named_children():
        if name in heads:
            costs.append(0.0)
        costs[-1] += sum(p.numel() for p in child.parameters()) + 1.0
    return costs


def _difference(
    recipe: Recipe, structure: Structure, layout: TrialLayout, examples: Sequence[Example],
    trial_seed: int, microbatches: int, losses: Sequence[list[float]], reference: ReferenceSteps,
) -> str | None:  # fmt: skip
    """The first bit in which the cut differs from the reference, or None."""
    shards = initial_segments(recipe, layout)
    cursors: list[dict[str, Any] | None] = [None] * structure.num_shards
    # One step each way: with graphs kept, with graphs made again.
    engines = [
        Engine(structure, layout, recipe, trial_seed, _STEPS_PER_EPOCH, mode)
        for mode in ("keep", "recompute")
    ]
    step = 0
    for features, labels in examples:
        rows = int(labels[0].shape[0]) if labels else int(features[0].shape[0])
        for turn in range(STEPS_PER_BATCH_SIZE):
            window = [_Batch(fresh(features), fresh(labels), rows) for _ in range(microbatches)]

            def publish(k: int, segments: Segments, cursor: dict[str, Any]) -> None:
                cursors[k] = json.loads(json.dumps(cursor))
                shards[k] = segments

            totals = engines[turn % 2].train(
                [window], step, lambda k: (shards[k], cursors[k]), publish
            )
            expected = 0.0
            for loss in losses[step]:
                expected += loss * rows
            if totals.loss_sum != expected:
                return f"the loss of step {step} is {totals.loss_sum / totals.rows!r}, not " + repr(
                    expected / totals.rows
                )
            step += 1
    return _first_difference(layout, shards, reference)


def _first_difference(
    layout: TrialLayout, shards: Sequence[Segments], reference: ReferenceSteps
) -> str | None:
    params = dict(reference.model.named_parameters())
    buffers = dict(reference.model.named_buffers())
    for shard, segments in zip(layout.shards, shards, strict=True):
        state = ShardState.bind(shard, **segments)
        optimizer = state.existing_optimizer_state()
        for name, parameter in state.params.items():
            if not _same_bits(parameter, params[name]):
                return f"parameter {name!r}"
            there = reference.optimizer.state.get(params[name], {})
            there = {key: value for key, value in there.items() if value is not None}
            here = optimizer.get(name, {})
            if here.keys() != there.keys():
                return f"optimizer state of {name!r}: {sorted(here)}, not {sorted(there)}"
            for key, value in here.items():
                if not _same_bits(value, there[key]):
                    return f"optimizer state {key!r} of {name!r}"
        for name, tensor in state.buffers.items():
            if not _same_bits(tensor, buffers[name]):
                return f"buffer {name!r}"
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)
