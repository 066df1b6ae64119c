"""Makes existing Parquet files a data set: plain ones, petastorm's row stores, and Cerebro's.

```
train_path, val_path -> files and footers -> row ranges -> the manifest, if the store has it
                                                        -> else the survey -> a new manifest
```

Nothing is copied. The manifest names files, row ranges and shapes, and agents read their rows from
the files into their own caches.

The survey is one pass, before training, that finds faults and shapes, and digests values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cerebro_hydra.data import decoder, row_store
from cerebro_hydra.data.decoder import DecodedColumn, decoded_type, dtype_from_arrow
from cerebro_hydra.data.manifest import (
    Codec,
    ColumnSpec,
    ExistingFiles,
    Manifest,
    PartitionInfo,
    RowRange,
    SourceFile,
)
from cerebro_hydra.data.parquet import (
    column_type,
    describe_file,
    list_files,
    metadata_of,
    read_range,
)
from cerebro_hydra.data.preparation.prepared import (
    check_files,
    digest_of,
    find_prepared,
    finish,
    footers,
    prepared_in,
)
from cerebro_hydra.data.preparation.table_formats import refuse_tables
from cerebro_hydra.data.rows import ContentDigest, check_rows, partitions_of, split_mask
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.errors import CerebroHydraError, ConfigurationError, DataError
from cerebro_hydra.storage import Store

_CEREBRO_TRAIN, _CEREBRO_VAL = "train_data", "val_data"  # where Cerebro's stores keep their rows


class Paths(NamedTuple):
    """Holds the folders, or single files, of rows that somebody else wrote."""

    train: str
    val: str | None


class ParquetMetadata(NamedTuple):
    """Holds the result of `get_metadata_from_parquet`."""

    train_rows: int
    val_rows: int
    metadata: dict[str, ColumnSpec]
    """The type and shape of each column."""
    avg_row_size: float
    """The bytes of a training row in the files, before compression."""


def existing_paths(store: Store) -> Paths | None:
    """Return where existing data lies: the store's `train_path`, or what Cerebro left in it.

    Raises:
        ConfigurationError: the store has both Cerebro's data and data prepared here.
    """
    if store.train_path is not None:
        return Paths(store.train_path, store.val_path)
    train = os.path.join(store.prefix, _CEREBRO_TRAIN)
    if not row_store.is_row_store(train):
        return None
    if prepared := prepared_in(store):
        raise ConfigurationError(
            f"the store {store.prefix!r} holds Cerebro's data in {train!r} and data prepared here, "
            f"{[each.fingerprint for each in prepared]}; open the store with train_path={train!r} "
            "for the one, or give what backend.prepare_data returned for the other"
        )
    val = os.path.join(store.prefix, _CEREBRO_VAL)
    return Paths(train, val if os.path.isdir(val) else None)


def describe(store: Store, num_partitions: int, spec: DataSpec, mapper: Mapper = map) -> Manifest:
    """Make existing files a data set of the store, or find that they are one already.

    With `val_path`, its rows are validated on, whatever share the spec names; without, that share
    of the rows is held back, drawn by the spec's seed. A spec without validation leaves `val_path`
    unread.

    Raises:
        ConfigurationError: the paths or arguments can't be used.
        DataError: files, columns or rows can't be used; there are too few rows.
        SetupError: it is a petastorm row store, and petastorm is not here.
    """
    train, val = _folders(store, spec)
    requests = _column_requests([train, *val], spec.columns)
    train_files = train.described(store)
    val_files = [file for folder in val for file in folder.described(store)]
    rows, val_rows = (sum(file.rows for file in files) for files in (train_files, val_files))
    held_back = 0 if val else round(rows * spec.validation_share)
    validated = None if spec.validation is None else val_rows or held_back
    check_rows(rows - held_back, validated, num_partitions)
    source = ExistingFiles(
        tuple(request.codec for request in requests),
        (*train_files, *val_files),
        spec.seed if held_back else None,
    )
    partitions = partitions_of(
        [file.rows for file in train_files],
        [file.rows for file in val_files],
        held_back,
        num_partitions,
    )
    fingerprint = digest_of(
        columns=[asdict(request) for request in requests],
        source=asdict(source),
        num_partitions=num_partitions,
        held_back=held_back,
        val_files=len(val_files),
    )
    prepared = find_prepared(store, fingerprint)
    if prepared is not None:
        return prepared
    paths = [path for folder in (train, *val) for path in folder.files]
    tasks = survey_tasks(paths, requests, partitions, source.seed)
    found = survey_all(requests, mapper(survey, tasks))
    specs = specs_of(requests, found, rows + val_rows)
    return finish(store, Manifest(fingerprint, specs, digested(partitions, found), source))


def metadata_from(store: Store, columns: Sequence[str]) -> ParquetMetadata:
    """Tell rows, columns and row size of a store's data, from footers and one row.

    Raises:
        ConfigurationError: the store has no data, or several prepared sets with these columns.
        DataError: files or columns can't be used.
    """
    paths = existing_paths(store)
    if paths is None:
        return _metadata_of_prepared(store, columns)
    train = _Folder.open(paths.train, "train_path")
    val = [] if paths.val is None else [_Folder.open(paths.val, "val_path")]
    requests = _column_requests([train, *val], columns)
    first = next(path for path in train.files if metadata_of(path).num_rows)
    one = survey(SurveyTask(requests, (FileRows(first, 0, 1),)))
    specs = specs_of(requests, survey_all(requests, [one]), 1)
    metadata = [metadata_of(path) for path in train.files]
    rows = sum(each.num_rows for each in metadata)
    val_rows = sum(metadata_of(path).num_rows for folder in val for path in folder.files)
    return ParquetMetadata(
        rows, val_rows, {spec.name: spec for spec in specs}, sum(map(_bytes, metadata)) / rows
    )


def _metadata_of_prepared(store: Store, columns: Sequence[str]) -> ParquetMetadata:
    found = [
        manifest
        for manifest in prepared_in(store)
        if set(columns) <= {spec.name for spec in manifest.columns}
    ]
    if len(found) != 1:
        raise ConfigurationError(
            f"the store {store.prefix!r} holds {len(found)} data sets with the columns "
            f"{list(columns)}, {[each.fingerprint for each in found]}; give a store with one, or "
            "one with train_path"
        )
    (manifest,) = found
    check_files(manifest, store)
    root = store.data_path(manifest.fingerprint)
    rows = {"train": 0, "val": 0}
    nbytes = 0
    for info in manifest.partitions:
        rows[info.split] += info.rows
        if info.split == "train":
            nbytes += sum(map(_bytes, footers(store, f"{root}/{info.path}")))
    metadata = {spec.name: spec for spec in manifest.columns if spec.name in columns}
    return ParquetMetadata(rows["train"], rows["val"], metadata, nbytes / rows["train"])


def _bytes(metadata: pq.FileMetaData) -> int:
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return sum(group.total_byte_size for group in groups)


@dataclass(frozen=True)
class _Folder:
    root: str
    """The folder, or the path of a single file."""
    files: tuple[str, ...]

    @staticmethod
    def open(path: str, what: str) -> _Folder:
        if os.path.isfile(path):
            refuse_tables([path], f"{what} {path!r}")
            return _Folder(path, (path,))
        if not os.path.isdir(path):
            raise ConfigurationError(
                f"{what} {path!r} does not exist: check the path; what backend.prepare_data writes "
                "lies in the store's own folder, and is found by a store without train_path"
            )
        files = list_files(path)
        refuse_tables(files, f"{what} {path!r}")
        return _Folder(path, tuple(files))

    def described(self, store: Store) -> list[SourceFile]:
        """Describe the files; those in the store by relative paths, so that the store can move."""
        inside = os.path.join(store.prefix, "")
        base = store.data_path("any")  # all data sets lie in folders side by side
        return [
            describe_file(path, os.path.relpath(path, base) if path.startswith(inside) else path)
            for path in self.files
        ]


def _folders(store: Store, spec: DataSpec) -> tuple[_Folder, list[_Folder]]:
    paths = existing_paths(store)
    if paths is None:
        raise ConfigurationError(
            f"the store {store.prefix!r} has no train_path; open it as LocalStore(prefix_path=..., "
            "train_path=...) with the path of Parquet files"
        )
    if spec.validation_column is not None:
        raise ConfigurationError(
            f"validation is {spec.validation!r}, a column's name, but existing files are read in "
            "ranges of rows: put the validation rows into a folder of their own and give "
            "val_path, or prepare the data: backend.prepare_data(store, "
            f"spark.read.parquet({paths.train!r}), validation={spec.validation!r}, ...)"
        )
    train = _Folder.open(paths.train, "train_path")
    if spec.validation is None or paths.val is None:
        return train, []
    val = _Folder.open(paths.val, "val_path")
    if both := set(map(os.path.realpath, train.files)) & set(map(os.path.realpath, val.files)):
        raise ConfigurationError(
            f"val_path {paths.val!r} and train_path {paths.train!r} share {len(both)} files, such "
            f"as {min(both)!r}, and no row is for both: keep them in folders apart"
        )
    return train, [val]


def _column_requests(
    folders: Sequence[_Folder], columns: Sequence[str]
) -> tuple[ColumnRequest, ...]:
    """Return the columns, which all files must hold in one way."""
    codecs: list[list[tuple[str | None, Codec | None]]] = []
    types: dict[str, tuple[pa.DataType, str]] = {}
    for folder in folders:
        filled = [path for path in folder.files if metadata_of(path).num_rows]
        if not filled:
            raise DataError(f"the Parquet files in {folder.root!r} hold no rows")
        for path in filled:
            schema = pq.read_schema(path)
            for name in columns:
                kind = column_type(schema, name, path)
                first, first_path = types.setdefault(name, (kind, path))
                if decoded_type(kind) != decoded_type(first):
                    raise decoder.mixed_types(name, first, first_path, kind, path)
        if row_store.is_row_store(folder.root):
            codecs.append(row_store.read_codecs(folder.root, columns))
        else:
            codecs.append([(None, None)] * len(columns))
    for name, here, there in zip(columns, codecs[0], codecs[-1], strict=True):
        if here != there:
            raise DataError(
                f"column {name!r} is kept in another way in {folders[-1].root!r} than in "
                f"{folders[0].root!r}: write both alike"
            )
    return tuple(
        ColumnRequest(name, dtype or dtype_from_arrow(name, types[name][0]), codec)
        for name, (dtype, codec) in zip(columns, codecs[0], strict=True)
    )


@dataclass(frozen=True)
class ColumnRequest:
    """Names a column that existing files are asked for, with the dtype that it gets."""

    name: str
    dtype: str
    codec: Codec | None


class FileRows(NamedTuple):
    """Names consecutive rows of one file."""

    path: str
    first: int
    rows: int


@dataclass(frozen=True)
class SurveyTask:
    """Names the rows of one partition, which are surveyed together."""

    columns: tuple[ColumnRequest, ...]
    rows: tuple[FileRows, ...]
    splits: tuple[PartitionInfo, ...] = ()
    """The partitions that these rows make: one, or where rows are held back one for each split."""
    seed: int | None = None
    """The seed that draws the rows held back."""


@dataclass
class ColumnSurvey:
    """Holds the faults and the shapes of a column's rows; rows are named in words."""

    faults: dict[str, tuple[int, str]] = field(default_factory=dict)
    """For each fault the number of rows that have it, and the first one."""
    lengths: list[tuple[int, int, str]] | None = None
    """For each dimension the shortest length, the longest one, and a row with the shortest."""
    first_row: str = ""
    """The first row that `lengths` is about."""


