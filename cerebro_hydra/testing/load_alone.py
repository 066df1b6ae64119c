"""Run as `python -I load_alone.py ...`: load an exported model where its source can't be imported.

Arguments: the folder that has `cerebro_hydra`, the exported folder, a safetensors file of features,
a safetensors file to write the outputs to, and the packages whose import is refused.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class Refuse(MetaPathFinder):
    """Makes packages as absent as where they were never installed."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] in self._packages:
            raise ModuleNotFoundError(f"{name} must not be needed here")
        return None


def main(root: str, folder: str, features: str, outputs: str, *refused: str) -> None:
    """Load, run once, write what came out."""
    sys.path.insert(0, root)
    sys.meta_path.insert(0, Refuse(set(refused)))

    import safetensors.torch

    from cerebro_hydra.shards.exported import load_exported

    given = safetensors.torch.load_file(features)
    model = load_exported(folder)
    found = model(*(given[str(number)] for number in range(len(given))))
    named = {str(number): tensor.contiguous() for number, tensor in enumerate(found)}
    safetensors.torch.save_file(named, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
