"""Carries out `cerebro-hydra runs` and `clean`: says what a store holds, deletes what may go."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cerebro_hydra.data.claim import is_claimed
from cerebro_hydra.data.preparation.prepared import (
    data_in,
    description,
    forget_prepared,
    read_manifest,
)
from cerebro_hydra.errors import CerebroHydraError, ConfigurationError, StoreError
from cerebro_hydra.foreign_text import visible
from cerebro_hydra.observe.text import duration, number
from cerebro_hydra.observe.view import RunView, human_bytes
from cerebro_hydra.storage import RunFolder, Store
from cerebro_hydra.storage.local_paths import path_or_url
from cerebro_hydra.storage.run_document import RUN_FILE
from cerebro_hydra.storage.run_folder import read_document, runs_in

_DAY = 86400


def print_contents(console: Console, prefix: str) -> None:
    """Print the runs and the data of a store, with what each takes.

    Raises:
        StoreError: there is no store, or nothing of one in that folder.
    """
    contents, now = StoreContents.of(Store.at(prefix)), time.time()
    runs = _table("run", "status", "age", "size", "finished", "winner")
    for run in contents.runs:
        age, size = _age(run.modified, now), human_bytes(run.bytes)
        name = visible(run.run_id)
        runs.add_row(*map(Text, (name, run.status, age, size, run.trials, run.winner)))
    console.print(runs if runs.row_count else "no runs")
    console.print("[bold]data[/]" if contents.data else "no data")
    for each in contents.data:
        count = f"{len(each.needed_by)} run{'' if len(each.needed_by) == 1 else 's'}"
        age, size = _age(each.modified, now), human_bytes(each.bytes)
        console.print(Text(f"{each.fingerprint}  {age}, {size}, needed by {count}"), soft_wrap=True)
        console.print(Padding(Text(each.text), (0, 0, 0, 4), expand=False))


def clean(
    paths: Sequence[str], say: Callable[[str], None], confirmed: Callable[[str], bool]
) -> bool:
    """Delete runs and data that are named, and return whether that was confirmed.

    Args:
        paths: see `cleanings`.
        say: is given what is freed, a line each.
        confirmed: asks whether to go on.

    Raises:
        ConfigurationError: something named can't go; nothing is deleted.
        StoreError: something is not there, or can't be deleted.
    """
    chosen = cleanings(paths)
    for each in chosen:
        for kind, names in (("run", each.runs), ("data", each.data)):
            for name in names:
                say(visible(f"{kind} {name} in {each.store.prefix}"))
        for name in each.unreadable:
            say(f"data {name} in {each.store.prefix} stays unless you name it: it can't be read")
    count = sum(len(each.runs) + len(each.data) for each in chosen)
    size = human_bytes(sum(each.bytes for each in chosen))
    if not count:
        unreadable = any(each.unreadable for each in chosen)
        say(f"nothing to delete: kept runs need all {'other ' * unreadable}data that is there")
        return True
    if not confirmed(f"delete {count} {'folder' if count == 1 else 'folders'}, {size}?"):
        say("nothing was deleted")
        return False
    for each in chosen:
        each.carry_out()
    say(f"freed {size}")
    return True


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        justify: JustifyMethod = "right" if heading == "size" else "left"
        named = heading == headings[0]  # so that a name can be copied, however narrow the window is
        table.add_column(heading, overflow="fold", justify=justify, no_wrap=named)
    return table


def _age(modified: float | None, now: float) -> str:
    if modified is None:
        return ""
    seconds = max(0.0, now - modified)
    return f"{int(seconds // _DAY)} d" if seconds >= _DAY else duration(seconds)


@dataclass(frozen=True)
class StoredRun:
    """Describes a run in a store.

    `status` is "running", "finished", "interrupted", "failed", or "unreadable".
    """

    run_id: str
    path: str
    status: str
    bytes: int
    modified: float | None
    """When its latest file was written, in seconds since 1970."""
    trials: str = ""
    winner: str = ""
    fingerprint: str | None = None
    """The data that it needs; None if that can't be read."""


@dataclass(frozen=True)
class StoredData:
    """Describes a data set in a store; `being_prepared` while a program writes it."""

    fingerprint: str
    path: str
    text: str
    bytes: int
    modified: float | None
    needed_by: tuple[str, ...]
    """The ids of the runs that were trained on it."""
    being_prepared: bool
    readable: bool


@dataclass(frozen=True)
class StoreContents:
    """Holds everything in a store, each sorted by name; the names of runs begin with their time."""

    runs: tuple[StoredRun, ...]
    data: tuple[StoredData, ...]

    @classmethod
    def of(cls, store: Store) -> StoreContents:
        """Read a store; what can't be read is listed as such.

        Raises:
            StoreError: there is nothing of a store in that folder.
        """
        runs, data = tuple(_run(store, name) for name in runs_in(store)), data_in(store)
        if not runs and not data:
            raise StoreError(f"{store.prefix!r} holds neither runs nor data; give a store's folder")
        return cls(runs, tuple(_data(store, fingerprint, runs) for fingerprint in data))


