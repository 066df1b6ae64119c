"""A store in which Cerebro's searches can also keep their TensorBoard logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cerebro_hydra import LocalStore


class HoppingStore(LocalStore):
    """Extends `LocalStore` with Cerebro's logs of a model in `<prefix>/logs/<its run id>`."""

    def to_dict(self) -> dict[str, str]:
        """Describe it as a `LocalStore`, because agents don't know this class."""
        return {**super().to_dict(), "type": LocalStore.__name__}

    def to_remote(self, run_id: str, dataset_idx: int | None) -> Logs:
        """Return the logs of one model; `dataset_idx` is Cerebro's and not used."""
        return Logs(Path(self.prefix, "logs", run_id))


class Logs:
    """Holds one model's logs in a folder."""

    def __init__(self, folder: Path) -> None:
        """Remember the folder, and create nothing yet."""
        self._folder = folder

    @contextmanager
    def get_local_output_dir(self) -> Iterator[str]:
        """Yield the folder itself: Cerebro calls `sync` when a temporary one would be gone."""
        self._folder.mkdir(parents=True, exist_ok=True)
        yield str(self._folder)

    def sync(self, local_output_dir: str) -> None:
        """Do nothing: the logs are where they belong."""
