"""Searches of each kind on local Spark, with two workers or three: every trial replays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra import SparkBackend
from cerebro_hydra.plan.messages.events import RunSuspended, TrialForked, TrialResumed
from cerebro_hydra.tune import (
    ASHASearch,
    BOHBSearch,
    HyperbandSearch,
    MedianStopping,
    RandomSearch,
)
from tests.end_to_end.runs import Tape, assert_replays, classes, frame_of
from tests.end_to_end.searches.early_searches import halving, search
from tests.end_to_end.searches.populations import population
from tests.end_to_end.searches.sampled_searches import sampled
from tests.end_to_end.searches.shared_prefixes import steps

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.spark(group=1)]

MEDIAN = {"stopping": MedianStopping(min_trials=2), "num_models": 5, "num_epochs": 3}

Make = Callable[..., Any]
SEARCHES: dict[str, tuple[Make, set[str]]] = {
    "median": (partial(search, RandomSearch, **MEDIAN), {"finished", "stopped"}),
    "hyperband": (partial(search, HyperbandSearch, num_models=6, eta=2), {"stopped"}),
    "asha": (partial(search, ASHASearch, num_models=6, eta=2), {"stopped"}),
    "bohb": (partial(search, BOHBSearch, num_models=8, eta=2), {"stopped"}),
    "optuna": (sampled, {"finished"}),
    "population": (population, {"stopped"}),
    "prefixes": (steps, {"finished"}),
}
FORKING = {"population", "prefixes"}


@pytest.mark.parametrize(
    ("name", "workers"), [(name, 2 + number % 2) for number, name in enumerate(SEARCHES)]
)
def test_a_search_on_spark_ends_and_all_its_trials_replay(
    spark: Any, tmp_path: Path, name: str, workers: int
) -> None:
    make, statuses = SEARCHES[name]
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=workers)
    tape = Tape()
    searched = make(tmp_path, backend=backend, observers=[tape])
    result = searched.fit(frame_of(spark, classes(120)))
    found = {trial.status for trial in result.trials}
    assert statuses <= found <= {"finished", "stopped"}
    assert result.best_trial.status == "finished"
    assert (len(tape.of(TrialForked)) > 0) == (name in FORKING)
    assert_replays(result)


def test_a_search_on_spark_that_its_target_ends_goes_on_and_its_promoted_trials_replay(
    spark: Any, tmp_path: Path
) -> None:
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=3)
    rows, tape = frame_of(spark, classes(120)), Tape()
    given = {"backend": backend, "order": "dynamic"}
    begun = halving(tmp_path, target={"val_loss": 1e9}, observers=[tape], **given).fit(rows)
    assert tape.of(RunSuspended), "the first epoch reaches it"
    assert {"paused"} <= {trial.status for trial in begun.trials}
    assert begun.best_trial.has_result
    tape = Tape()
    late = halving(tmp_path, time_budget=0.001, observers=[tape], **given)
    assert {"paused"} <= {trial.status for trial in late.fit(rows, resume=begun.run_path).trials}
    assert "time" in tape.of(RunSuspended)[-1].reason
    tape = Tape()
    result = halving(tmp_path, observers=[tape], **given).fit(rows, resume=begun.run_path)
    assert {trial.status for trial in result.trials} == {"finished", "stopped"}
    assert tape.of(TrialResumed), "trials were promoted after the resume"
    assert_replays(result)
