"""Describes a data set: its columns, and for each partition the rows and their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from cerebro_hydra.errors import DataError, StoreError

FORMAT = 3
"""The version of the layout of prepared data; it is part of every fingerprint."""

MANIFEST_NAME = "manifest.json"
ROW_ID = "row_id"
"""The name in the files of the column of row ids (int64).

It has no leading underscore, which petastorm refuses.
"""


@dataclass(frozen=True)
class ColumnSpec:
    """Describes one column as training sees it."""

    name: str
    dtype: str
    """The numpy dtype: "float32", "int64" or "bool"."""
    shape: tuple[int, ...]
    """The shape of one row; () for a number."""


@dataclass(frozen=True)
class Codec:
    """Says how a petastorm row store keeps a value of a column in a Parquet cell."""

    kind: str
    """"scalar", "ndarray", "compressed_ndarray" or "image"."""
    dtype: str
    """The numpy dtype of the decoded values, before they get the column's."""


@dataclass(frozen=True)
class SourceFile:
    """Describes a Parquet file that somebody else wrote, as it was when it was described."""

    path: str
    """Absolute, or relative to the data's folder where it lies in the same store."""
    rows: int
    bytes: int
    footer: str
    """The digest of its footer, which holds schema, row groups and statistics."""


@dataclass(frozen=True)
class ExistingFiles:
    """Lists existing Parquet files that are read where they lie."""

    codecs: tuple[Codec | None, ...]
    """A codec for each column; None where Parquet's own types say it all."""
    files: tuple[SourceFile, ...]
    seed: int | None
    """The seed that draws the rows held back for validation; None if no rows are."""

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> ExistingFiles:
        """Rebuild the description from its dataclass's dictionary."""
        return ExistingFiles(
            tuple(None if codec is None else Codec(**codec) for codec in document["codecs"]),
            tuple(SourceFile(**file) for file in document["files"]),
            document["seed"],
        )


@dataclass(frozen=True)
class RowRange:
    """Names consecutive rows of one file of `ExistingFiles`."""

    file: int
    first: int
    rows: int


@dataclass(frozen=True)
class PartitionInfo:
    """Describes one partition of a split: a prepared folder, or row ranges of existing files."""

    split: str
    index: int
    rows: int
    checksum: int | None
    """The `row_ids.checksum` of its row ids; None in existing files, which have none."""
    path: str = field(compare=False)
    """The path of its folder, relative to the data's folder; empty for row ranges."""
    row_ranges: tuple[RowRange, ...] = ()
    """Its row ranges; where rows are held back, both splits of a partition share them."""
    digests: tuple[int, ...] = ()
    """The `ContentDigest` of each column; empty only until the rows are written or surveyed."""

    def to_json(self) -> dict[str, Any]:
        """Describe the partition; 64-bit sums as text, because JSON numbers have 53 bits."""
        document: dict[str, Any] = {
            "split": self.split,
            "index": self.index,
            "rows": self.rows,
            "digests": [f"{digest:016x}" for digest in self.digests],
        }
        if self.checksum is None:
            return {**document, "row_ranges": [astuple(each) for each in self.row_ranges]}
        return {**document, "checksum": f"{self.checksum:016x}", "path": self.path}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> PartitionInfo:
        """Rebuild a partition from `to_json`."""
        digests = tuple(int(digest, 16) for digest in document["digests"])
        document = {**document, "digests": digests}
        if "row_ranges" in document:
            ranges = tuple(RowRange(*row_range) for row_range in document["row_ranges"])
            return PartitionInfo(**{**document, "row_ranges": ranges}, checksum=None, path="")
        return PartitionInfo(**{**document, "checksum": int(document["checksum"], 16)})


@dataclass(frozen=True)
class Manifest:
    """Describes a data set; prepared files name column i `column_00i`, whatever its name here."""

    fingerprint: str
    columns: tuple[ColumnSpec, ...]
    partitions: tuple[PartitionInfo, ...]
    source: ExistingFiles | None = None
    """The existing files; None if the data was prepared."""

    @property
    def num_partitions(self) -> int:
        """Return the number of training partitions."""
        return sum(info.split == "train" for info in self.partitions)

    @property
    def has_validation(self) -> bool:
        """Say whether there are validation partitions."""
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
        """Return the number of rows of one partition."""
        return self.partition(split, index).rows

    def to_json(self) -> dict[str, Any]:
        """Describe the manifest in JSON."""
        document = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "columns": [asdict(spec) for spec in self.columns],
            "partitions": [info.to_json() for info in self.partitions],
        }
        return document if self.source is None else {**document, "source": asdict(self.source)}

    @staticmethod
    def from_json(document: Any) -> Manifest:
        """Rebuild a manifest from `to_json`.

        Raises:
            StoreError: another version wrote it, or something is missing in it.
        """
        if not isinstance(document, dict):
            raise StoreError("the manifest is no dictionary: delete its folder and prepare again")
        if document.get("format") != FORMAT:
            raise StoreError(
                f"the manifest has format {document.get('format')!r}, this version reads {FORMAT}: "
                "delete its folder and prepare the data again"
            )
        source = document.get("source")
        try:
            manifest = Manifest(
                fingerprint=document["fingerprint"],
                columns=tuple(
                    ColumnSpec(**{**spec, "shape": tuple(spec["shape"])})
                    for spec in document["columns"]
                ),
                partitions=tuple(map(PartitionInfo.from_json, document["partitions"])),
                source=None if source is None else ExistingFiles.from_json(source),
            )
            if any(len(info.digests) != len(manifest.columns) for info in manifest.partitions):
                raise ValueError("a partition lacks the digest of a column")
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"the manifest is damaged ({error!r}): delete its folder and prepare again"
            ) from error
        return manifest


def stored_name(position: int) -> str:
    """Return the name in the files of the column at `position`.

    Not its own name: petastorm refuses those that are no Python identifiers, and Spark those that
    differ only in case.
    """
    return f"column_{position:03d}"


def partition_path(split: str, index: int) -> str:
    """Return the folder of a partition, relative to the data's folder."""
    return f"split={split}/partition={index:05d}"
