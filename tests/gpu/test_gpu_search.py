"""A search on GPUs that Spark has handed out, in budgets smaller than trials, and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra import SparkBackend, doctor
from tests.end_to_end.queues.mixed_models import NAMES
from tests.end_to_end.queues.mixed_searches import cut_to_fit, dataframe, search
from tests.end_to_end.runs import assert_replays
from tests.gpu.gpu_spark import gpu_spark
from tests.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU

ROWS = 48


@pytest.fixture(scope="module")
def spark_of_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with gpu_spark(tmp_path_factory.mktemp("gpus")) as spark:
        yield spark


def test_the_doctor_says_what_gpus_have(spark_of_gpus: Any) -> None:
    report = doctor(spark_of_gpus, num_workers=1, devices_per_worker=1)
    assert report.ok, str(report)
    assert "for shards and tasks" in str(report)


def test_a_gpu_has_no_more_than_it_has(spark_of_gpus: Any) -> None:
    with pytest.raises(Exception, match=r"device_memory is 900 TiB, and a GPU has"):
        SparkBackend(spark_of_gpus, 1, devices_per_worker=1, device_memory="900TiB")


@pytest.mark.parametrize("device_memory", [None, 120_000])
def test_different_trials_replay(
    spark_of_gpus: Any, tmp_path: Path, device_memory: int | None
) -> None:
    backend = SparkBackend(
        spark_of_gpus, 1, devices_per_worker=1, device_memory=device_memory, verbose=0
    )
    assert backend.resources.device_kind == "cuda"
    names = NAMES if device_memory is None else ("mlp",)
    chosen = search(backend, tmp_path, names, space=cut_to_fit(names))
    result = chosen.fit(dataframe(spark_of_gpus, ROWS))
    assert [trial.status for trial in result.trials] == ["finished"] * len(names)
    assert_replays(result)
