"""Measures what audits of the demo's trials take, and how many fit into their share of the time.

Beside them it measures, in one process, what a sub-epoch spends to find state that does not hop.

PYTHONPATH=. python benchmarks/audits/run.py
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory

import numpy as np
import torch
from sklearn.datasets import load_digits

from cerebro_hydra import GridSearch, LocalStore, hp_choice
from cerebro_hydra.data.batches import Batch
from cerebro_hydra.demo import estimator_gen_fn
from cerebro_hydra.observe.records import Decision, records_of
from cerebro_hydra.plan.messages.events import SubEpochDone
from cerebro_hydra.plan.messages.instructions import StartSubEpoch
from cerebro_hydra.plan.policy.audit_budget import AuditBudget
from cerebro_hydra.recipe import Columns, PlainTrainer, build_recipe
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.shards.admission.effects.late_effects import EarlierReadings, LateEffects
from cerebro_hydra.shards.cut.model import CutModelCache
from cerebro_hydra.shards.cut.sample import Sample
from cerebro_hydra.shards.engine.layout import TrialRuntime
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend

WORKERS = 2


def sub_epochs(share: float, times: int, epochs: int) -> list[tuple[StartSubEpoch, SubEpochDone]]:
    """Train the demo's eight trials, on so many copies of its rows; return every sub-epoch."""
    pixels, labels = load_digits(return_X_y=True)
    rows = {"features": np.tile(pixels.astype(np.float32) / 16, (times, 1))}
    rows["label"] = np.tile(labels.astype(np.int64), times)
    with TemporaryDirectory(prefix="cerebro-hydra-benchmark-") as folder:
        result = GridSearch(
            backend=LocalBackend(WORKERS),
            store=LocalStore(folder),
            estimator_gen_fn=estimator_gen_fn,
            search_space={
                "lr": hp_choice([3e-3, 1e-3]),
                "batch_size": hp_choice([32, 64]),
                "freeze_first": hp_choice([True, False]),
            },
            num_epochs=epochs,
            audit_share=share,
            verbose=0,
        ).fit(Arrays(rows))  # type: ignore[arg-type]  # what LocalBackend takes for a DataFrame
        tasks: dict[int, StartSubEpoch] = {}
        done = []
        for record in records_of(RunFolder.open(result.run_path)):
            if isinstance(record, Decision):
                if isinstance(record.event, SubEpochDone):
                    done.append((tasks[record.event.attempt], record.event))
                starts = [i for i in record.instructions if isinstance(i, StartSubEpoch)]
                tasks |= {start.attempt: start for start in starts}
        return done


def looks() -> str:
    """Tell what the looks before and after a sub-epoch of the demo's net take, beside a step."""
    torch.set_num_threads(1)
    params = {"lr": 1e-3, "batch_size": 32, "freeze_first": False}
    recipe = build_recipe(estimator_gen_fn, params, 0, Columns(("features",), ("label",)))
    rows = torch.rand(32, 64), torch.randint(10, (32,))
    admitted = admit(recipe, [((rows[0],), (rows[1],))], 0)
    cut_model = CutModelCache().get(
        recipe.model, admitted.spec, Sample.of(recipe, ((rows[0],), (rows[1],)))
    )
    trial = TrialRuntime(recipe, cut_model, admitted.layout, 0, 1)
    plain = PlainTrainer(recipe, 0, 1)
    budget, known = AuditBudget(0.01), (admitted.attributes, admitted.set_in_evaluation)

    def look() -> None:
        effects = LateEffects(trial, *known, budget, EarlierReadings())
        effects.begin()
        effects.check([(recipe.optimizer, None)] * cut_model.num_shards)

    step = _median(lambda: plain.step([Batch((rows[0],), (rows[1],), 32)]))
    return f"looks of a sub-epoch: {1e3 * _median(look):.3f} ms; a step: {1e3 * step:.2f} ms"


def _median(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(50):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def main() -> None:
    """Print a row per length of the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--times", type=int, nargs="+", default=[1])
    parser.add_argument("--quick", action="store_true", help="only see that it runs: one epoch")
    arguments = parser.parse_args()
    if arguments.quick:  # with a share that pays for audits of so short a run
        arguments.epochs, arguments.share = 1, 0.2
    logging.disable(logging.WARNING)
    print("| rows | training, s | audits | in first epochs | one audit, ms | share |")
    print("| --- | --- | --- | --- | --- | --- |")
    for times in arguments.times:
        done = sub_epochs(arguments.share, times, arguments.epochs)
        audits = [event.audit_seconds for _, event in done if event.audit_seconds]
        training = sum(event.seconds for _, event in done) - sum(audits)
        first = [event.audit_seconds > 0 for task, event in done if task.epoch == 0]
        each = 1e3 * sum(audits) / max(1, len(audits))
        print(
            f"| {1797 * times} | {training:.1f} | {len(audits)} of {len(done)} sub-epochs "
            f"| {sum(first)} of {len(first)} | {each:.0f} | {sum(audits) / training:.2%} |"
        )
    print(looks())


if __name__ == "__main__":
    main()
