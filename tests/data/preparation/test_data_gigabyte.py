"""A gigabyte of rows, prepared by a Java with a heap of one gigabyte and two task slots."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

CHECKOUT = Path(__file__).resolve().parents[3]
MOST_PYTHON = 1.5 * 1024  # MiB of all of Spark's Python processes, torch in each of them


@pytest.mark.parametrize(("shape", "gigabytes"), [("array", "1"), ("images", "0.5")])
def test_rows_of_any_width_fit_a_heap_of_their_own_size(
    shape: str, gigabytes: str, tmp_path: Path
) -> None:
    asked = f"--gigabytes {gigabytes} --shape {shape} --heap 1g --workers 1 --rounds 1 --runs ours"
    script = [CHECKOUT / "benchmarks/prepare/run.py", *asked.split(), "--folder", tmp_path]
    done = subprocess.run(
        [sys.executable, *script], capture_output=True, text=True, timeout=1500, cwd=CHECKOUT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"heap +(\d+) MiB +Python +(\d+) MiB", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) <= 1024
    assert 0 < int(found[2]) < MOST_PYTHON
