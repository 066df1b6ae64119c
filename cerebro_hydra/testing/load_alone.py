"""Loading exported models in a process that can import neither their source nor its libraries.

Importing torch takes seconds, so one such process serves every model of a test session.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import IO, Any


class Refuse(MetaPathFinder):
    """Makes packages as absent as where they were never installed."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] in self.packages:
            raise ModuleNotFoundError(f"{name} must not be needed here")
        return None


def run_alone(folder: Path, features: Sequence[Any], refused: Iterable[str]) -> list[Any]:
    """Return what an exported model gives for features, in a process without some packages.

    Args:
        folder: of `save_exported`; the features are written into it, and the outputs.
        features: tensors, rows first.
        refused: top-level packages that can't be imported there.

    Raises:
        RuntimeError: the model can't be loaded or run there.
    """
    import safetensors.torch

    given, made = folder / "features.safetensors", folder / "outputs.safetensors"
    named = {str(number): tensor.contiguous() for number, tensor in enumerate(features)}
    safetensors.torch.save_file(named, given)
    process = _process()
    assert process.stdin is not None and process.stdout is not None
    request = [str(folder), str(given), str(made), sorted(refused)]
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline().strip()
    if answer != "done":
        raise RuntimeError(f"the exported model does not run without its source: {answer}")
    outputs = safetensors.torch.load_file(made)
    return [outputs[str(number)] for number in range(len(outputs))]


@cache
def _process() -> subprocess.Popen[str]:
    """Ends when this process does, because its input does. `-I`: no path of ours is its own."""
    import torch

    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).resolve()), root],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _serve(requests: IO[str], answers: IO[str]) -> None:
    absent = Refuse()
    sys.meta_path.insert(0, absent)
    for line in requests:
        folder, features, outputs, refused = json.loads(line)
        absent.packages = set(refused)
        try:
            _run(folder, features, outputs, refused)
            answers.write("done\n")
        except Exception as error:
            answers.write(f"{type(error).__name__}: {error}".replace("\n", " ") + "\n")
        answers.flush()


def _run(folder: str, features: str, outputs: str, refused: list[str]) -> None:
    import safetensors.torch

    from cerebro_hydra.shards.export.program import load_exported

    given = safetensors.torch.load_file(features)
    model = load_exported(folder)
    found = model(*(given[str(number)] for number in range(len(given))))
    named = {str(number): tensor.contiguous() for number, tensor in enumerate(found)}
    safetensors.torch.save_file(named, outputs)
    if present := [name for name in refused if name in sys.modules]:
        raise RuntimeError(f"{present} is loaded here, so nothing was shown")


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr
    _serve(sys.stdin, answers)
