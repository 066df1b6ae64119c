"""Whether the driver and the executors see the same store: each writes, the others read."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress

from cerebro_hydra.errors import CerebroHydraError
from cerebro_hydra.storage import Store


class StoreProbe:
    """A folder in a store with a file of the driver and one of each worker; gone afterwards.

    Without a store nothing is probed. It travels to the workers.

    Raises:
        CerebroHydraError: on entering, if the driver itself can't write there.
    """

    def __init__(self, store: Store | None) -> None:
        self._description = None if store is None else store.to_dict()
        self._name = f"doctor-{uuid.uuid4().hex}"

    def __enter__(self) -> StoreProbe:
        if (store := self._store()) is not None:
            store.write(self._path(store, "driver"), self._name.encode())
        return self

    def __exit__(self, *_: object) -> None:
        if (store := self._store()) is not None:
            with suppress(CerebroHydraError):
                store.delete(store.run_path(self._name))

    def used_by(self, worker: int) -> str | None:
        """On a worker: read the driver's file and write one; the reason if that fails."""
        try:
            store = self._store()
            if store is not None:
                if store.read(self._path(store, "driver")) != self._name.encode():
                    return "it has other bytes than the driver wrote"
                store.write(self._path(store, f"worker-{worker}"), self._name.encode())
        except CerebroHydraError as error:
            return str(error)
        return None

    def unseen(self, workers: Iterable[int]) -> dict[int, str]:
        """On the driver: the reason for each worker whose file can't be read here."""
        reasons: dict[int, str] = {}
        store = self._store()
        if store is None:
            return reasons
        for worker in workers:
            try:
                if store.read(self._path(store, f"worker-{worker}")) != self._name.encode():
                    reasons[worker] = "the driver reads other bytes than the worker wrote"
            except CerebroHydraError as error:
                reasons[worker] = f"what the worker wrote is not seen by the driver: {error}"
        return reasons

    def _store(self) -> Store | None:
        return None if self._description is None else Store.from_dict(self._description)

    def _path(self, store: Store, name: str) -> str:
        return f"{store.run_path(self._name)}/{name}"
