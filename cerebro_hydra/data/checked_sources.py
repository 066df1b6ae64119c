"""Remembers which prepared data the rows of files became, so that they need not be read again.

```
sources/<digest of query, files, arguments>.json    the fingerprint of the data, and when
```

The names, sizes and times of files stand for what is in them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cerebro_hydra.data.data_spec import DataSpec
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.data.prepared import digest_of, find_prepared
from cerebro_hydra.documents import decode
from cerebro_hydra.errors import StoreError
from cerebro_hydra.storage import Store
from cerebro_hydra.storage.digested_json import decode_document, encode_document
from cerebro_hydra.storage.names import Digest

_SOURCES = "sources"
_SETTLED_SECONDS = 2.0  # a file that is younger may change without its time

File = tuple[str, int, int]
"""URL, bytes, and time of the last change in nanoseconds."""


@dataclass(frozen=True)
class _Checked:
    fingerprint: Digest
    at: float


class CheckedSource:
    """Names a preparation by all that decides its rows.

    Args:
        store: of the prepared data.
        query: the text of the query.
        files: those that it reads.
        num_partitions: of the data.
        spec: of the data.
    """

    def __init__(
        self,
        store: Store,
        query: str,
        files: tuple[File, ...],
        num_partitions: int,
        spec: DataSpec,
    ) -> None:
        """Look at nothing yet."""
        name = digest_of(
            query=query,
            files=files,
            num_partitions=num_partitions,
            columns=spec.columns,
            validation=spec.validation,
            seed=spec.seed,
        )
        self._store, self._path = store, f"{store.prefix}/{_SOURCES}/{name}.json"
        self._settled = time.time() - max(time for *_, time in files) / 1e9 > _SETTLED_SECONDS

    def find(self) -> tuple[Manifest, str] | None:
        """Return the data that these files became, and when they were read; None if unknown."""
        if not self._store.exists(self._path):
            return None
        try:
            document: Any = decode_document(self._path, self._store.read(self._path))
            checked = decode(_Checked, document, "the note of what files became")
        except StoreError:
            return None  # whoever reads the rows writes another
        manifest = find_prepared(self._store, checked.fingerprint)
        if manifest is None:
            return None
        return manifest, f"{datetime.fromtimestamp(checked.at):%Y-%m-%d %H:%M}"

    def remember(self, manifest: Manifest) -> None:
        """Note what the files became, if none of them is so new that it may still be written."""
        if self._settled:
            document = {"fingerprint": manifest.fingerprint, "at": time.time()}
            self._store.write(self._path, encode_document(document))
