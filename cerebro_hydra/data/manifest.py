"""Describes a data set: its columns, and for each partition the rows and their place."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Annotated, Any, NamedTuple

from cerebro_hydra.documents import Count, decode, matching, one_of, unreadable
from cerebro_hydra.errors import DataError, StoreError
from cerebro_hydra.storage.names import Digest, Name, SourcePath

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
    dtype: Annotated[str, one_of("float32", "int64", "bool", "binary", "image")]
    """The numpy dtype; or which kind of `cells` a row is, of shape ()."""
    shape: tuple[Count, ...]
    """The shape of one row; () for a number."""


@dataclass(frozen=True)
class Codec:
    """Says how a petastorm row store keeps a value of a column in a Parquet cell."""

    kind: Annotated[str, one_of("scalar", "ndarray", "compressed_ndarray", "image")]
    dtype: Annotated[str, matching(r"bool|u?int(8|16|32|64)|float(16|32|64|96|128)")]
    """The numpy dtype of the decoded values, before they get the column's."""


@dataclass(frozen=True)
class SourceFile:
    """Describes a Parquet file that somebody else wrote, as it was when it was described."""

    path: SourcePath
    """Absolute, or relative to the data's folder where it lies in the same store."""
    rows: Count
    bytes: Count
    footer: Digest
    """The digest of its footer, which holds schema, row groups and statistics."""


@dataclass(frozen=True)
class ExistingFiles:
    """Lists existing Parquet files that are read where they lie."""

    codecs: tuple[Codec | None, ...]
    """A codec for each column; None where Parquet's own types say it all."""
    files: tuple[SourceFile, ...]
    seed: int | None
    """The seed that draws the rows held back for validation; None if no rows are."""


@dataclass(frozen=True)
class RowRange:
    """Names consecutive rows of one file of `ExistingFiles`."""

    file: Count
    first: Count
    rows: Count


@dataclass(frozen=True)
class PartitionInfo:
    """Describes one partition of a split: a prepared folder, or row ranges of existing files."""

    split: Annotated[str, one_of("train", "val")]
    index: Count
    rows: Count
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
    def from_json(document: Any) -> PartitionInfo:
        """Rebuild a partition from `to_json`.

        Raises:
            StoreError: a field is wrong, or the path is not that of the partition.
        """
        info = decode(dict[str, Any], document, where := "a partition")
        digests = decode(list[_Sum], info.get("digests"), "the digests of a partition")
        info["digests"] = [int(digest, 16) for digest in digests]
        if "row_ranges" in info:
            ranges = decode(list[tuple[int, int, int]], info["row_ranges"], "the row ranges")
            named = [dict(zip(("file", "first", "rows"), each, strict=True)) for each in ranges]
            info |= {"row_ranges": named, "checksum": None, "path": ""}
        else:
            info["checksum"] = int(decode(_Sum, info.get("checksum"), "the checksum"), 16)
        partition: PartitionInfo = decode(PartitionInfo, info, where)
        below, _, path = partition.path.partition("/")
        if partition.checksum is not None:
            decode(Name, below, "the folder of a partition")
            if path != partition_path(partition.split, partition.index):
                raise unreadable("the path of a partition", partition.path)
        elif partition.path:
            raise unreadable("the path of a partition", partition.path)
        return partition


_Sum = Annotated[str, matching(r"[0-9a-f]{16}")]
"""A 64-bit sum in JSON."""


@dataclass(frozen=True)
class Manifest:
    """Describes a data set; prepared files name column i `column_00i`, whatever its name here."""

    fingerprint: Digest
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
        fields = {name: value for name, value in document.items() if name != "format"}
        listed = decode(list[Any], fields.pop("partitions", None), "the manifest's partitions")
        partitions = tuple(map(PartitionInfo.from_json, listed))
        manifest: Manifest = decode(Manifest, {**fields, "partitions": []}, "the manifest")
        return replace(manifest, partitions=partitions)._checked()

    def _checked(self) -> Manifest:
        """Return itself, if its parts fit together.

        Raises:
            StoreError: they don't.
        """
        for split in ("train", "val"):
            indices = [info.index for info in self.partitions if info.split == split]
            if sorted(indices) != list(range(len(indices))):
                raise unreadable(f"the {split} partitions of the manifest", indices)
        source = self.source or ExistingFiles((None,) * len(self.columns), (), None)
        if not self.columns or len(source.codecs) != len(self.columns):
            raise unreadable("the columns of the manifest", self.columns)
        for info in self.partitions:
            if len(info.digests) != len(self.columns):
                raise unreadable("the digests of a partition", info.digests)
            ranges = info.row_ranges
            whole = all(
                each.file < len(source.files)
                and each.first + each.rows <= source.files[each.file].rows
                for each in ranges
            )
            if not whole or bool(ranges) != (self.source is not None):
                raise unreadable(f"the row ranges of {info.split} partition {info.index}", ranges)
        return self


class RowsFound(NamedTuple):
    """Tells which prepared data rows would become, without having written any."""

    fingerprint: str
    rows: int
    compared: str
    """What of the rows the fingerprint stands for, in words."""


def stored_name(position: int) -> str:
    """Return the name in the files of the column at `position`.

    Not its own name: petastorm refuses those that are no Python identifiers, and Spark those that
    differ only in case.
    """
    return f"column_{position:03d}"


def partition_path(split: str, index: int) -> str:
    """Return the folder of a partition, relative to the data's folder."""
    return f"split={split}/partition={index:05d}"
