"""A Spark that hands out GPUs which torch can't use is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_python

JOB = """
import sys
from pathlib import Path
from cerebro_hydra import SparkBackend, doctor
from cerebro_hydra.errors import SetupError
from tests.gpu.gpu_spark import gpu_spark

def refused(**options):
    try:
        SparkBackend(spark, 1, **options)
    except SetupError as error:
        print(str(error).splitlines()[-1])

with gpu_spark(Path(sys.argv[1]), workers=1, gpus=2, listed="4,5,6") as spark:
    refused(devices_per_worker=3)
    refused(devices_per_worker=2)
    print(SparkBackend(spark, 1).resources.device_kind)
    print(*(f"{finding}" for finding in doctor(spark, 1, devices_per_worker=2).findings))
"""


@pytest.mark.long
def test_gpus_that_agents_could_not_use_are_named(tmp_path: Path) -> None:
    done = run_python("-c", JOB, tmp_path)
    too_many, unusable, kind, found = done.stdout.splitlines()[-4:]
    assert "tasks are given 2 GPU(s), and devices_per_worker is 3" in too_many
    assert "it was given GPU 4, 5, and torch 2." in unusable and "finds 0 of them" in unusable
    assert kind == "cpu"
    assert "finds 0 of them" in found
