"""Memory of the host: freed blocks are kept for a while, and tensors lie in mapped files."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from cerebro_hydra.shards.engine.differences import same_bits
from cerebro_hydra.shards.engine.layout import aligned
from cerebro_hydra.shards.mapped_memory import LEAST_MAPPED, MappedMemory
from tests.processes import run_python

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
    inside, outside = map(int, run_python("-c", SCRIPT).stdout.split())
    assert inside > 280, f"of 320 MiB {inside} were kept"
    assert outside < 80, f"of 320 MiB {outside} were kept outside"


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["modules", pytest.param("export", marks=pytest.mark.long)])
def test_admission_needs_the_memory_of_a_few_shards_and_finds_the_same(
    tmp_path: Path, cut: str
) -> None:
    done = run_python("-m", "tests.shards.admitted_on_disk", tmp_path, cut)
    on_disk, in_memory, profiled = json.loads(done.stdout)
    assert on_disk["bits"] == in_memory["bits"] == profiled["bits"]
    assert on_disk["peak"] < 3.2 * on_disk["shard"] < in_memory["state"] / 2
    # The state of the uncut model and that of the shards are not in memory at once.
    assert in_memory["peak"] < 2.2 * in_memory["state"]


def trained() -> list[torch.Tensor]:
    """Train a net with dropout twice, and return all that training made."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Dropout(0.5), nn.Linear(300, 300))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    x = torch.randn(100, 300)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    states = [optimizer.state[p] for p in model.parameters()]
    assert same_bits(copy.deepcopy(states[0])["exp_avg"], states[0]["exp_avg"])
    return [t for s in states for t in s.values()] + [p.grad for p in model.parameters()]


def test_what_operations_make_lies_in_files_without_a_name_and_has_the_same_bits(
    tmp_path: Path,
) -> None:
    plain = trained()
    with MappedMemory(str(tmp_path), resident=1 << 20):
        mapped = trained()
        segment = aligned(LEAST_MAPPED, zeroed=True)
    for one, other in zip(plain, mapped, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    places = [t.data_ptr() for t in mapped if t.nbytes >= LEAST_MAPPED]
    assert len(places) == 6
    assert all(place in mapped_places(tmp_path) for place in (*places, segment.ctypes.data))
    assert not list(tmp_path.iterdir())
    assert aligned(LEAST_MAPPED).ctypes.data not in mapped_places(tmp_path)


def mapped_places(folder: Path) -> set[int]:
    """Return where files of a folder begin in this process's memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.partition("-")[0], 16) for line in lines if str(folder) in line}


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    memory = MappedMemory(str(tmp_path), resident=1 << 20)
    with pytest.raises(OSError, match=r"No space left|File too large"):
        memory.allocate(1 << 60)
    assert not list(tmp_path.iterdir())


THREADS = """
import threading
from pathlib import Path
import numpy as np
from cerebro_hydra.shards.heap import share_heap

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) >> 10

if {shared}:
    share_heap()
np.ones(16 << 20, np.uint8)  # from now on the heap has blocks of this size
begun, over = threading.Semaphore(0), threading.Event()

def work():
    np.ones(6 << 20, np.uint8)
    begun.release()
    over.wait()

before = resident()
for _ in range(8):
    threading.Thread(target=work).start()
    begun.acquire()  # one after another, however busy the machine is
print(resident() - before)
over.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone has a heap for each thread")
def test_threads_that_share_a_heap_leave_their_gaps_to_one_another() -> None:
    apart, shared = (
        int(run_python("-c", THREADS.format(shared=shared)).stdout) for shared in (False, True)
    )
    assert shared <= 20 < 30 < apart
