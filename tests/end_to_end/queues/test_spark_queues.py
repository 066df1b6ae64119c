"""Trials in shard queues on local Spark, on several devices smaller than the trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra import SparkBackend
from tests.end_to_end.queues.mixed_searches import LARGEST_STATE, cut_to_fit, dataframe, search
from tests.end_to_end.queues.test_pipelines import pipelined
from tests.end_to_end.runs import assert_replays, statuses

pytestmark = [pytest.mark.slow, pytest.mark.spark(group=1)]


def run(
    spark: Any, path: Path, names: tuple[str, ...], workers: int, rows: int, **resources: Any
) -> Any:
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=workers, **resources)
    chosen = search(backend, path, names, space=cut_to_fit(names))
    result = chosen.fit(dataframe(spark, rows))
    assert statuses(result) == ["finished"] * len(names)
    assert_replays(result)


def test_two_devices_of_less_than_a_sixth_of_a_trial_replay(spark: Any, tmp_path: Path) -> None:
    resources = {"devices_per_worker": 2, "device_memory": 140_000}  # of 879,808 bytes
    run(spark, tmp_path, ("mlp",), 1, 20, pick="sharp", **resources)


@pytest.mark.long
@pytest.mark.parametrize(
    ("plan", "schedules"), [(None, ["gpipe", "2bw"]), ("auto", ["1f1b", "pipedream"])]
)
def test_pipelines_on_two_workers_replay(
    spark: Any, tmp_path: Path, plan: str | None, schedules: list[str]
) -> None:
    resources = {"devices_per_worker": 2, "device_memory": 700_000, "plan": plan}
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=2, **resources)
    space = {"model": ["resnet"], "schedule": schedules, "recompute": ["auto"]}
    chosen = search(backend, tmp_path, ("resnet",), space=space, factory=pipelined)
    result = chosen.fit(dataframe(spark, 24))
    assert statuses(result) == ["finished"] * len(schedules)
    assert_replays(result)


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "parts", "names"),
    [
        (1, 2, ("graph", "resnet", "bert")),
        (3, 2, ("mlp", "accumulated", "gpt2", "llama")),
    ],
)
def test_different_trials_replay(
    spark: Any, tmp_path: Path, devices: int, parts: int, names: tuple[str, ...]
) -> None:
    """All of them together train on two devices in tests/chaos/test_chaos_queues.py."""
    resources = {"devices_per_worker": devices, "device_memory": LARGEST_STATE // parts}
    run(spark, tmp_path, names, 2, 24, **resources)
