"""Checks whether driver and executors see the same store: each writes, the others read."""

from __future__ import annotations

import uuid
from contextlib import suppress

from cerebro_hydra.errors import CerebroHydraError
from cerebro_hydra.storage import Store


class StoreProbe:
    """Has in a store, until its end, a folder with a file of the driver and one of each worker.

    It travels to the workers.

    Raises:
        CerebroHydraError: on entering, if the driver itself can't write there.
    """

    def __init__(self, store: Store) -> None:
        self._description = store.to_dict()
        self._name = f"doctor-{uuid.uuid4().hex}"

    def __enter__(self) -> StoreProbe:
        self._write("driver")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(CerebroHydraError):
            store = Store.from_dict(self._description)
            store.delete(store.run_path(self._name))

    def used_by(self, worker: int) -> str | None:
        """Read the driver's file and write one, on a worker; return the reason if that fails."""
        try:
            if not self._reads("driver"):
                return "it has other bytes than the driver wrote"
            self._write(f"worker-{worker}")
        except CerebroHydraError as error:
            return str(error)
        return None

    def unseen(self, worker: int) -> str | None:
        """Read a worker's file, on the driver; return the reason if that fails."""
        try:
            same = self._reads(f"worker-{worker}")
        except CerebroHydraError as error:
            return f"what the worker wrote is not seen by the driver: {error}"
        return None if same else "the driver reads other bytes than the worker wrote"

    def _write(self, name: str) -> None:
        store = Store.from_dict(self._description)
        store.write(f"{store.run_path(self._name)}/{name}", self._name.encode())

    def _reads(self, name: str) -> bool:
        store = Store.from_dict(self._description)
        return store.read(f"{store.run_path(self._name)}/{name}") == self._name.encode()
