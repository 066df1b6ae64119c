"""Runs in which workers train a trial together: their agents are processes, and one is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra import SparkBackend
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.messages.events import SubEpochEnding, WorkerLost
from cerebro_hydra.plan.messages.instructions import Cancel, Commit, StartSubEpoch
from cerebro_hydra.testing.local_backend import LocalBackend
from tests.end_to_end.replicas.factories import normalized, scaled
from tests.end_to_end.runs import Tape, assert_replays, classes, frame_of, grid, search, statuses

pytestmark = pytest.mark.slow


def kill_a_replica(attempts: int) -> Tape:
    """Return a tape that kills the second rank when the first one comes to its last step."""
    killed: list[str] = []

    def act(tape: Tape) -> None:
        for ending in tape.of(SubEpochEnding, last=True):
            begun = [each for each in tape.of(StartSubEpoch) if each.attempt == ending.attempt]
            replicas = begun[0].replicas if begun else ()
            if len(killed) < attempts and replicas and ending.incarnation == replicas[0]:
                killed.append(replicas[1])
                os.kill(tape.agents[replicas[1]], signal.SIGKILL)

    return Tape(act)


def test_replicas_have_the_bits_of_one_process_and_one_lost_costs_the_sub_epoch(
    tmp_path: Path,
) -> None:
    """One group is of two partitions, and one is left over; their rows are no whole batches."""
    tape, shared = kill_a_replica(1), {"epochs": [2], "ema": [0.9], "clip": [0.5]}
    space = {**shared, "replicas": [2, 3], "accumulate": [2]}
    options = {"validation": 0.3, "observers": [tape], "tls": True}
    result = search(tmp_path, normalized, space, classes(131), workers=3, **options)
    assert statuses(result) == ["finished"] * 2
    assert [sorted(trial.visit_log) for trial in result.trials] == [
        [(epoch, partition) for epoch in range(2) for partition in range(3)]
    ] * 2
    groups = [[each.partitions for each in tape.of(Commit) if each.trial == n] for n in range(2)]
    assert sorted(groups[0]) == [(0, 1), (0, 1), (2,), (2,)]
    assert groups[1] == [(0, 1, 2)] * 2
    assert len(tape.of(WorkerLost)) == 1
    assert tape.of(Cancel), "the ranks that were left have ended their attempt"
    assert_replays(result)
    fewer = grid(LocalBackend(2), tmp_path, normalized, space, validation=0.3, num_epochs=3)
    with pytest.raises(ConfigurationError, match=r"replicas is 3, and the backend has 2 worker"):
        fewer.fit(classes(131), resume=result.run_path)


def test_a_forward_that_writes_by_its_rows_fails_its_trial_alone_and_by_name(
    tmp_path: Path,
) -> None:
    result = search(tmp_path, scaled, {"replicas": [2, 1]}, classes(64), workers=2)
    assert statuses(result) == ["failed", "finished"]
    assert "the forward writes to parameter 'scale'" in str(result.trials[0].error)


def test_the_last_trial_takes_the_workers_that_are_left_and_replays(tmp_path: Path) -> None:
    """Its first epoch is decided on before the search is closed, and a replica is lost later."""
    tape = kill_a_replica(1)
    space = {"epochs": [4], "replicas": ["tail"], "accumulate": [1]}
    options = {"validation": 0.3, "observers": [tape], "num_epochs": 4}
    result = search(tmp_path, normalized, space, classes(96), workers=2, **options)
    assert statuses(result) == ["finished"]
    groups = [each.partitions for each in tape.of(Commit)]
    assert groups == [(0,), (1,), *[(0, 1)] * 3] or groups == [(1,), (0,), *[(0, 1)] * 3]
    assert len(tape.of(WorkerLost)) == 1
    assert_replays(result)


@pytest.mark.long
@pytest.mark.spark(group=1)
def test_replicas_on_spark_outlive_one_of_them(spark: Any, tmp_path: Path) -> None:
    tape = kill_a_replica(2)
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=2)
    space = {"epochs": [3], "replicas": [2], "accumulate": [1, 2]}
    options = {"num_epochs": 3, "validation": 0.3, "observers": [tape]}
    result = grid(backend, tmp_path, normalized, space, **options).fit(frame_of(spark, classes(96)))
    assert statuses(result) == ["finished"] * 2
    assert len(tape.of(WorkerLost)) == 2
    assert {each.partitions for each in tape.of(Commit)} == {(0, 1)}
    assert_replays(result)


@pytest.mark.long
@pytest.mark.spark(group=1)
def test_the_last_trial_takes_all_workers_of_spark_and_replays(spark: Any, tmp_path: Path) -> None:
    """A replica is killed in an epoch of the tail, which is begun again with as many."""
    tape = kill_a_replica(1)
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=3)
    space = {"epochs": [3], "replicas": ["tail"], "accumulate": [2], "ema": [0.9], "clip": [0.5]}
    options = {"num_epochs": 3, "validation": 0.3, "observers": [tape]}
    data = frame_of(spark, classes(131))
    result = grid(backend, tmp_path, normalized, space, **options).fit(data)
    assert statuses(result) == ["finished"]
    first, later = tape.of(Commit)[:3], tape.of(Commit)[3:]
    assert sorted(each.partitions for each in first) == [(0,), (1,), (2,)]
    assert [each.partitions for each in later] == [(0, 1, 2)] * 2
    assert len(tape.of(WorkerLost)) == 1
    assert_replays(result)
