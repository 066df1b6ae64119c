"""Measures Ray Tune's part: its HyperBand or ASHA over the same points.

The trainable is written as Ray's guides advise for speed: a class, whose actors are used again for
the next trial, with the rows in the object store, and a checkpoint only where a trial is paused.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, HyperBandScheduler

from benchmarks.search.work import ETA, WORKERS, Epoch, Figures, Job, PlainTrial, as_tensors, serve


class Trained(tune.Trainable):
    """Trains one point; a step is an epoch."""

    def setup(self, config: dict[str, Any], rows: Any = None, seed: int = 0) -> None:
        """Begin the first trial of an actor."""
        torch.set_num_threads(1)
        self.rows, self.seed = as_tensors(rows), seed
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Begin another trial in the same actor."""
        self.trial = PlainTrial(self.rows, new_config["point"], self.seed)
        return True

    def step(self) -> dict[str, float]:
        """Train one epoch."""
        return {"accuracy": self.trial.epoch()}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Keep the state of a trial that is paused."""
        torch.save(self.trial.state(), os.path.join(checkpoint_dir, "state.pt"))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Go on from a state."""
        self.trial.restore(torch.load(os.path.join(checkpoint, "state.pt")))


class Curve(tune.Callback):
    """Notes every epoch that Ray tells of."""

    def __init__(self) -> None:
        self.begun = time.time()
        self.epochs: list[Epoch] = []

    def on_trial_result(
        self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Take in one epoch."""
        moment = time.time() - self.begun
        self.epochs.append(Epoch(moment, len(self.epochs) + 1.0, result["accuracy"]))


def measure(job: Job) -> Figures:
    """Run a search through `Tuner.fit`, from its call to its end."""
    schedulers = {
        "hyperband": lambda: HyperBandScheduler(max_t=job.epochs, reduction_factor=ETA),
        "asha": lambda: ASHAScheduler(max_t=job.epochs, reduction_factor=ETA),
        "trivial": FIFOScheduler,
    }
    rows = job.load_rows()
    with tempfile.TemporaryDirectory() as folder:
        curve = Curve()
        tuner = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(Trained, rows=rows, seed=job.seed), {"cpu": 1}
            ),
            param_space={"point": tune.grid_search(list(job.points))},
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                scheduler=schedulers[job.search](),
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                storage_path=folder,
                stop={"training_iteration": job.epochs},
                callbacks=[curve],
                verbose=0,
            ),
        )
        results = tuner.fit()
        seconds = time.time() - curve.begun
    if results.errors or len(results) != len(job.points):
        raise SystemExit(f"Ray ended with {results.errors}")
    return Figures(seconds, curve.epochs)


if __name__ == "__main__":
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    serve(measure)
