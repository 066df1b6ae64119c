"""Notebooks run from the first cell to the last, and show what they promise."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


@pytest.mark.slow
@pytest.mark.spark
def test_the_quickstart_runs_and_every_trial_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOKS.parent), *sys.path]))
    notebook = nbformat.read(NOTEBOOKS / "01_quickstart.ipynb", as_version=4)
    NotebookClient(
        notebook, timeout=170, resources={"metadata": {"path": str(NOTEBOOKS)}}
    ).execute()
    text = "\n".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert text.count(": identical") == 4
    assert text.count("finished") >= 4
    shown = [data for cell in notebook.cells for data in _shown(cell)]
    assert sum("image/png" in data for data in shown) == 1
    assert any("param_dropout" in data.get("text/html", "") for data in shown)


def _shown(cell: nbformat.NotebookNode) -> list[dict[str, str]]:
    return [output["data"] for output in cell.get("outputs", ()) if "data" in output]


def test_notebooks_are_kept_without_outputs() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), f"{path.name}: clear all outputs before committing"