def _run(store: Store, name: str) -> StoredRun:
    path = f"{store.prefix}/runs/{name}"
    named, usage = (name, path), store.usage(path)
    try:
        folder = RunFolder(store, name)
        claimed, there = is_claimed(store, path), store.list(path)
    except StoreError:  # somebody renamed it, or it is no folder
        return StoredRun(*named, "unreadable", *usage)
    try:
        fingerprint = read_document(folder).fingerprint
    except CerebroHydraError:
        # Trials are admitted before the run has a document, and nothing is decided before that.
        began = RUN_FILE in there or folder.journal_end()[1] > 0
        status = "running" if claimed else "unreadable" if began else "failed"
        return StoredRun(*named, status, *usage)
    try:
        view = RunView.of_run(folder)
    except CerebroHydraError:
        return StoredRun(*named, "unreadable", *usage, fingerprint=fingerprint)
    finished = view.finished
    if claimed:
        status = "running"
    elif not all(trial.over for trial in view.trials.values()):
        status = "interrupted"
    else:
        status = "finished" if finished else "failed"
    best = view.winner
    winner = "" if best is None else f"{best.trial_id}, {view.metric} {number(view.score(best))}"
    return StoredRun(
        *named, status, *usage, f"{finished} of {len(view.trials)}", winner, fingerprint
    )


def _data(store: Store, fingerprint: str, runs: tuple[StoredRun, ...]) -> StoredData:
    path = store.data_path(fingerprint)
    text, being_prepared, readable = "can't be read", False, True
    try:
        manifest = read_manifest(store, fingerprint)
    except StoreError:
        readable = False
    else:
        if manifest is None:
            being_prepared = is_claimed(store, path)
            text = "is being prepared" if being_prepared else "its preparation did not end"
        else:
            text = description(store, manifest)
    needed_by = tuple(run.run_id for run in runs if run.fingerprint == fingerprint)
    usage = store.usage(path)
    return StoredData(fingerprint, path, text, *usage, needed_by, being_prepared, readable)


@dataclass(frozen=True)
class Cleaning:
    """Names what is to be deleted from one store."""

    store: Store
    runs: tuple[str, ...]
    data: tuple[str, ...]
    unreadable: tuple[str, ...]
    """The names of data that may go, and stays, because it may be that of another program."""
    bytes: int

    @classmethod
    def of(cls, prefix: str, runs: Sequence[str], data: Sequence[str], unneeded: bool) -> Cleaning:
        """Choose runs and data by name, and if `unneeded` all data that no kept run needs.

        What can't be read may be of another program, and has to be named.

        Raises:
            ConfigurationError: a named run goes on, or named data is needed or written.
            StoreError: there is no such store, run or data.
        """
        store = Store.at(prefix)
        contents = StoreContents.of(store)
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
        chosen, unreadable = set(data), set[str]()
        if unneeded:
            needed = {run.fingerprint for run in kept}
            free = {n for n in sets if n not in needed and not sets[n].being_prepared}
            if free and unknown:
                raise ConfigurationError(
                    f"runs {unknown} may need any data of {prefix!r}, because they begin or can't "
                    "be read; wait, or name these runs too"
                )
            unreadable = {name for name in free - chosen if not sets[name].readable}
            chosen |= free - unreadable
        size = sum(known[n].bytes for n in set(runs)) + sum(sets[n].bytes for n in chosen)
        stays = tuple(sorted(unreadable))
        return cls(store, tuple(sorted(set(runs))), tuple(sorted(chosen)), stays, size)

    def carry_out(self) -> None:
        """Delete it all, in an order in which an end in the middle leaves nothing half there.

        A run or data without its document is none any more; what is left of it can be deleted
        again. Data is looked at once more, because a run may have begun since.

        Raises:
            ConfigurationError: a run needs the data by now.
            StoreError: something can't be deleted.
        """
        for name in self.runs:
            path = f"{self.store.prefix}/runs/{name}"
            if self.store.exists(f"{path}/{RUN_FILE}"):
                self.store.delete(f"{path}/{RUN_FILE}")
            self.store.delete(path)
        if self.data:
            Cleaning.of(self.store.prefix, (), self.data, unneeded=False)
        for name in self.data:
            forget_prepared(self.store, name)


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
        path = path_or_url("path", path)
        above, name = posixpath.split(path)
        prefix, kind = posixpath.split(above)
        place = {"runs": 0, "data": 1}.get(kind, 2)
        prefix = path if place == 2 else prefix
        named.setdefault(prefix, ([], [], []))[place].append(name)
    return [Cleaning.of(at, runs, data, bool(all_)) for at, (runs, data, all_) in named.items()]
