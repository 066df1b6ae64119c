"""Measures Optuna's part: its Hyperband pruner over the same points, in as many processes."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import optuna
import torch
import torch.multiprocessing as mp
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from benchmarks.search.work import (
    ETA,
    HIGHEST_DECAY,
    HIGHEST_LR,
    LOWEST_DECAY,
    LOWEST_LR,
    WIDTHS,
    WORKERS,
    Epoch,
    Figures,
    Job,
    PlainTrial,
    as_tensors,
    serve,
)

NAME = "digits"


def optimize(job: Job, journal: str, told: Any) -> None:
    """Take part in the study until all points were tried, and tell of the epochs."""
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rows = as_tensors(job.load_rows())
    epochs = list[tuple[float, float]]()

    def objective(trial: optuna.Trial) -> float:
        point = {
            "lr": trial.suggest_float("lr", LOWEST_LR, HIGHEST_LR, log=True),
            "weight_decay": trial.suggest_float(
                "weight_decay", LOWEST_DECAY, HIGHEST_DECAY, log=True
            ),
            "width": trial.suggest_categorical("width", WIDTHS),
        }
        trained = PlainTrial(rows, point, job.seed)
        accuracy = 0.0
        for epoch in range(1, job.epochs + 1):
            accuracy = trained.epoch()
            epochs.append((time.time(), accuracy))
            trial.report(accuracy, epoch)
            if epoch < job.epochs and trial.should_prune():
                raise optuna.TrialPruned
        return accuracy

    study = optuna.load_study(
        study_name=NAME,
        storage=storage(journal),
        sampler=optuna.samplers.RandomSampler(seed=job.seed),
        pruner=optuna.pruners.HyperbandPruner(1, job.epochs, ETA),
    )
    begun = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING)
    while len(study.get_trials(deepcopy=False, states=begun)) < len(job.points):
        study.optimize(objective, n_trials=1)
    told.put(epochs)


def storage(journal: str) -> JournalStorage:
    """Return the file that the processes share, as Optuna advises for several on one machine."""
    return JournalStorage(JournalFileBackend(journal))


def measure(job: Job) -> Figures:
    """Run a study in processes of its own, from its creation to their end."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        journal = os.path.join(folder, "journal.log")
        study = optuna.create_study(study_name=NAME, storage=storage(journal), direction="maximize")
        for point in job.points:
            study.enqueue_trial(dict(point))
        told = context.SimpleQueue()
        processes = [
            context.Process(target=optimize, args=(job, journal, told)) for _ in range(WORKERS)
        ]
        for process in processes:
            process.start()
        epochs = sorted(each for _ in processes for each in told.get())
        for process in processes:
            process.join()
        seconds = time.time() - begun
    curve = [
        Epoch(moment - begun, number, accuracy)
        for number, (moment, accuracy) in enumerate(epochs, 1)
    ]
    return Figures(seconds, curve)


if __name__ == "__main__":
    serve(measure)