@dataclass
class Survey:
    """Holds what was found in the rows of a task, or of all tasks."""

    columns: dict[str, ColumnSurvey]
    digests: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    """The content digest of each column, by split and index of the partition."""


SurveyOutcome = Survey | CerebroHydraError
Mapper = Callable[
    [Callable[[SurveyTask], SurveyOutcome], Sequence[SurveyTask]], Iterable[SurveyOutcome]
]
"""Applies a function to tasks and gives the outcomes in order, perhaps in parallel on a cluster."""


def survey_tasks(
    paths: Sequence[str],
    columns: tuple[ColumnRequest, ...],
    partitions: Sequence[PartitionInfo],
    seed: int | None,
) -> list[SurveyTask]:
    """Make one task of the rows of each partition; both splits of a partition may share them."""
    splits: dict[tuple[RowRange, ...], list[PartitionInfo]] = {}
    for info in partitions:
        splits.setdefault(info.row_ranges, []).append(info)
    return [
        SurveyTask(
            columns,
            tuple(FileRows(paths[each.file], each.first, each.rows) for each in ranges),
            tuple(infos),
            seed,
        )
        for ranges, infos in splits.items()
    ]


def survey(task: SurveyTask) -> SurveyOutcome:
    """Read and decode every row of a task; an error is returned.

    Spark would try a task that raises again, and wrap what it raised.
    """
    found = Survey({request.name: ColumnSurvey() for request in task.columns})
    masks = [split_mask(info, task.seed) for info in task.splits]
    read = [ContentDigest(len(task.columns)) for _ in task.splits]
    start = 0
    try:
        for path, first, rows in task.rows:
            for batch in read_range(path, list(found.columns), first, rows):
                where = partial(decoder.row_of_file, path, first)
                columns = [
                    row_store.decode(batch.column(each.name), each.codec, each.dtype)
                    for each in task.columns
                ]
                for each, decoded in zip(task.columns, columns, strict=True):
                    _merge(found.columns[each.name], _column_survey(decoded, where), each.name)
                stop = start + batch.num_rows
                if all(decoded.sound for decoded in columns):  # else an error is to come
                    ids = np.arange(start, stop)
                    arrays = [decoded.values.reshape(len(ids), -1) for decoded in columns]
                    for mask, digest in zip(masks, read, strict=True):
                        own = slice(None) if mask is None else mask[start:stop]
                        digest.add(ids[own], [array[own] for array in arrays])
                first += batch.num_rows
                start = stop
    except CerebroHydraError as error:
        return error
    for info, digest in zip(task.splits, read, strict=True):
        found.digests[info.split, info.index] = digest.digests
    return found


