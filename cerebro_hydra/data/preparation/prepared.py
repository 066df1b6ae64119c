"""Names a store's prepared data by fingerprint, lets one program prepare it, checks its reuse.

The smallest and largest values of its columns come from footers, without reading a row.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from pyarrow.parquet import FileMetaData

from cerebro_hydra.data.claim import CLAIM_SECONDS, CLAIMS, Claims, forget_claims
from cerebro_hydra.data.decoder import is_vector
from cerebro_hydra.data.manifest import FORMAT, MANIFEST_NAME, ColumnSpec, Manifest, stored_name
from cerebro_hydra.data.parquet import check_file, metadata_of
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.errors import ConfigurationError, DataError, StoreError
from cerebro_hydra.storage import Store
from cerebro_hydra.storage.digest import decode_document, encode_document
from cerebro_hydra.storage.names import is_digest

_ATTEMPT = re.compile(r"attempt-[0-9a-f]{12}")


def fingerprint_of(
    columns: Sequence[ColumnSpec],
    content: Mapping[str, int],
    num_partitions: int,
    validation: float | str | None,
    seed: int,
) -> str:
    """Return a name made of all that decides the files; `content` sums the rows in any order."""
    return digest_of(
        columns=[[spec.name, spec.dtype, list(spec.shape)] for spec in columns],
        content=dict(content),
        num_partitions=num_partitions,
        validation=validation,
        seed=seed,
    )


def digest_of(**described: Any) -> str:
    """Return a digest of JSON values and of the format."""
    text = json.dumps({"format": FORMAT, **described}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find_prepared(store: Store, fingerprint: str) -> Manifest | None:
    """Return the manifest of data that is whole in the store; None if it is not.

    Raises:
        StoreError: the files are not those of the manifest.
    """
    manifest = read_manifest(store, fingerprint)
    if manifest is not None:
        check_files(manifest, store)
    return manifest


def prepared_in(store: Store) -> list[Manifest]:
    """Return the manifests of all data that was prepared in the store, without a look at its files.

    Manifests of existing files are left out.

    Raises:
        StoreError: a manifest can't be read.
    """
    names = data_in(store)
    read = [manifest for name in names if (manifest := read_manifest(store, name)) is not None]
    return [manifest for manifest in read if manifest.source is None]


def data_in(store: Store) -> list[str]:
    """Return the sorted names of the data sets of a store, without what others put beside them."""
    data = f"{store.prefix}/data"
    return [name for name in store.list(data) if is_digest(name) and _is_data(store, name)]


def _is_data(store: Store, name: str) -> bool:
    """Return whether a folder has something of a data set, or nothing; others use digests, too."""
    try:
        there = store.list(store.data_path(name))
    except StoreError as error:
        if isinstance(error.__cause__, NotADirectoryError):
            return False
        raise
    return not there or any(
        each in (MANIFEST_NAME, CLAIMS) or _ATTEMPT.fullmatch(each) for each in there
    )


def forget_prepared(store: Store, fingerprint: str) -> None:
    """Delete a data set, and nothing that others left in its folder.

    The manifest goes first, so that an end in the middle leaves nothing that looks whole.

    Raises:
        StoreError: it can't be deleted.
    """
    folder = store.data_path(fingerprint)
    store.delete_one(f"{folder}/{MANIFEST_NAME}")
    for name in store.list(folder):
        if _ATTEMPT.fullmatch(name):
            store.delete(f"{folder}/{name}")
    forget_claims(store, folder)
    store.delete_unfinished(folder)
    store.delete_one(folder)


def prepare_once(store: Store, fingerprint: str, prepare: Callable[[str], Manifest]) -> Manifest:
    """Return `find_prepared`; if there is none, prepare it, or wait for the program that does.

    Args:
        store: where to.
        fingerprint: of the data set.
        prepare: writes its files below a folder of the data set's folder, whose name it is given,
            and returns their manifest. No other program writes there.

    Raises:
        StoreError: the store can't be written, or holds files that contradict their manifest.
    """
    folder = store.data_path(fingerprint)
    claims = Claims(store, folder, CLAIM_SECONDS)
    while True:
        found = find_prepared(store, fingerprint)
        if found is not None:
            return found
        path = claims.take()
        if path is not None:
            break
    attempt = f"attempt-{uuid.uuid4().hex[:12]}"
    try:
        with claims.renewed(path):
            # Whoever had the claim before may have finished since the look above.
            found = find_prepared(store, fingerprint) or finish(store, prepare(attempt))
    except BaseException as error:
        with suppress(StoreError):
            store.delete(f"{folder}/{attempt}")
        # Held up for long, this program may have lost its claim, and its files to the winner.
        found = find_prepared(store, fingerprint) if isinstance(error, Exception) else None
        if found is None:
            raise
    _clear_leftovers(store, found)
    return found


def finish(store: Store, manifest: Manifest) -> Manifest:
    """Check what was written and create the manifest, which makes the data visible.

    Returns:
        the manifest of the store: that of another program, if it created one meanwhile.

    Raises:
        StoreError: the files do not hold the rows of the manifest.
    """
    folder = store.data_path(manifest.fingerprint)
    check_files(manifest, store)
    try:
        store.create(f"{folder}/{MANIFEST_NAME}", encode_document(manifest.to_json()))
    except StoreError:
        found = find_prepared(store, manifest.fingerprint)
        if found is None:
            raise
        return found
    return manifest


def _clear_leftovers(store: Store, manifest: Manifest) -> None:
    """Delete claims, and the folders of attempts that are not the manifest's.

    No other manifest can be created any more, so nobody's work is lost.
    """
    folder = store.data_path(manifest.fingerprint)
    kept = {info.path.partition("/")[0] for info in manifest.partitions}
    with suppress(StoreError):
        forget_claims(store, folder)
    for name in store.list(folder):
        if _ATTEMPT.fullmatch(name) and name not in kept:
            with suppress(StoreError):
                store.delete(f"{folder}/{name}")


def choose_prepared(
    store: Store, num_partitions: int, spec: DataSpec, given: Manifest | str | None
) -> Manifest:
    """Return the prepared data of a store that fits a search: the given one, or the only one.

    Args:
        given: a manifest, or the name of one: its fingerprint.

    Raises:
        ConfigurationError: none fits, or several do; lists what there is.
        StoreError: the files are not those of the manifest.
    """
    if given is None:
        found = prepared_in(store)
    else:
        name = given if isinstance(given, str) else given.fingerprint
        manifest = read_manifest(store, name)
        found = [] if manifest is None else [manifest]
    problems = {each.fingerprint: _problem(each, num_partitions, spec) for each in found}
    fitting = [each for each in found if problems[each.fingerprint] is None]
    if len(fitting) == 1:
        check_files(fitting[0], store)
        return fitting[0]
    if fitting:
        raise ConfigurationError(
            f"the store {store.prefix!r} holds {len(fitting)} prepared data sets with these "
            "columns; give one by its name, as "
            f"search.fit_on_prepared_data({fitting[0].fingerprint!r}):\n"
            + "\n".join(f"  {each.fingerprint}: {description(store, each)}" for each in fitting)
        )
    reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    raise ConfigurationError(
        f"the store {store.prefix!r} holds no prepared data for this search "
        f"({reasons or 'it holds none'}); prepare it with backend.prepare_data, with these "
        "columns, or use fit"
    )


def description(store: Store, manifest: Manifest) -> str:
    """Return the columns, rows and date of a data set, for people to tell it from others."""
    columns = ", ".join(f"{each.name} {_type(each)}" for each in manifest.columns)
    rows = {split: 0 for split in ("train", "val")}
    for info in manifest.partitions:
        rows[info.split] += info.rows
    validation = f" and {rows['val']} validation" if manifest.has_validation else ""
    modified = store.usage(f"{store.data_path(manifest.fingerprint)}/{MANIFEST_NAME}").modified
    written = "" if modified is None else f", of {datetime.fromtimestamp(modified):%Y-%m-%d %H:%M}"
    return (
        f"{rows['train']} training{validation} rows in {manifest.num_partitions} partitions"
        f"{written}; {columns}"
    )


def _type(column: ColumnSpec) -> str:
    return f"{column.dtype}{list(column.shape)}" if column.shape else column.dtype


def _problem(manifest: Manifest, num_partitions: int, spec: DataSpec) -> str | None:
    """Say why prepared data does not fit a search, or None."""
    there = [column.name for column in manifest.columns]
    missing = [name for name in spec.columns if name not in there]
    if missing:
        return f"it has no column {missing[0]!r}, its columns are {there}"
    if manifest.num_partitions != num_partitions:
        return f"it has {manifest.num_partitions} partitions for {num_partitions} workers"
    if manifest.has_validation != (spec.validation is not None):
        return f"it has {'' if manifest.has_validation else 'no '}validation rows"
    return None


def footers(store: Store, folder: str) -> list[FileMetaData]:
    """Return the footers of a partition's Parquet files in a store.

    Raises:
        DataError: there is no file, or one can't be read.
    """
    paths = [f"{folder}/{name}" for name in store.list(folder) if name.endswith(".parquet")]
    if not paths:
        raise DataError(f"there are no Parquet files in {folder!r}")
    found = []
    for path in paths:
        with store.open(path) as file:
            found.append(metadata_of(path, file))
    return found


def read_manifest(store: Store, fingerprint: str) -> Manifest | None:
    """Return the manifest of a data set, without a look at its files; None if there is none.

    Raises:
        StoreError: it is damaged, that of other data, or another version wrote it.
    """
    folder = store.data_path(fingerprint)
    path = f"{folder}/{MANIFEST_NAME}"
    if not store.exists(path):
        return None
    try:
        manifest = Manifest.from_json(decode_document(path, store.read(path)))
    except StoreError as error:
        named = str(error) if path in str(error) else f"{path!r}: {error}"
        raise StoreError(f"{named}; or delete {folder!r} and prepare again") from error
    if manifest.fingerprint != fingerprint:
        raise StoreError(
            f"{path!r} describes the data {manifest.fingerprint!r}: delete {folder!r} and prepare "
            "the data again"
        )
    return manifest


def check_files(manifest: Manifest, store: Store) -> None:
    """Compare a data set's files with its manifest, by their footers.

    Raises:
        StoreError: a file is not as the manifest says.
    """
    folder = store.data_path(manifest.fingerprint)
    if manifest.source is not None:
        for file in manifest.source.files:
            try:
                check_file(os.path.normpath(os.path.join(folder, file.path)), file)
            except DataError as error:
                raise StoreError(
                    f"{error}; restore it, or start a new run on the files as they are now"
                ) from error
        return
    try:
        for info in manifest.partitions:
            path = os.path.join(folder, info.path)
            rows = sum(footer.num_rows for footer in footers(store, path))
            if rows != info.rows:
                raise DataError(f"{path!r} holds {rows} rows, the manifest says {info.rows}")
    except DataError as error:
        raise StoreError(
            f"prepared data doesn't match its manifest: {error}; delete {folder!r} and prepare the "
            "data again"
        ) from error


Range = tuple[float, float]


def value_ranges(manifest: Manifest, store: Store) -> dict[str, Range]:
    """Return the range of each column over all partitions.

    Columns of which a footer tells nothing are left out.

    Raises:
        DataError: a file can't be read.
    """
    data_path = store.data_path(manifest.fingerprint)
    if manifest.source is not None:
        own = {spec.name: spec.name for spec in manifest.columns}
        files = (os.path.join(data_path, file.path) for file in manifest.source.files)
        return footer_ranges(map(metadata_of, files), own)
    names = {stored_name(i): spec.name for i, spec in enumerate(manifest.columns)}
    folders = (f"{data_path}/{info.path}" for info in manifest.partitions)
    return footer_ranges((one for folder in folders for one in footers(store, folder)), names)


def footer_ranges(metadata: Iterable[FileMetaData], names: Mapping[str, str]) -> dict[str, Range]:
    """Return the range of each column over all files.

    Columns without statistics everywhere are left out, and so are Spark ML vectors.

    Args:
        metadata: the footers of the files.
        names: the name of a column in the answer, by its name in the files.
    """
    found: dict[str, Range] = {}
    untold: set[str] = set()
    for footer in metadata:
        chunks = _chunks(footer, names)
        for group in map(footer.row_group, range(footer.num_row_groups)):
            for number, name in chunks.items():
                statistics = group.column(number).statistics
                if not group.num_rows:
                    continue
                if statistics is None or not statistics.has_min_max:
                    untold.add(name)
                elif isinstance(statistics.min, int | float):
                    low, high = found.get(name, (statistics.min, statistics.max))
                    found[name] = (min(low, statistics.min), max(high, statistics.max))
    return {name: each for name, each in found.items() if name not in untold}


def _chunks(footer: FileMetaData, names: Mapping[str, str]) -> dict[int, str]:
    """Return which of a row group's chunks hold numbers of which column.

    A list's chunk is called "x.list.element", and a column may have the name "x.y".
    """
    fields = {field.name: field.type for field in footer.schema.to_arrow_schema()}
    found = {}
    for number in range(footer.num_columns):
        parts = footer.schema.column(number).path.split(".")
        prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        owner = next((prefix for prefix in prefixes if prefix in fields), "")
        # A vector's chunks hold its kind, size and places too, and leave zeros out.
        if owner in names and not is_vector(fields[owner]):
            found[number] = names[owner]
    return found
