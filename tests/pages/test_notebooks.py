"""Notebooks run from the first cell to the last, and show what they promise."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.mark.long
@pytest.mark.spark
def test_the_quickstart_runs_and_every_trial_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = run("01_quickstart.ipynb", monkeypatch)
    text = printed(outputs)
    assert text.count(": identical") == 4
    assert text.count("finished") >= 4
    shown = [output["data"] for output in outputs if "data" in output]
    assert sum("image/png" in data for data in shown) == 1
    assert any("param_dropout" in data.get("text/html", "") for data in shown)


@pytest.mark.long
@pytest.mark.spark
def test_the_port_from_cerebro_runs_and_every_trial_replays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = printed(run("02_from_cerebro.ipynb", monkeypatch))
    assert text.count(": identical") == 4
    accuracy = re.search(r"accuracy on held-out rows: (\d\.\d+)", text)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8


@pytest.mark.long
@pytest.mark.spark
def test_models_of_eight_times_a_devices_memory_train_and_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs = run("04_larger_than_memory.ipynb", monkeypatch)
    text = printed(outputs)
    assert text.count(": identical") == 3
    sizes = re.search(r"a trial's state has (\d+) MB, a device (\d+\.\d) MB", text)
    assert sizes is not None
    assert float(sizes[1]) > 7.9 * float(sizes[2])
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> list[nbformat.NotebookNode]:
    """The outputs of all cells of a notebook."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOKS.parent), *sys.path]))
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    NotebookClient(
        notebook, timeout=170, resources={"metadata": {"path": str(NOTEBOOKS)}}
    ).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def printed(outputs: list[nbformat.NotebookNode]) -> str:
    return "\n".join(output.get("text", "") for output in outputs)


def test_notebooks_are_kept_without_outputs() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), f"{path.name}: clear all outputs before committing"
