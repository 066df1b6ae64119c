from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cerebro_hydra.errors import SetupError
from cerebro_hydra.spark import gpu_discovery, gpus


@pytest.mark.parametrize(
    ("addresses", "allowed", "expected"),
    [
        (["3"], None, "3"),
        (["3", "1"], None, "3,1"),
        (["3"], "2,3", "3"),
        (["GPU-ab"], "GPU-cd, GPU-ab", "GPU-ab"),
    ],
)
def test_cuda_is_shown_the_addresses(
    addresses: list[str], allowed: str | None, expected: str
) -> None:
    assert gpus.visible(addresses, allowed) == expected


@pytest.mark.parametrize("allowed", ["2,3", "", "GPU-ab"])
def test_a_gpu_that_the_cluster_does_not_allow_is_refused(allowed: str) -> None:
    with pytest.raises(SetupError, match=r"GPU '0'.*cerebro-hydra-gpus"):
        gpus.visible(["0"], allowed)


def test_the_environment_is_pinned_and_then_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.setenv(gpus.ORDER, "FASTEST_FIRST")
    for address in ("5", "4"):  # a Python worker is reused, by an agent with another GPU
        with gpus.pinned([address]):
            assert os.environ[gpus.VISIBLE] == address
            assert os.environ[gpus.ORDER] == gpus.BY_BUS
        assert gpus.VISIBLE not in os.environ
        assert os.environ[gpus.ORDER] == "FASTEST_FIRST"


def test_without_gpus_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "7")
    with gpus.pinned([]):
        assert os.environ[gpus.VISIBLE] == "7"


def test_a_worker_whose_cuda_was_started_for_another_gpu_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No GPU is here to start CUDA with: only that it has started is made up."""
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.setattr(gpus, "_started_with", None)
    with gpus.pinned(["4"]):
        monkeypatch.setattr(gpus, "_cuda_has_started", lambda: True)
    with gpus.pinned(["4"]):
        pass
    with pytest.raises(SetupError, match=r"'4'.*GPU '5'"), gpus.pinned(["5"]):
        pass
    assert gpus.VISIBLE not in os.environ


def discover(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), "/bin", "/usr/bin"])
    return subprocess.run(
        [sys.executable, gpu_discovery.__file__],
        env={"PATH": path, **environ},
        capture_output=True,
        text=True,
    )


def install(folder: Path, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/bash\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_discovery_prints_what_spark_wants(tmp_path: Path) -> None:
    install(tmp_path, '[ "$1" = --query-gpu=index ] && echo 0 && echo 1')
    assert json.loads(discover(tmp_path).stdout) == {"name": "gpu", "addresses": ["0", "1"]}
    allowed = discover(tmp_path, CUDA_VISIBLE_DEVICES="2, GPU-ab")
    assert json.loads(allowed.stdout)["addresses"] == ["2", "GPU-ab"]
    assert json.loads(discover(tmp_path, CUDA_VISIBLE_DEVICES="").stdout)["addresses"] == []


def test_discovery_without_a_driver_says_so(tmp_path: Path) -> None:
    install(tmp_path, "exit 9")
    done = discover(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is the NVIDIA driver installed?" in done.stderr
