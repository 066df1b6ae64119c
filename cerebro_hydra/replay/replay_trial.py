"""Trains one trial of a run again with the plain trainer: the engine must equal it in every bit."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cerebro_hydra.available_memory import available_memory
from cerebro_hydra.errors import CerebroHydraError, NonFiniteLoss, ReplayError
from cerebro_hydra.foreign_text import named_error_text
from cerebro_hydra.recipe import (
    Columns,
    PlainTrainer,
    Recipe,
    SumOverRows,
    build_recipe,
    exclusive_generator,
    has_portable_kernels,
    is_portable,
    mean,
    merge_evaluations,
    numeric_fingerprint,
)
from cerebro_hydra.recipe.compiled_units import compiled_alike
from cerebro_hydra.recipe.placement import CPU
from cerebro_hydra.recipe.randomness import WORKSPACE, compute_as, deterministic
from cerebro_hydra.replay.child import replay_in_child
from cerebro_hydra.replay.compare import ReplayReport, compare, expectations
from cerebro_hydra.replay.record import PartitionBatch, RunData, SubEpochVisit, with_threads
from cerebro_hydra.replay.stale_weights import train_stale
from cerebro_hydra.replay.states import Replayed, go_on, load_model, read_saved
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.estimator_factories import Factory, find, importable_name
from cerebro_hydra.storage.names import checked_trial_id
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from cerebro_hydra.storage.run_folder import read_document
from cerebro_hydra.temporary_folders import temporary_folder

_STATES = 3
"""States of a trial that a replay has in memory: the first, the one that it trains, the result."""

_BYTES = 4
"""What a parameter is thought to have in each older version of the weights."""


def replay(run_path: str, trial_id: str, factory: Any = None, trust: bool = False) -> ReplayReport:
    """Train a trial of a finished run again, along its visit log, and compare every bit.

    Replays in several threads take turns, because a process has one random generator. Its numbers
    go on afterwards as if nothing had been replayed. A run with numerics="portable" is replayed in
    a process of its own, unless this one has such kernels or the factory can't be imported there;
    then the report has a warning.

    Args:
        run_path: the run folder, `result.run_path`.
        trial_id: such as "trial-000".
        factory: the `estimator_gen_fn` or its `module:name`; the process that trained the run
            knows it.
        trust: whether the name that the run records may be imported.

    Raises:
        ConfigurationError: the factory is known only by the name that the run records, and `trust`
            is False; nothing was imported. Or the trial is not given by its name.
        ReplayError: the factory, the trial or its final state can't be found, or the whole model
            does not fit into memory.
        StoreError: a file of the run is missing or damaged.
        JournalError: the journal is damaged.
        DataError: the rows are not those that were prepared.
    """
    document = read_document(RunFolder.open(run_path))
    if document.numerics == "portable" and not is_portable(here := numeric_fingerprint()):
        checked_trial_id(trial_id)
        name = importable_name(run_path, document.factory, factory, trust)
        if name is not None:
            report = replay_in_child(run_path, trial_id, name, document.numerics)
            if report is not None:
                return report
        if has_portable_kernels(here):
            compute_as(document.numerics)
    return replay_here(run_path, trial_id, factory, trust)


def replay_here(
    run_path: str, trial_id: str, factory: Any = None, trust: bool = False
) -> ReplayReport:
    """Do what `replay` does in this process, with the kernels that it has chosen."""
    with temporary_folder("replay") as scratch:
        run = RunData.open(run_path, scratch)
        spec = run.trial(trial_id)
        _check_memory(spec)
        device = _device_of(run.document)
        found = find(run.folder.path, run.document.factory, factory, trust)
        run.folder.check_journal(run.document)
        expected = expectations(run, spec)
        lineage = [*expected.ancestors, (spec.trial, len(expected.visit_log))]
        initial = read_saved(run.folder, lineage[0][0], 0, run.document.run_id)
        replayed = Replayed()
        others = [] if device == CPU else [device]
        with (
            exclusive_generator,
            deterministic(device),
            torch.random.fork_rng(devices=others),
            compiled_alike(),
        ):
            line = []
            for number, until in lineage:
                each = run.folder.read_trial(number, run.document.run_id)
                recipe = _built(found, each, run)
                lags = each.lags(initial.shards)
                line.append(Ancestor(each, recipe, until, lags, initial.tensors.keys()))
            load_model(line[0].recipe.model, initial.tensors, f"{trial_id} of run {run_path!r}")
            kept = frozenset(recipe.model.state_dict())
            for ancestor in line:
                ancestor.recipe.to(device)
            if expected.problem is None:
                try:
                    with with_threads(run.document.threads):
                        replayed = train(line, run, expected.sub_epochs, expected.state)
                except CerebroHydraError:
                    raise
                except Exception as error:
                    raise ReplayError(
                        f"{trial_id} of run {run_path!r} can't be trained again "
                        f"({named_error_text(error)}); give the factory that "
                        "the run was started with"
                    ) from error
        return compare(recipe, kept, replayed, expected, run)


def _built(factory: Factory, spec: TrialSpec, run: RunData) -> Recipe:
    """Call the factory for a trial.

    Raises:
        ReplayError: it fails; the message names it.
    """
    try:
        return build_recipe(factory, spec.params, run.seed, Columns.of(run.document))
    except CerebroHydraError:
        raise
    except (Exception, SystemExit) as error:
        name = getattr(factory, "__qualname__", repr(factory))
        raise ReplayError(
            f"the factory {name!r} failed for {spec.trial_id} of run {run.folder.path!r} "
            f"({named_error_text(error)}); give the factory that the run was started with"
        ) from error


def _device_of(document: RunDocument) -> torch.device:
    """Return the device here that is of the run's kind."""
    if document.device == "cpu":
        return CPU
    if not torch.cuda.is_available():
        raise ReplayError(
            f"run {document.run_id} was trained on CUDA devices, and there is none here; replay it "
            "on a machine with a GPU like the run's"
        )
    if torch.cuda.is_initialized() and WORKSPACE not in os.environ:
        raise ReplayError(
            f"CUDA was used in this process before {WORKSPACE} was set, so that its bits may be "
            f"others; set {WORKSPACE}=:4096:8 before Python starts, or replay in a new process"
        )
    return torch.device("cuda", 0)


