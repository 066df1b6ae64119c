"""A store of ours that Cerebro's searches can also keep their TensorBoard logs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cerebro_hydra import LocalStore


class HoppingStore(LocalStore):
    """A `LocalStore`; what Cerebro logs of a model appears in `<prefix>/logs/<its run id>`."""

    def to_dict(self) -> dict[str, str]:
        """Agents, which don't know this class, open it as what it is to them."""
        return {**super().to_dict(), "type": LocalStore.__name__}

    def to_remote(self, run_id: str, dataset_idx: int | None) -> Logs:
        """Where one model's logs go; `dataset_idx` is Cerebro's and not used."""
        return Logs(Path(self.prefix, "logs", run_id))


class Logs:
    """One model's logs."""

    def __init__(self, folder: Path) -> None:
        """Create nothing yet."""
        self._folder = folder

    @contextmanager
    def get_local_output_dir(self) -> Iterator[str]:
        """The folder itself: Cerebro calls `sync` only when a temporary one would be gone."""
        self._folder.mkdir(parents=True, exist_ok=True)
        yield str(self._folder)

    def sync(self, local_output_dir: str) -> None:
        """Nothing to do: what was written is where it belongs."""
