"""A disk that fills up while rows are prepared ends that in one sentence with the remedy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_disk import on_small_disk

pytestmark = pytest.mark.long

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "store",
            "StoreError: can't write '{small}/store/.*; the disk is full: free space .*\nprepared",
        ),
        (
            "shuffle",
            "StoreError: a disk was full while preparing rows: .*{small}.*\\(spark.local.dir\\)",
        ),
    ],
)
def test_a_disk_that_fills_up_is_told(case: str, said: str, tmp_path: Path) -> None:
    small, roomy = tmp_path / "small", tmp_path / "roomy"
    small.mkdir()
    roomy.mkdir()
    if not (around := on_small_disk(small, 8 << 20)):
        pytest.skip("no disk of its own can be mounted: that needs root, or namespaces of users")
    program = [sys.executable, "-m", "tests.data.preparation.full_disk", str(small), str(roomy)]
    done = subprocess.run(
        [*around, *program, case], cwd=CHECKOUT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = said.format(small=re.escape(str(small)))
    assert re.fullmatch(expected, done.stdout.strip()), done.stdout
