"""Verifies a run with its data, or all that lies in a store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator

from cerebro_hydra.data.prepared import read_manifest
from cerebro_hydra.data.verify import check_partitions
from cerebro_hydra.errors import StoreError
from cerebro_hydra.storage import RunFolder, Store
from cerebro_hydra.verification.report import VerificationReport, VerifiedPart
from cerebro_hydra.verification.run import document_of, verify_run


def verify(
    path: str | os.PathLike[str], on_part: Callable[[VerifiedPart], object] | None = None
) -> VerificationReport:
    """Read every file of a run and its data, or of a whole store, and compare it with its digest.

    Nothing is trained, imported or written. Only `report.html`, which people read, has no digest.

    Args:
        path: `<store>/runs/<run id>`, or the folder of a store.
        on_part: is called with each part as soon as it was read.

    Raises:
        StoreError: there is neither a run nor a store at `path`.
    """
    found = []
    for part in _parts(os.fspath(path).rstrip("/")):
        found.append(part)
        if on_part is not None:
            on_part(part)
    return VerificationReport(tuple(found))


def _parts(path: str) -> Iterator[VerifiedPart]:
    if os.path.basename(os.path.dirname(path)) == "runs":
        folder = RunFolder.open(path)
        yield from verify_run(folder)
        if (document := document_of(folder)) is not None:
            yield from verify_data(folder.store, document.fingerprint)
        return
    store = Store.at(path)
    runs, data = (store.list(f"{store.prefix}/{name}") for name in ("runs", "data"))
    if not runs and not data:
        raise StoreError(
            f"{path!r} holds neither runs nor data: give a store's folder, or <store>/runs/<run id>"
        )
    for fingerprint in data:
        yield from verify_data(store, fingerprint)
    for run_id in runs:
        yield from verify_run(RunFolder(store, run_id))


def verify_data(store: Store, fingerprint: str) -> Iterator[VerifiedPart]:
    """Verify a data set: its manifest, then the rows of every partition."""
    name, folder = f"data {fingerprint}", store.data_path(fingerprint)
    try:
        manifest = read_manifest(store, fingerprint)
    except StoreError as error:
        yield VerifiedPart(f"{name}: manifest", problems=(str(error),))
        return
    if manifest is None and store.exists(folder):
        yield VerifiedPart(name, notes=("a preparation that did not end, for it has no manifest",))
    elif manifest is None:
        yield VerifiedPart(name, problems=(f"{folder!r} is gone: restore it from a copy",))
    else:
        yield VerifiedPart(f"{name}: manifest", f"{len(manifest.partitions)} partitions")
        with tempfile.TemporaryDirectory(prefix="cerebro-hydra-verify-") as scratch:
            for part in check_partitions(manifest, store, scratch):
                where = f"{name}: {part.split}/{part.index}"
                problems = () if part.problem is None else (part.problem,)
                yield VerifiedPart(where, f"{part.rows} rows", problems)
