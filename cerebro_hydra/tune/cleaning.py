"""Deletes runs and data from a store, never what a kept run needs."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from cerebro_hydra.data.manifest import MANIFEST_NAME
from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.storage import Store
from cerebro_hydra.storage.run_document import RUN_FILE
from cerebro_hydra.tune.store_contents import StoreContents


@dataclass(frozen=True)
class Cleaning:
    """Names what is to be deleted from one store."""

    store: Store
    runs: tuple[str, ...]
    data: tuple[str, ...]
    bytes: int

    @classmethod
    def of(cls, prefix: str, runs: Sequence[str], data: Sequence[str], unneeded: bool) -> Cleaning:
        """Choose runs and data by name, and if `unneeded` all data that no kept run needs.

        Raises:
            ConfigurationError: a named run goes on, or named data is needed or written.
            StoreError: there is no such store, run or data.
        """
        store = Store.at(prefix)
        contents = StoreContents.of(store)
        if not contents.runs and not contents.data:
            raise StoreError(f"{prefix!r} holds neither runs nor data; give a store's folder")
        known = {run.run_id: run for run in contents.runs}
        sets = {each.fingerprint: each for each in contents.data}
        for kind, names, there in (("run", runs, known), ("data", data, sets)):
            for name in names:
                if name not in there:
                    raise StoreError(
                        f"there is no {kind} {name!r} in {prefix!r}; there are {list(there)}"
                    )
        for name in runs:
            if known[name].status == "running":
                raise ConfigurationError(f"run {name!r} is running; stop it before you delete it")
        kept = [run for run in contents.runs if run.run_id not in runs]
        # A run without a readable document may need any data: one that begins has none yet.
        unknown = [run.run_id for run in kept if run.fingerprint is None and run.status != "failed"]
        for name in data:
            users = [run.run_id for run in kept if run.fingerprint == name]
            if users or unknown or sets[name].being_prepared:
                why = f"runs {users or unknown} {'need' if users else 'may need'} it"
                why = "it is being prepared" if sets[name].being_prepared else why
                raise ConfigurationError(
                    f"data {name!r} can't be deleted: {why}; name these runs too, if they may go"
                )
        chosen = set(data)
        if unneeded:
            needed = {run.fingerprint for run in kept}
            free = {n for n in sets if n not in needed and not sets[n].being_prepared}
            if free and unknown:
                raise ConfigurationError(
                    f"runs {unknown} may need any data of {prefix!r}, because they begin or can't "
                    "be read; wait, or name these runs too"
                )
            chosen |= free
        size = sum(known[n].bytes for n in set(runs)) + sum(sets[n].bytes for n in chosen)
        return cls(store, tuple(sorted(set(runs))), tuple(sorted(chosen)), size)

    def carry_out(self) -> None:
        """Delete it all, in an order in which an end in the middle leaves nothing half there.

        A run or data without its document is none any more; what is left of it can be deleted
        again. Data is looked at once more, because a run may have begun since.

        Raises:
            ConfigurationError: a run needs the data by now.
            StoreError: something can't be deleted.
        """
        for name in self.runs:
            self._delete(self.store.run_path(name), RUN_FILE)
        if self.data:
            Cleaning.of(self.store.prefix, (), self.data, unneeded=False)
        for name in self.data:
            self._delete(self.store.data_path(name), MANIFEST_NAME)

    def _delete(self, folder: str, document: str) -> None:
        self.store.delete(f"{folder}/{document}")
        self.store.delete(folder)


def cleanings(paths: Sequence[str]) -> list[Cleaning]:
    """Return what is to be deleted, a cleaning for each store.

    Args:
        paths: `<store>/runs/<run id>` and `<store>/data/<name>` name a run and data; a store's
            folder names all of its data that no kept run needs.

    Raises:
        ConfigurationError: something named can't go; nothing is deleted.
        StoreError: there is no such thing.
    """
    named: dict[str, tuple[list[str], list[str], list[str]]] = {}
    for path in paths:
        path = path.rstrip("/") if "://" in path else os.path.abspath(path)
        above, name = posixpath.split(path)
        prefix, kind = posixpath.split(above)
        place = {"runs": 0, "data": 1}.get(kind, 2)
        prefix = path if place == 2 else prefix
        named.setdefault(prefix, ([], [], []))[place].append(name)
    return [Cleaning.of(at, runs, data, bool(all_)) for at, (runs, data, all_) in named.items()]
