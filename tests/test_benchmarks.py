"""Every benchmark has a quick run, so that none rots; its figures are in its README."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch

from cerebro_hydra.kernels import KERNELS

CHECKOUT = Path(__file__).resolve().parents[1]
FOLDERS = sorted(path.parent for path in CHECKOUT.glob("benchmarks/*/README.md"))
PORTABLE_DIGEST = "8b662148f35616d66032a25291101814"
"""Of three steps of the demo net with torch 2.13.0, on every CPU that benchmarks/numerics names."""

HANGS = 300.0
"""Seconds after which a quick run, which takes 20 on two quiet cores, counts as one that hangs."""


def programs(folder: Path) -> list[Path]:
    """Return the programs of a benchmark: every file that has a quick run."""
    return [path for path in sorted(folder.glob("*.py")) if '"--quick"' in path.read_text()]


PROGRAMS = [path.relative_to(CHECKOUT) for folder in FOLDERS for path in programs(folder)]


@cache
def quick_run(program: Path) -> str:
    """Return what a quick run prints; it is ended with all that it started if it hangs."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, program, "--quick"],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            cwd=CHECKOUT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(HANGS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        printed = output.read()
    assert status == 0, printed
    return printed


def test_every_folder_of_benchmarks_is_found() -> None:
    folders = {path for path in CHECKOUT.glob("benchmarks/*") if any(path.glob("*.py"))}
    assert folders == set(FOLDERS), "each has a README.md"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_benchmark_has_a_quick_run_of_which_its_page_tells(folder: Path) -> None:
    assert folder / "run.py" in programs(folder)
    page = (folder / "README.md").read_text()
    for program in programs(folder):
        assert f"{folder.name}/{program.name} --quick" in page


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: "/".join(program.parts[1:]))
def test_a_quick_run_ends_well_and_prints_figures(program: Path) -> None:
    assert any(character.isdigit() for character in quick_run(program))


@pytest.mark.long
def test_portable_kernels_give_the_digest_that_they_gave_on_other_cpus() -> None:
    lines = map(str.split, quick_run(Path("benchmarks/numerics/run.py")).splitlines())
    digests = {kernels: digest for kernels, digest, *_ in lines if kernels in KERNELS}
    assert set(digests) == {"fast", "portable"}
    if torch.__version__.split("+")[0] == "2.13.0" and torch.backends.mkl.is_available():
        assert digests["portable"] == PORTABLE_DIGEST
