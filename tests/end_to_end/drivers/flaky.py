"""A store that refuses whatever a run writes while a file says so, and a factory that brings it."""

from __future__ import annotations

import os
from typing import Any

from cerebro_hydra.errors import StoreError
from cerebro_hydra.storage import LocalStore
from tests.end_to_end import models

MARKER = "refuse"


class FlakyStore(LocalStore):
    """Refuses writes below `runs` while there is a file named MARKER in it."""

    def write(self, path: str, data: Any) -> None:
        self._check(path)
        super().write(path, data)

    def create(self, path: str, data: Any) -> None:
        self._check(path)
        super().create(path, data)

    def _check(self, path: str) -> None:
        if os.path.exists(f"{self.prefix}/{MARKER}"):
            raise StoreError(f"can't write {path!r}: the disk is full; free space")


def feed_forward(params: dict[str, Any]) -> Any:
    """Return the recipe of `models`; agents that unpickle this function know the store."""
    return models.feed_forward(params)
