"""Trials in shard queues on local Spark that end early, raise, and have batches of any length."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, hp_choice
from tests.end_to_end.trials import growing_batches
from tests.end_to_end.trials.odd_trials import LAST_WORDS, odd

pytestmark = [pytest.mark.slow, pytest.mark.spark(group=1), pytest.mark.long]


@pytest.mark.parametrize(
    "resources",
    [
        {"residents": 3},
        {"devices_per_worker": 2, "device_memory": 700_000},
    ],
)
def test_trials_that_end_early_or_raise_leave_others_alone(
    spark: Any, tmp_path: Path, resources: dict[str, int]
) -> None:
    texts = growing_batches.texts(40).arrays
    rows = [(words.tolist(), int(label)) for words, label in zip(*texts.values(), strict=True)]
    space = {"does": ["improve", "not improve", "raises"], "driver": [os.getpid()]}
    result = GridSearch(
        backend=SparkBackend(spark_context=spark.sparkContext, num_workers=1, **resources),
        store=LocalStore(prefix_path=str(tmp_path)),
        estimator_gen_fn=odd,
        search_space={name: hp_choice(values) for name, values in space.items()},
        num_epochs=3,
        validation=0.2,
        evaluation_metric="loss",
        verbose=0,
    ).fit(spark.createDataFrame(rows, "features array<long>, label long"))
    improved, stopped, failed = result.trials
    assert [each.status for each in result.trials] == ["finished", "finished", "failed"]
    assert [len(each.history["val_loss"]) for each in (improved, stopped)] == [3, 2]
    assert failed.error.rstrip().endswith(f"ValueError: {LAST_WORDS}")
    for trial in (improved, stopped):
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.identical, str(report)
