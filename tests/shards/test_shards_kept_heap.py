"""Freed memory is kept while tensors come and go, and given back afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
from pathlib import Path
import torch
from cerebro_hydra.shards.heap import kept_heap

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) >> 10

before = resident()
with kept_heap():
    with kept_heap():
        pass
    blocks = [torch.ones(4 << 20) for _ in range(20)]
    del blocks
    print(resident() - before)
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone is told to keep memory")
def test_freed_blocks_stay_inside_and_go_back_outside() -> None:
    printed = subprocess.check_output([sys.executable, "-c", SCRIPT], text=True)
    inside, outside = map(int, printed.split())
    assert inside > 280, f"of 320 MiB {inside} were kept"
    assert outside < 80, f"of 320 MiB {outside} were kept outside"