def survey_all(columns: Sequence[ColumnRequest], outcomes: Iterable[SurveyOutcome]) -> Survey:
    """Join what tasks found, in their order.

    Raises:
        DataError: a file can't be read, or columns have arrays of different dimensions.
        SetupError: a worker lacks a package that reads the files.
    """
    total = Survey({request.name: ColumnSurvey() for request in columns})
    for outcome in outcomes:
        if isinstance(outcome, CerebroHydraError):
            raise outcome
        for name, column in outcome.columns.items():
            _merge(total.columns[name], column, name)
        total.digests |= outcome.digests
    return total


def specs_of(columns: Sequence[ColumnRequest], found: Survey, rows: int) -> tuple[ColumnSpec, ...]:
    """Return the columns with the shape that all rows have.

    Raises:
        DataError: rows can't be trained on: the message names the column, the number of rows and
            the first one.
    """
    for request in columns:
        for fault, (count, example) in found.columns[request.name].faults.items():
            raise decoder.faulty(request.name, fault, example, (count, rows))
    return tuple(
        ColumnSpec(request.name, request.dtype, _shape(request.name, found.columns[request.name]))
        for request in columns
    )


def digested(partitions: Sequence[PartitionInfo], found: Survey) -> tuple[PartitionInfo, ...]:
    """Return the partitions with the content digests that the survey made of them."""
    return tuple(
        replace(info, digests=found.digests[info.split, info.index]) for info in partitions
    )


