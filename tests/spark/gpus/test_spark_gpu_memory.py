"""What a GPU has is asked of torch on each worker, before anything is trained."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from cerebro_hydra.agent.device.visible_gpus import LEAST_RESERVED
from cerebro_hydra.spark.gpus import GpuFacts, ask, check_gpu_facts, usable

GIB = 1 << 30
TORCH = """
import os, sys
__version__ = "2.13.0+cu130"
names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
if "broken" in names:
    sys.exit("CUDA error: out of memory")
class cuda:
    device_count = lambda: len(names)
    mem_get_info = lambda i: (int(names[i]) << 30, 80 << 30)
"""


@pytest.fixture
def torch_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let GPU 7 have 7 GiB of 80 free, and so on."""
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("torch_of_workers")
def test_each_gpu_of_a_task_is_asked_for_its_memory() -> None:
    before = dict(os.environ)
    assert ask(["79", "7"], "7, 79").memory == (71 * GIB, 0)
    assert ask(["40"], None).memory == (32 * GIB,)
    assert dict(os.environ) == before


def test_a_gpu_that_the_cluster_does_not_allow_is_named_with_what_to_change() -> None:
    found = ask(["4"], "5")
    assert found.problem == (
        "Spark gave this task GPU '4', but CUDA_VISIBLE_DEVICES is '5', which lacks it"
    )
    (finding,) = check_gpu_facts([found])
    assert finding.remedy.startswith("let the discovery script print what that variable lists")


@pytest.mark.usefixtures("torch_of_workers")
def test_what_python_prints_at_its_start_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('welcome')")
    assert ask(["40"], None).memory == (32 * GIB,)


@pytest.mark.usefixtures("torch_of_workers")
def test_a_gpu_on_which_cuda_does_not_start_says_why() -> None:
    assert ask(["broken"], None).problem == "CUDA does not start: CUDA error: out of memory"


def test_a_torch_without_cuda_is_named() -> None:
    why = ask(["0", "1"], None).problem
    assert why.startswith("it was given GPU 0, 1, and torch 2.") and why.endswith("finds 0 of them")


def test_a_task_without_gpus_is_told_of() -> None:
    assert ask([], "0,1") == GpuFacts(socket.gethostname(), (), "Spark gave its task no GPU")


@pytest.mark.parametrize(
    ("free", "total", "left"),
    [(79 * GIB, 80 * GIB, 71 * GIB), (8 * GIB, 80 * GIB, 0), (7 * GIB, 8 * GIB, 6 * GIB)],
)
def test_a_tenth_and_at_least_a_gibibyte_is_left_for_kernels(
    free: int, total: int, left: int
) -> None:
    assert LEAST_RESERVED == GIB
    assert usable(free, total) == left


def test_what_is_wrong_is_found_once_per_host() -> None:
    facts = [GpuFacts("a", (), "no GPU"), GpuFacts("a", (), "no GPU"), GpuFacts("b", (5, 0))]
    found = [*check_gpu_facts(facts), *check_gpu_facts([GpuFacts("c", (1,))])]
    assert [(finding.setting, finding.prevents) for finding in found] == [
        ("executor on a", True),
        ("executor on b", True),
    ]
    assert "no GPU" in str(found[0]) and "end what else uses it" in str(found[1])
