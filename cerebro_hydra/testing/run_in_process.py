"""A run of one trial in this process: real decisions, engine and files; no agents and no wire."""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from cerebro_hydra.data.batches import batches, num_windows, row_order, windows
from cerebro_hydra.data.cache import CachedPartition
from cerebro_hydra.hopper.journal import Journal
from cerebro_hydra.hopper.run_config import hop_config, trial_config
from cerebro_hydra.plan.events import (
    Checkpointed,
    Event,
    Hop,
    SearchClosed,
    SubEpochDone,
    TrialAdded,
    WorkerJoined,
)
from cerebro_hydra.plan.instructions import Checkpoint, StartSubEpoch
from cerebro_hydra.plan.scheduler import Scheduler
from cerebro_hydra.recipe import Columns
from cerebro_hydra.storage import RunFolder, Store
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_document import RUN_FILE, RunDocument, TrialSpec
from cerebro_hydra.testing.cut_trial import CutTrial
from cerebro_hydra.testing.datasets import write_dataset

PARTITIONS = 2
SEED = 0

Digests = tuple[tuple[str, str], ...]
"""Of the frozen and the trainable segment of each shard."""


def run_in_process(
    store: Store,
    arrays: Mapping[str, NDArray[Any]],
    columns: Columns,
    trial: CutTrial,
    params: Mapping[str, Any],
    device: str = "cpu",
) -> RunFolder:
    """Train a trial over one epoch of two partitions, and leave what `replay` reads.

    Args:
        arrays: every column, shape (rows, ...).
        trial: a trial before its first step.
        params: what its factory makes the recipe of.
        device: the kind of device that it trains on.
    """
    manifest = write_dataset(store, arrays, PARTITIONS, None, SEED)
    with tempfile.TemporaryDirectory(prefix="cerebro-hydra-") as scratch:
        parts = [CachedPartition.build(i, manifest, store, scratch) for i in manifest.partitions]
    recipe = trial.recipe
    steps = tuple(num_windows(p.rows, recipe.batch_size, recipe.accumulate) for p in parts)
    trial.steps_per_epoch = sum(steps)
    folder = RunFolder(store, "in-process")
    spec = TrialSpec(
        trial=0,
        trial_id="trial-000",
        params=params,
        seed=trial.trial_seed,
        cut=trial.admission.spec.to_json(),
        template=trial.admission.template.to_json(),
        nbytes=trial.admission.layout.nbytes,
        batch_size=recipe.batch_size,
        accumulate=recipe.accumulate,
        steps=steps,
        shards=_write_state(folder, trial, 0),
    )
    document = RunDocument(
        run_id=folder.run_id,
        factory=None,
        seed=SEED,
        order="seeded",
        num_epochs=1,
        num_partitions=PARTITIONS,
        evaluation_metric="loss",
        metrics={"loss": "min"},
        feature_columns=columns.features,
        label_columns=columns.labels,
        sample_weight_column=columns.weight,
        store=store.to_dict(),
        fingerprint=manifest.fingerprint,
        validated=False,
        threads=1,
        device=device,
    )
    folder.write_json(RUN_FILE, document.to_json())
    folder.write_trial(spec)

    def train(task: StartSubEpoch) -> SubEpochDone:
        part = parts[task.partition]
        order = row_order(part.rows, SEED, task.epoch, task.partition)
        stream = batches(part, columns.features, columns.targets, spec.batch_size, order)
        totals = trial.train([*windows(stream, spec.accumulate)])
        digests = _write_state(folder, trial, task.visit)
        return SubEpochDone(
            task.attempt, task.incarnation, totals.rows, totals.loss_sum, digests, spec.nbytes,
            seconds=0.0, hop=Hop(0, 0, 0.0),
        )  # fmt: skip

    config = hop_config(document)
    scheduler, journal = Scheduler(config), Journal.begin(folder, config)
    added = TrialAdded(trial_config(spec), document.num_epochs)
    events: deque[Event] = deque([added, SearchClosed()])
    events.extend(WorkerJoined(n, f"agent-{n}", (n,)) for n in range(PARTITIONS))
    while not scheduler.state.finished:
        decided = scheduler.handle(events.popleft())
        journal.append(0.0, decided)
        for instruction in (each for _, instructions in decided for each in instructions):
            match instruction:
                case StartSubEpoch():
                    events.append(train(instruction))
                case Checkpoint(number, visit, incarnation):
                    events.append(Checkpointed(number, visit, incarnation))
    journal.close()
    return folder


def _write_state(folder: RunFolder, trial: CutTrial, visit: int) -> Digests:
    entries = []
    for segments, cursor in trial.shards:
        digests = {name: digest(content) for name, content in segments.items()}
        for name, content in segments.items():
            folder.write_object(digests[name], content)
        entries.append({**digests, "cursor": json.loads(cursor)})
    folder.write_state(0, visit, {"trial": 0, "visit": visit, "shards": entries})
    return tuple((entry["frozen"], entry["trainable"]) for entry in entries)
