"""Executes the notebooks, and keeps their outputs without what only one machine has.

python -m tests.pages.notebooks [NAME...]    execute them, or those of these names, and write them
"""

from __future__ import annotations

import base64
import os
import re
import socket
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SECONDS = 170
"""What a cell may take at most."""

TEMPORARY = re.compile(r"/tmp/\w+")
HOST = re.compile(rf"\b{re.escape(socket.gethostname())}\b")
KEPT_KINDS = ("image/png", "text/html", "text/plain")
"""The kinds of an output of which the first that there is is kept."""


def executed(path: Path) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of all its cells."""
    notebook = nbformat.read(path, as_version=4)
    places = {"metadata": {"path": str(NOTEBOOKS)}}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(NOTEBOOKS.parent), *sys.path])}
    NotebookClient(notebook, timeout=SECONDS, resources=places).execute(env=environment)
    return notebook


def clean(notebook: nbformat.NotebookNode) -> None:
    """Drop times, metadata and standard error, and replace the names of places."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [_cleaned(each) for each in cell.outputs if _is_told(each)]


def _is_told(output: Any) -> bool:
    return output.get("name") != "stderr" and any(output.get("data", {"": "text"}).values())


def _cleaned(output: Any) -> Any:
    if "text" in output:
        output["text"] = _without_places(output["text"])
    if "data" in output:
        kind = next(kind for kind in KEPT_KINDS if kind in output["data"])
        content = output["data"][kind]
        output["data"] = {kind: (_small if kind == "image/png" else _without_places)(content)}
        output["metadata"] = {}
    return output


def _small(image: str) -> str:
    """Return a PNG in 64 colours, which are enough for lines and bars."""
    with Image.open(BytesIO(base64.b64decode(image))) as read:
        buffer = BytesIO()
        read.convert("RGB").quantize(64).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def _without_places(text: str) -> str:
    return HOST.sub("HOST", TEMPORARY.sub("STORE", text))


def main(names: list[str]) -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not names or path.stem in names:
            notebook = executed(path)
            clean(notebook)
            nbformat.write(notebook, path)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
