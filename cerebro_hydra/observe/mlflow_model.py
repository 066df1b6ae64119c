"""Writes the best model of a run as an MLflow model, and loads it as MLflow's python_function.

```
MLmodel               says how MLflow loads it
data/model.pt2        for mlflow.pytorch: a program of torch.export, which needs torch alone
archive/              for mlflow.pyfunc: what cerebro_hydra.load_model takes
```
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cerebro_hydra import __version__
from cerebro_hydra.data.given_rows import feature_tensors
from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.documents import decode
from cerebro_hydra.shards.export.archive import ModelArchive
from cerebro_hydra.shards.export.formats import write_torch

_ROWS = 3  # with one row, torch.export would fix their number


def write_mlflow_model(archive: ModelArchive, folder: Path) -> None:
    """Write the folder of an MLflow model, without pickle."""
    from mlflow import pyfunc
    from mlflow.models import Model

    zeros = [
        torch.zeros((_ROWS, *spec.shape), dtype=getattr(torch, spec.dtype))
        for spec in _columns(archive)
    ]
    write_torch(archive.module(), zeros, folder / "data" / "model.pt2")
    for name, content in archive.files().items():
        file = folder / "archive" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    requirements = f"cerebro-hydra=={__version__}\ntorch=={torch.__version__}\n"
    (folder / "requirements.txt").write_text(requirements, encoding="utf-8")
    described = Model()
    pyfunc.add_to_model(described, loader_module=__name__, data="archive")
    described.add_flavor(
        "pytorch", model_data="data", pytorch_version=str(torch.__version__), code=None
    )
    described.save(str(folder / "MLmodel"))


def _load_pyfunc(path: str) -> _Predictor:
    """Load the archive; MLflow calls this by its name."""
    read = ModelArchive.read(lambda name: Path(path, name).read_bytes(), path)
    return _Predictor(read)


class _Predictor:
    """Predicts from a pandas DataFrame, a dictionary of arrays, or the array of one feature."""

    def __init__(self, archive: ModelArchive) -> None:
        self._columns = _columns(archive)
        self._model = archive.module()

    def predict(self, data: Any, params: Any = None) -> Any:
        """Return an array of predictions, rows first; of several outputs a dictionary of arrays.

        Raises:
            DataError: a feature column is missing, or has another type or shape.
        """
        predictions = self._model(*feature_tensors(data, self._columns))
        arrays = [prediction.numpy() for prediction in predictions]
        if len(arrays) == 1:
            return arrays[0]
        return {f"output_{number}": array for number, array in enumerate(arrays)}


def _columns(archive: ModelArchive) -> list[ColumnSpec]:
    columns = archive.metadata.get("columns")
    found: list[ColumnSpec] = decode(list[ColumnSpec], columns, "the columns of a saved model")
    return found