def _check_memory(spec: TrialSpec) -> None:
    older = max(spec.staleness, default=0) * _BYTES * spec.parameters
    needed, free = _STATES * spec.nbytes + older, available_memory()
    if needed > free:
        raise ReplayError(
            f"{spec.trial_id} needs about {needed / 2**30:.2g} GiB of memory to be replayed, as "
            f"plain PyTorch trains its whole model, and {free / 2**30:.2g} GiB are free; replay "
            "it on a machine with more"
        )


@dataclass(frozen=True)
class Ancestor:
    """Trains a trial until it is forked, or is the trial itself and trains it to its end."""

    spec: TrialSpec
    recipe: Recipe
    until: int
    """How many visits were made by then, those before its own included."""
    lags: Mapping[str, int]
    """How many updates older the weights are that it reads, by parameter; see `train_stale`."""
    kept: Collection[str]
    """The names of what checkpoints hold, which a fork takes over."""

    def trainer(self) -> PlainTrainer:
        """Return what trains it from the first visit on."""
        return PlainTrainer(self.recipe, self.spec.seed, self.spec.steps_per_epoch)

    def fork(self, parent: PlainTrainer, epochs: int) -> PlainTrainer:
        """Return what goes on from another trial's state, with the options of its own recipe."""
        of_mine = (self.recipe, self.spec.seed, self.spec.steps_per_epoch)
        scaler = None if parent.scaling is None else parent.scaling.state()
        trainer = PlainTrainer(*of_mine, first_step=parent.steps, scaler=scaler)
        go_on(trainer, parent.tensors(), self.kept, f"the parent of {self.spec.trial_id}")
        self.recipe.lr_schedule.advance(trainer.scheduler, trainer.updates, epochs)
        return trainer


def train(
    line: list[Ancestor], run: RunData, sub_epochs: list[SubEpochVisit], result: int
) -> Replayed:
    """Train along a visit log, and evaluate at the end of each epoch.

    Args:
        line: the trials that were forked, oldest first, and the trial itself at the end.
        result: the state that is the trial's result.
    """
    (mine, *forks), replayed = line, Replayed()
    spec, trainer = mine.spec, mine.trainer()
    losses: dict[int, SumOverRows] = {}
    try:
        for visit in sub_epochs:
            done = visit.state - len(visit.partitions)
            if done >= mine.until:
                mine, *forks = forks
                spec, trainer = mine.spec, mine.fork(trainer, (done - 1) // len(run.training))
            before = replayed.history[-1] if visit.epoch > 0 and not losses else None
            batches = run.windows(spec, visit.epoch, visit.partitions)
            if mine.lags:
                (partition,) = visit.partitions
                losses[partition] = train_stale(trainer, batches, mine.lags, before)
            else:
                losses |= _losses(trainer.steps_over(batches, before))
            if visit.state == result:
                replayed.keep(trainer)
            if len(losses) == len(run.training):
                replayed.history.append(_measured(trainer, run, spec, losses))
                losses = {}
    except NonFiniteLoss as error:  # the run's losses were finite: its trial went on
        replayed.failure = str(error).partition(";")[0]
    return replayed


def _losses(
    steps: Iterable[tuple[Sequence[PartitionBatch], list[float]]],
) -> dict[int, SumOverRows]:
    """Return the loss of each partition of a sub-epoch, summed in the order of its batches."""
    sums: dict[int, SumOverRows] = {}
    for window, losses in steps:
        for batch, loss in zip(window, losses, strict=True):
            total, rows = sums.get(batch.partition, (0.0, 0))
            sums[batch.partition] = total + loss * batch.rows, rows + batch.rows
    return sums


def _measured(
    trainer: PlainTrainer, run: RunData, spec: TrialSpec, losses: dict[int, SumOverRows]
) -> dict[str, float]:
    """Return what an epoch measured, named as the journal names it."""
    parts = [trainer.evaluate(run.validation_batches(spec, p)) for p in run.validation]
    merged = merge_evaluations(trainer.recipe.state_metrics, parts)
    train_loss = mean(losses[partition] for partition in sorted(losses))
    return {"train_loss": train_loss} | {f"val_{name}": value for name, value in merged.items()}
