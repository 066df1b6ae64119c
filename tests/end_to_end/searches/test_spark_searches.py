"""Searches that stop early on local Spark, with two and three workers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra import SparkBackend
from cerebro_hydra.tune import ASHASearch, HyperbandSearch, SuccessiveHalvingSearch
from cerebro_hydra.tune.search import Search
from tests.end_to_end.runs import assert_replays, classes, frame_of
from tests.end_to_end.searches.early_searches import search
from tests.end_to_end.searches.populations import population
from tests.end_to_end.searches.sampled_searches import sampled
from tests.end_to_end.searches.shared_prefixes import steps

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.spark(group=1)]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kind", [SuccessiveHalvingSearch, HyperbandSearch, ASHASearch])
def test_a_search_on_spark_stops_trials_early_and_replays(
    spark: Any, tmp_path: Path, kind: type[Search], workers: int
) -> None:
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=workers)
    arguments = {"backend": backend, "num_models": 6, "eta": 2}
    result = search(kind, tmp_path, **arguments).fit(frame_of(spark, classes(120)))
    statuses = Counter(trial.status for trial in result.trials)
    assert statuses.keys() == {"finished", "stopped"}
    assert result.best_trial.status == "finished"
    assert_replays(result)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_sampler_on_spark_learns_and_replays(spark: Any, tmp_path: Path, workers: int) -> None:
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=workers)
    result = sampled(tmp_path, backend=backend).fit(frame_of(spark, classes(120)))
    assert {trial.status for trial in result.trials} == {"finished"}
    assert_replays(result)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_population_on_spark_forks_and_replays(spark: Any, tmp_path: Path, workers: int) -> None:
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=workers)
    result = population(tmp_path, backend=backend).fit(frame_of(spark, classes(120)))
    statuses = Counter(trial.status for trial in result.trials)
    assert statuses == {"finished": 4, "stopped": 3}
    assert_replays(result)


@pytest.mark.parametrize("workers", [2, 3])
def test_trials_that_agree_on_spark_are_trained_once_and_replay(
    spark: Any, tmp_path: Path, workers: int
) -> None:
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=workers)
    result = steps(tmp_path, backend=backend).fit(frame_of(spark, classes(120)))
    assert {trial.status for trial in result.trials} == {"finished"}
    assert len({trial.history["train_loss"][0] for trial in result.trials}) == 2
    assert_replays(result)
