"""What was prepared: columns, and for each partition its rows, checksum and folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cerebro_hydra.errors import DataError, StoreError

FORMAT = 1
"""Version of the layout of prepared data; part of every fingerprint."""

MANIFEST_NAME = "manifest.json"
ROW_ID = "row_id"
"""Name in the files of the column of row ids (int64); petastorm refuses a leading underscore."""


@dataclass(frozen=True)
class ColumnSpec:
    """One column as training sees it."""

    name: str
    dtype: str
    """numpy's name: "float32", "int64" or "bool"."""
    shape: tuple[int, ...]
    """Of one row; () for a number."""


@dataclass(frozen=True)
class PartitionInfo:
    """One partition of one split."""

    split: str
    index: int
    rows: int
    checksum: int
    """`row_ids.checksum` of its row ids."""
    path: str
    """Of its folder, relative to the data's folder."""


@dataclass(frozen=True)
class Manifest:
    """A prepared data set. The files name column i `column_00i`, for any name it has here."""

    fingerprint: str
    columns: tuple[ColumnSpec, ...]
    partitions: tuple[PartitionInfo, ...]

    @property
    def num_partitions(self) -> int:
        """Number of training partitions."""
        return sum(info.split == "train" for info in self.partitions)

    @property
    def has_validation(self) -> bool:
        """Whether there are validation partitions."""
        return any(info.split == "val" for info in self.partitions)

    def partition(self, split: str, index: int) -> PartitionInfo:
        """Return one partition.

        Raises:
            DataError: there is no such partition.
        """
        for info in self.partitions:
            if (info.split, info.index) == (split, index):
                return info
        there = [f"{info.split}/{info.index}" for info in self.partitions]
        raise DataError(f"there is no partition {split}/{index} in the prepared data: {there}")

    def rows(self, split: str, index: int) -> int:
        """Rows of one partition."""
        return self.partition(split, index).rows

    def to_json(self) -> dict[str, Any]:
        """Describe the manifest in JSON; checksums as text, because JSON numbers have 53 bits."""
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "columns": [
                {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}
                for spec in self.columns
            ],
            "partitions": [
                {
                    "split": info.split,
                    "index": info.index,
                    "rows": info.rows,
                    "checksum": f"{info.checksum:016x}",
                    "path": info.path,
                }
                for info in self.partitions
            ],
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Manifest:
        """Rebuild a manifest from `to_json`.

        Raises:
            StoreError: another version wrote it, or something is missing in it.
        """
        if document.get("format") != FORMAT:
            raise StoreError(
                f"the manifest has format {document.get('format')!r}, this version reads {FORMAT}: "
                "prepare the data again"
            )
        try:
            return Manifest(
                fingerprint=document["fingerprint"],
                columns=tuple(
                    ColumnSpec(spec["name"], spec["dtype"], tuple(spec["shape"]))
                    for spec in document["columns"]
                ),
                partitions=tuple(
                    PartitionInfo(**{**info, "checksum": int(info["checksum"], 16)})
                    for info in document["partitions"]
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"the manifest is damaged ({error!r}): delete its folder and prepare again"
            ) from error


def stored_name(position: int) -> str:
    """Name in the files of the column at `position`.

    Not its own name: petastorm refuses those that are no Python identifiers, and Spark those that
    differ only in case.
    """
    return f"column_{position:03d}"


def partition_path(split: str, index: int) -> str:
    """Folder of a partition, relative to the data's folder."""
    return f"split={split}/partition={index:05d}"
