"""Compares, bit by bit, what a run left behind with what its replay computed."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cerebro_hydra.documents import decode
from cerebro_hydra.errors import StoreError
from cerebro_hydra.kernels import as_in_shell
from cerebro_hydra.recipe import (
    Recipe,
    fingerprint_differences,
    is_portable,
    numeric_fingerprint,
)
from cerebro_hydra.replay.record import RunData, SubEpochVisit, read_trial, result_state
from cerebro_hydra.replay.states import Replayed, SavedState, read_saved
from cerebro_hydra.storage.run_document import NUMERIC_FILE, TrialSpec


@dataclass(frozen=True)
class ReplayReport:
    """Gives the verdict on one trial.

    `identical` is true if the visit log obeys its rule and every bit of parameters, buffers,
    optimizer state, learning rates, gradient scaler and metrics agrees; `first_difference` says
    what doesn't. `warnings` name what differs between the run's surroundings and these.
    """

    trial_id: str
    identical: bool
    first_difference: str | None = None
    warnings: tuple[str, ...] = ()
    visits: int = 0

    def __str__(self) -> str:
        verdict = "identical" if self.identical else f"DIFFERS: {self.first_difference}"
        return "\n".join(
            [f"{self.trial_id}: {verdict}", *(f"  warning: {w}" for w in self.warnings)]
        )


@dataclass(frozen=True)
class Expected:
    """Holds what a run recorded of a trial; `state` is its result.

    `ancestors` has the trials that it goes on from, as its record has them.
    """

    trial_id: str
    visit_log: list[tuple[int, int]]
    sub_epochs: list[SubEpochVisit]
    ancestors: list[tuple[int, int]]
    state: int
    problem: str | None
    metrics: Mapping[int, dict[str, float]]
    saved: SavedState = field(repr=False)
    rests: bool = False
    """Whether it is to go on: then its run may not have measured the last epoch yet."""


def expectations(run: RunData, spec: TrialSpec) -> Expected:
    """Read a trial's visit log, metrics and final state.

    Raises:
        ReplayError: the trial has no final state.
        StoreError: that state is missing or damaged.
    """
    record = read_trial(run.folder, spec.trial)
    state = result_state(run.folder, spec.trial)
    problem = record.problem(len(run.training))
    if problem is None and len(record.visit_log) < state:
        problem = f"the journal has {len(record.visit_log)} visits, the result is that of {state}"
    saved = read_saved(run.folder, spec.trial, state, run.document.run_id)
    seen = (record.visit_log, record.sub_epochs, record.ancestors)
    rests = record.rests
    return Expected(spec.trial_id, *seen, state, problem, record.metrics, saved, rests)


def compare(
    recipe: Recipe, kept: Collection[str], replayed: Replayed, expected: Expected, run: RunData
) -> ReplayReport:
    """Compare a replayed trial with what its run left behind.

    Args:
        kept: the names of what checkpoints hold of the model as the factory builds it.
    """
    differences = _differences(kept, replayed, expected)
    first = expected.problem or next(differences, None)
    return ReplayReport(
        trial_id=expected.trial_id,
        identical=first is None,
        first_difference=first,
        warnings=tuple(_warnings(run, recipe.compile)),
        visits=len(expected.visit_log),
    )


def _differences(kept: Collection[str], replayed: Replayed, expected: Expected) -> Iterator[str]:
    if replayed.failure is not None:
        yield f"the run trained on, but in the replay {replayed.failure}"
    tensors, saved = replayed.tensors, expected.saved.tensors
    for name in sorted(saved.keys() | tensors.keys()):
        kind, _, at = name.partition(":")
        if kind == "buffer" and name not in saved and at not in kept:
            continue  # the factory or a forward makes it, no checkpoint holds it
        if name not in saved or name not in tensors:
            yield f"{name} exists only in the {'run' if name in saved else 'replay'}"
        elif (difference := tensor_difference(saved[name], tensors[name])) is not None:
            yield f"{name}{difference}"
    for shard, groups in enumerate(expected.saved.groups):
        yield from _group_differences(shard, groups, replayed.groups)
    for shard, scaler in enumerate(expected.saved.scalers):
        if scaler != replayed.scaler:
            yield (
                f"the gradient scaler of shard {shard}: the run has {scaler}, the replay "
                f"{replayed.scaler}"
            )
    replayed_metrics = dict(enumerate(replayed.history))
    measured_here = set() if expected.rests else replayed_metrics.keys()
    for epoch in sorted(measured_here | expected.metrics.keys()):
        measured, run = replayed_metrics.get(epoch, {}), expected.metrics.get(epoch, {})
        for name in sorted(measured.keys() | run.keys()):
            here, there = measured.get(name), run.get(name)
            if here is None or there is None or not _same_float(here, there):
                yield f"{name} of epoch {epoch + 1}: the run has {there!r}, the replay {here!r}"


def tensor_difference(run: Tensor, replay: Tensor) -> str | None:
    """Return where two tensors first differ in a bit, or None."""
    if run.dtype != replay.dtype or run.shape != replay.shape:
        return (
            f": the run has {run.dtype} {tuple(run.shape)}, "
            f"the replay {replay.dtype} {tuple(replay.shape)}"
        )
    ours, theirs = _bytes_of(run), _bytes_of(replay)
    if torch.equal(ours, theirs):
        return None
    index = int((ours != theirs).any(dim=1).nonzero()[0])
    place = [int(i) for i in torch.unravel_index(torch.tensor(index), run.shape)]
    run_value, replay_value = run.flatten()[index].item(), replay.flatten()[index].item()
    return f"{place}: the run has {run_value!r}, the replay {replay_value!r}"


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).reshape(flat.numel(), tensor.element_size())


def _same_float(a: float, b: float) -> bool:
    return struct.pack("<d", a) == struct.pack("<d", b)


def _group_differences(
    shard: int, saved: list[dict[str, Any]], replayed: list[dict[str, Any]]
) -> Iterator[str]:
    if len(saved) != len(replayed):
        yield f"shard {shard} has {len(saved)} param groups, the replay {len(replayed)}"
    for number, (run, replay) in enumerate(zip(saved, replayed, strict=False)):
        if "lr" in run and run["lr"] != replay["lr"]:
            yield (
                f"lr of param group {number} in shard {shard}: "
                f"the run has {run['lr']}, the replay {replay['lr']}"
            )


def _warnings(run: RunData, compiles: bool) -> Iterator[str]:
    here = numeric_fingerprint(run.document.device) | {"threads": run.document.threads}
    if run.document.numerics == "portable" and not is_portable(here):
        yield (
            "the run was trained with numerics='portable', this process takes other kernels, and "
            "the factory can't be imported in another one; give factory='module:name', or start "
            f"Python with {as_in_shell('portable')}"
        )
    try:
        recorded = decode(
            dict[str, dict[str, Any]], run.folder.read_json(NUMERIC_FILE), NUMERIC_FILE
        )
    except StoreError as error:
        yield f"the run's numeric fingerprint can't be read: {error}"
        return
    for worker, there in sorted(recorded.items()):
        for name, mine, its in fingerprint_differences(here, there, compiles):
            yield f"{name} was {its} on worker {worker}, here it is {mine}"
