"""Says in a run's folder that a program works on the run, so that nobody deletes it meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cerebro_hydra.data.claim import CLAIM_SECONDS, CLAIMS, Claims
from cerebro_hydra.errors import StoreError
from cerebro_hydra.storage import RunFolder


@contextmanager
def run_claim(folder: RunFolder) -> Iterator[None]:
    """Claim a run while the body lasts; a store that takes no claim keeps no run from going on."""
    claims, path = Claims(folder.store, folder.path, CLAIM_SECONDS), None
    with suppress(StoreError):
        path = claims.take()
    if path is None:
        yield
        return
    try:
        with claims.renewed(path):
            yield
    finally:
        with suppress(StoreError):
            folder.store.delete(f"{folder.path}/{CLAIMS}")