def _shape(name: str, column: ColumnSurvey) -> tuple[int, ...]:
    lengths = column.lengths or []
    for dimension, (shortest, longest, example) in enumerate(lengths):
        if shortest != longest:
            raise decoder.ragged(name, shortest, longest, dimension, example)
        if longest == 0:
            raise decoder.without_elements(name)
    return tuple(longest for _, longest, _ in lengths)


def _column_survey(decoded: DecodedColumn, where: Callable[[int], str]) -> ColumnSurvey:
    wrong = {fault: (len(rows), where(int(rows[0]))) for fault, rows in decoded.faults.items()}
    if wrong and not decoded.values.size:
        return ColumnSurvey(wrong)  # nothing is left that could have a length
    lengths = [(each.shortest, each.longest, where(each.row)) for each in decoded.lengths]
    return ColumnSurvey(wrong, lengths, where(0))


def _merge(into: ColumnSurvey, other: ColumnSurvey, name: str) -> None:
    for fault, (count, example) in other.faults.items():
        before, earlier = into.faults.get(fault, (0, example))
        into.faults[fault] = (before + count, earlier)
    if other.lengths is None:
        return
    if into.lengths is None:
        into.lengths, into.first_row = other.lengths, other.first_row
        return
    if len(into.lengths) != len(other.lengths):
        raise DataError(
            f"column {name!r} has arrays of {len(into.lengths)} dimensions in {into.first_row} "
            f"and of {len(other.lengths)} in {other.first_row}: write all with one shape"
        )
    into.lengths = [
        (min(a, b), max(c, d), earlier if a <= b else later)
        for (a, c, earlier), (b, d, later) in zip(into.lengths, other.lengths, strict=True)
    ]
