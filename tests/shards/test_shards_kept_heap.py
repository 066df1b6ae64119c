"""Freed memory is kept while large tensors come and go, and given back afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from cerebro_hydra.shards.kept_heap import kept_heap

torch.set_num_threads(1)
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def churned():
    before = faults()
    for _ in range(5):
        torch.ones(16 << 20)
    return faults() - before

with kept_heap():
    with kept_heap():
        pass
    # It takes a while until the gaps between other blocks are large enough.
    inside = min(churned() for _ in range(10))
print(inside, min(churned() for _ in range(2)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone is told to keep memory")
def test_large_tensors_cost_no_page_faults_inside_and_go_back_outside() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    inside, outside = map(int, done.stdout.split())
    pages = 5 * (64 << 20) // 4096
    assert inside < pages / 20, "freed memory went back while it was to be kept"
    assert outside > pages / 2, "freed memory is kept for ever"
