"""Trains one trial of a run again with the plain trainer: the engine must equal it in every bit."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from cerebro_hydra.errors import CerebroHydraError, NonFiniteLoss, ReplayError
from cerebro_hydra.recipe import (
    Columns,
    PlainTrainer,
    Recipe,
    SumOverRows,
    build_recipe,
    exclusive_generator,
    mean,
    merge_evaluations,
)
from cerebro_hydra.replay.compare import ReplayReport, compare, expectations
from cerebro_hydra.replay.run_data import RunData, with_threads
from cerebro_hydra.replay.states import Replayed, load_model, read_saved
from cerebro_hydra.storage.estimator_factories import find
from cerebro_hydra.storage.run_document import TrialSpec


def replay(run_path: str, trial_id: str, factory: Any = None, trust: bool = False) -> ReplayReport:
    """Train a trial of a finished run again, along its visit log, and compare every bit.

    Replays in several threads take turns, because a process has one random generator. Its numbers
    go on afterwards as if nothing had been replayed.

    Args:
        run_path: the run folder, `result.run_path`.
        trial_id: such as "trial-000".
        factory: the `estimator_gen_fn` or its `module:name`; the process that trained the run
            knows it.
        trust: whether the name that the run records may be imported.

    Raises:
        ConfigurationError: the factory is known only by the name that the run records, and `trust`
            is False; nothing was imported.
        ReplayError: the factory, the trial or its final state can't be found, or the run began in
            the middle of its trials.
        StoreError: a file of the run is missing or damaged.
        JournalError: the journal is damaged.
        DataError: the rows are not those that were prepared.
    """
    with tempfile.TemporaryDirectory(prefix="cerebro-hydra-replay-") as scratch:
        run = RunData.open(run_path, scratch)
        if run.document.first_epoch:
            raise ReplayError(
                f"run {run_path!r} goes on where another one ended, after "
                f"{run.document.first_epoch} epochs; a replay begins with untrained weights, so "
                "replay the run that its trials began in"
            )
        spec = run.trial(trial_id)
        found = find(run.folder.path, run.document.factory, factory, trust)
        run.folder.check_journal(run.document)
        expected = expectations(run, spec)
        initial = read_saved(run.folder, spec.trial, 0, run.document.run_id)
        replayed = Replayed()
        with exclusive_generator, torch.random.fork_rng(devices=[]):
            recipe = build_recipe(found, spec.params, run.seed, Columns.of(run.document))
            load_model(recipe.model, initial.tensors, f"{trial_id} of run {run_path!r}")
            if expected.problem is None:
                try:
                    with with_threads(run.document.threads):
                        replayed = train(recipe, run, spec, expected.visit_log, expected.visit)
                except CerebroHydraError:
                    raise
                except Exception as error:
                    raise ReplayError(
                        f"{trial_id} of run {run_path!r} can't be trained again "
                        f"({type(error).__name__}: {error}); give the factory that the run was "
                        "started with"
                    ) from error
        return compare(recipe, replayed, expected, run)


def train(
    recipe: Recipe, run: RunData, spec: TrialSpec, visit_log: list[tuple[int, int]], result: int
) -> Replayed:
    """Train along a visit log, and evaluate at the end of each epoch.

    Args:
        result: the visit after which the trial's state is its result.
    """
    trainer = PlainTrainer(recipe, spec.seed, spec.steps_per_epoch)
    replayed = Replayed()
    losses: dict[int, SumOverRows] = {}
    try:
        for visit, (epoch, partition) in enumerate(visit_log, start=1):
            before = replayed.history[-1] if epoch > 0 and not losses else None
            losses[partition] = trainer.train(run.windows(spec, epoch, partition), before)
            if visit == result:
                replayed.keep(trainer)
            if len(losses) == len(run.training):
                replayed.history.append(_measured(trainer, run, spec, losses))
                losses = {}
    except NonFiniteLoss as error:  # the run's losses were finite: its trial went on
        replayed.failure = str(error)
    return replayed


def _measured(
    trainer: PlainTrainer, run: RunData, spec: TrialSpec, losses: dict[int, SumOverRows]
) -> dict[str, float]:
    """Return what an epoch measured, named as the journal names it."""
    parts = [trainer.evaluate(run.validation_batches(spec, p)) for p in run.validation]
    merged = merge_evaluations(trainer.recipe.state_metrics, parts)
    train_loss = mean(losses[partition] for partition in sorted(losses))
    return {"train_loss": train_loss} | {f"val_{name}": value for name, value in merged.items()}
