"""Quick runs of benchmarks, so that none rots; their figures are in their READMEs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long

CHECKOUT = Path(__file__).resolve().parents[1]
PORTABLE_DIGEST = "8b662148f35616d66032a25291101814"
"""Of three steps of the demo net with torch 2.13.0, on every CPU that benchmarks/numerics names."""


def printed(benchmark: str, *options: str) -> str:
    return subprocess.run(
        [sys.executable, f"benchmarks/{benchmark}/run.py", *options],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        cwd=CHECKOUT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def test_portable_kernels_give_the_digest_that_they_gave_on_other_cpus() -> None:
    net = "net 64-1060-1060-10, 64 rows"
    lines = printed("numerics", "--digests", "--case", net).splitlines()
    digests = {line.split()[0]: line.split()[1] for line in lines}
    assert set(digests) == {"fast", "portable"}
    if torch.__version__.split("+")[0] == "2.13.0" and torch.backends.mkl.is_available():
        assert digests["portable"] == PORTABLE_DIGEST


def test_training_from_disk_is_measured(tmp_path: Path) -> None:
    options = ("--megabytes", "16", "--rounds", "1", "--steps", "20", "--folder", str(tmp_path))
    assert printed("train_from_disk", *options).startswith("| 16 MiB | all of it |")
