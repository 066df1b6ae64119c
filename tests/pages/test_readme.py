"""The README opens with a short program that runs as printed, and so is its line for a replay."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train.py"
OPENING = ROOT / "examples" / "quickstart.py"


def test_the_readme_opens_with_a_program_of_fifteen_lines() -> None:
    opening, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert opening == OPENING.read_text()
    assert sum(line.strip() != "" for line in opening.splitlines()) <= 15


@pytest.mark.long
@pytest.mark.spark
def test_the_opening_program_runs(tmp_path: Path) -> None:
    (tmp_path / "quickstart.py").write_text(OPENING.read_text())
    done = run_python("quickstart.py", cwd=tmp_path)
    *_, history = done.stdout.splitlines()
    assert len(ast.literal_eval(history)["val_loss"]) == 3


@pytest.mark.long
@pytest.mark.spark
def test_the_example_runs_and_its_run_is_replayed_as_printed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EXAMPLE.read_text())
    done = run_python("train.py", cwd=tmp_path)
    assert re.search(r"trial-00\d identical: True", done.stdout)
    (run,) = (tmp_path / "cerebro" / "runs").iterdir()
    readme = (ROOT / "README.md").read_text()
    (line,) = re.findall(r"^cerebro-hydra (replay .*?)  \[", readme, re.M)
    arguments = shlex.split(line.replace("<run id>", run.name))
    replayed = run_python("-m", "cerebro_hydra", *arguments, cwd=tmp_path)
    assert replayed.stdout.count("identical") >= 4
