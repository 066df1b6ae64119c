"""Notebooks run from the first cell to the last, show what they promise, and are kept with it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.pages.notebooks import NOTEBOOKS, clean, executed

KEPT = sorted(NOTEBOOKS.glob("*.ipynb"))
MOST_BYTES = 100_000
ABSOLUTE = re.compile(r"(?<![\w<.:/])/(?:home|opt|root|srv|tmp|Users|usr|var|work)/")


@pytest.mark.long
@pytest.mark.spark
def test_the_quickstart_runs_and_every_trial_replays() -> None:
    outputs = run("01_quickstart.ipynb")
    text = printed(outputs)
    assert text.count(": identical") == 4
    assert text.count("finished") >= 4
    shown = [output["data"] for output in outputs if "data" in output]
    assert sum("image/png" in data for data in shown) == 1
    assert any("param_dropout" in data.get("text/html", "") for data in shown)


@pytest.mark.long
@pytest.mark.spark
def test_the_port_from_cerebro_runs_and_every_trial_replays() -> None:
    text = printed(run("02_from_cerebro.ipynb"))
    assert text.count(": identical") == 4
    accuracy = re.search(r"accuracy on held-out rows: (\d\.\d+)", text)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8


@pytest.mark.long
@pytest.mark.spark
def test_models_of_eight_times_a_devices_memory_train_and_replay() -> None:
    outputs = run("03_larger_than_memory.ipynb")
    text = printed(outputs)
    assert text.count(": identical") == 3
    sizes = re.search(r"a trial's state has (\d+) MB, a device (\d+\.\d) MB", text)
    assert sizes is not None
    assert float(sizes[1]) > 7.9 * float(sizes[2])
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1


@pytest.mark.long
@pytest.mark.spark
def test_a_search_stops_early_rests_goes_on_and_its_trials_replay() -> None:
    outputs = run("04_search.ipynb")
    text = printed(outputs)
    assert text.count(": identical") == 2
    trained = re.search(r"(\d+) epochs trained instead of (\d+)", text)
    assert trained is not None
    assert int(trained[1]) == 124 and int(trained[2]) == 400
    shown = [output["data"] for output in outputs if "data" in output]
    assert sum("image/png" in data for data in shown) == 2
    assert any("paused" in data.get("text/plain", "") for data in shown)


@pytest.mark.long
@pytest.mark.spark
def test_all_schedules_replay_and_two_of_them_train_by_rules_of_their_own() -> None:
    outputs = run("06_pipelines.ipynb")
    text = printed(outputs)
    assert text.count(": identical") == 6
    assert text.count("the weights of plain training") == 4
    assert re.search(r"pipedream +weights of its own", text)
    assert re.search(r"2bw +weights of its own", text)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1


@pytest.mark.long
@pytest.mark.spark
def test_jpegs_and_sparks_images_train_with_augmentation_and_replay() -> None:
    outputs = run("07_images.ipynb")
    text = printed(outputs)
    assert text.count(": identical") == 4
    accuracies = [float(each) for each in re.findall(r"accuracy (\d\.\d+)", text)]
    assert len(accuracies) == 2 and max(accuracies) > 0.6  # by chance 0.33
    assert len(re.findall(r"loss \d\.\d+", text)) == 2
    shown = [output["data"] for output in outputs if "data" in output]
    assert sum("image/png" in data for data in shown) == 1


def run(name: str) -> list[nbformat.NotebookNode]:
    """The outputs of all cells of a notebook; the same cells have them where it is kept."""
    made, kept = executed(NOTEBOOKS / name), nbformat.read(NOTEBOOKS / name, as_version=4)
    clean(made)
    for now, before in zip(made.cells, kept.cells, strict=True):
        assert bool(now.get("outputs")) == bool(before.get("outputs")), now.source
    return [output for cell in made.cells for output in cell.get("outputs", ())]


def printed(outputs: list[nbformat.NotebookNode]) -> str:
    return "\n".join(output.get("text", "") for output in outputs)


def shows(source: str) -> bool:
    """Whether a cell prints or ends with a value."""
    body = ast.parse(source).body
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    prints = any(isinstance(func, ast.Name) and func.id == "print" for func in calls)
    return prints or (isinstance(body[-1], ast.Expr) and "stop()" not in ast.unparse(body[-1]))


def faults(notebook: dict[str, Any]) -> list[str]:
    """Return what is wrong with the outputs of a notebook that is kept."""
    found = []
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if [cell["execution_count"] for cell in cells] != [*range(1, len(cells) + 1)]:
        found.append("it was not executed once, from its first cell to its last")
    for cell in cells:
        source, outputs = "".join(cell["source"]), json.dumps(cell["outputs"])
        if shows(source) and not cell["outputs"]:
            found.append(f"nothing is kept of {source!r}")
        if ABSOLUTE.search(outputs):
            found.append(f"a machine's path is kept of {source!r}")
        if '"stderr"' in outputs or '"error"' in outputs:
            found.append(f"errors are kept of {source!r}")
    return found


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_small_outputs_of_no_machine(path: Path) -> None:
    assert faults(json.loads(path.read_text())) == [], f"make notebooks NAMES={path.stem}"
    assert path.stat().st_size <= MOST_BYTES


def test_outputs_that_must_not_be_kept_are_reported() -> None:
    def cell(count: int, source: str, *texts: str, name: str = "stdout") -> dict[str, Any]:
        outputs = [{"output_type": "stream", "name": name, "text": [text]} for text in texts]
        return {
            "cell_type": "code", "execution_count": count, "source": [source], "outputs": outputs
        }  # fmt: skip

    good = [cell(1, "print(1)", "1"), cell(2, "x = 1"), cell(3, "spark.stop()")]
    assert faults({"cells": good}) == []
    told = faults(
        {
            "cells": [
                cell(1, "print(1)"),
                cell(3, "x", "report: /tmp/a1/report.html"),
                cell(4, "z", "warning", name="stderr"),
            ]
        }
    )
    assert [line.split(" of ")[0] for line in told] == [
        "it was not executed once, from its first cell to its last",
        "nothing is kept",
        "a machine's path is kept",
        "errors are kept",
    ]
