"""Says in a run's folder that a program works on the run: nobody else resumes or deletes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cerebro_hydra.data.claim import CLAIM_SECONDS, CLAIMS, Claims
from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.storage import RunFolder

_WAITING = "worked on the same run: looking for {:g} seconds at most whether it still does"


@contextmanager
def run_claim(folder: RunFolder) -> Iterator[None]:
    """Claim a run while the body lasts; a store that takes no claim keeps no run from going on.

    Raises:
        ConfigurationError: another program works on the run.
    """
    claims, path = Claims(folder.store, folder.path, CLAIM_SECONDS, _WAITING), None
    with suppress(StoreError):
        while (path := claims.take()) is None:
            if claims.living is not None:
                raise ConfigurationError(
                    f"{claims.living} works on the run {folder.path!r}; end it, or wait until it "
                    "has ended, before you resume the run"
                )
    if path is None:
        yield
        return
    try:
        with claims.renewed(path):
            yield
    finally:
        with suppress(StoreError):
            folder.store.delete(f"{folder.path}/{CLAIMS}")
