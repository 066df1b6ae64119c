"""The programs of docs/recipes: one of each page, and the backend that runs them without Java."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd

from cerebro_hydra.testing.local_backend import Arrays, LocalBackend

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.stem != "index")


def program(page: Path) -> str:
    """Return the one program that a page prints."""
    (found,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


class TableBackend(LocalBackend):
    """A LocalBackend that takes a pandas DataFrame, as a SparkBackend does."""

    def rows(self, given: Arrays | pd.DataFrame) -> Arrays:
        if isinstance(given, Arrays):
            return given
        columns = {name: np.stack(list(given[name])) for name in given.columns}
        return Arrays(
            {
                name: values.astype(np.float32) if values.dtype == np.float64 else values
                for name, values in columns.items()
            }
        )
