"""Defines the files of a trained model that loads without its source; nothing in them is executed.

```
metadata/part-00000          what it predicts from what, its trial, and what Spark ML asks for; JSON
model/graph.json             calls of known operators
model/*.safetensors          weights and constants
```

The JSON files end with their own digest. The metadata holds the graph's, which holds the tensors'.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cerebro_hydra.errors import CerebroHydraError, StoreError
from cerebro_hydra.shards.export.program import (
    EXPORTED_FILES,
    GRAPH_FILE,
    ExportedModel,
    load_exported,
)
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.digest import decode_format, digest, encode_format

FORMAT = 3
METADATA_FILE = "metadata/part-00000"


@dataclass(frozen=True)
class ModelArchive:
    """Holds a model's metadata, as JSON, and the files of `save_exported` by name."""

    metadata: Mapping[str, Any]
    exported: Mapping[str, bytes]

    @classmethod
    def of(cls, metadata: Mapping[str, Any], folder: str | Path) -> ModelArchive:
        """Take what `save_exported` wrote to a folder."""
        exported = {name: Path(folder, name).read_bytes() for name in EXPORTED_FILES}
        return cls(metadata, exported)

    @classmethod
    def read(cls, read: Callable[[str], bytes], where: str) -> ModelArchive:
        """Read the files; the model is loaded once, so that no executor meets a damaged one first.

        Args:
            read: returns a file by its path below the archive.
            where: what the archive is called.

        Raises:
            ConfigurationError: another version wrote it, or it is something else.
            StoreError: a file is missing, or not as it was written.
        """
        metadata = decode_format(f"{where}/{METADATA_FILE}", read(METADATA_FILE), FORMAT)
        exported = {name: read(f"model/{name}") for name in EXPORTED_FILES}
        if digest(exported[GRAPH_FILE]) != metadata.pop("graph", None):
            raise StoreError(
                f"'{where}/model/{GRAPH_FILE}' is not the one that was saved with its metadata, or "
                "was damaged; save the model again"
            )
        archive = cls(metadata, exported)
        archive.module(where)
        return archive

    def files(self) -> dict[str, bytes]:
        """Return every file by its path below the archive."""
        sealed = {**self.metadata, "graph": digest(self.exported[GRAPH_FILE])}
        files = {f"model/{name}": content for name, content in self.exported.items()}
        return {**files, METADATA_FILE: encode_format(sealed, FORMAT)}

    def module(self, where: str = "the archive") -> ExportedModel:
        """Return the model on the CPU; an error names the files of the archive `where`."""
        with tempfile.TemporaryDirectory(prefix="cerebro-hydra-model-") as folder:
            for name, content in self.exported.items():
                Path(folder, name).write_bytes(content)
            try:
                return load_exported(folder)
            except CerebroHydraError as error:
                raise type(error)(str(error).replace(folder, f"{where}/model")) from error


def archived(folder: RunFolder, trial_id: str) -> ModelArchive | None:
    """Return the archive of a trial's model that its run's folder holds, or None."""
    path = f"{folder.path}/models/{trial_id}"
    if not folder.store.exists(f"{path}/{METADATA_FILE}"):
        return None
    return ModelArchive.read(lambda name: folder.store.read(f"{path}/{name}"), path)


def keep_archive(folder: RunFolder, trial_id: str, archive: ModelArchive) -> None:
    """Write an archive into its run's folder; the metadata come last, so that it is whole."""
    for name, content in archive.files().items():
        folder.store.write(f"{folder.path}/models/{trial_id}/{name}", content)
