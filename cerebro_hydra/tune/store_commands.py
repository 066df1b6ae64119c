"""Carries out `cerebro-hydra runs` and `cerebro-hydra clean`: what they print and ask."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cerebro_hydra.observe.text import duration
from cerebro_hydra.observe.totals import human_bytes
from cerebro_hydra.storage import Store
from cerebro_hydra.tune.cleaning import cleanings
from cerebro_hydra.tune.store_contents import StoreContents

_DAY = 86400


def print_contents(console: Console, prefix: str) -> None:
    """Print the runs and the data of a store, with what each takes.

    Raises:
        StoreError: there is no store.
    """
    contents, now = StoreContents.of(Store.at(prefix)), time.time()
    runs = _table("run", "status", "age", "size", "finished", "winner")
    for run in contents.runs:
        age, size = _age(run.modified, now), human_bytes(run.bytes)
        runs.add_row(*map(Text, (run.run_id, run.status, age, size, run.trials, run.winner)))
    console.print(runs if runs.row_count else "no runs")
    console.print("[bold]data[/]" if contents.data else "no data")
    for each in contents.data:
        count = f"{len(each.needed_by)} run{'' if len(each.needed_by) == 1 else 's'}"
        age, size = _age(each.modified, now), human_bytes(each.bytes)
        console.print(Text(f"{each.fingerprint}  {age}, {size}, needed by {count}"), soft_wrap=True)
        console.print(Padding(Text(each.text), (0, 0, 0, 4)))


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
                say(f"{kind} {name} in {each.store.prefix}")
    count = sum(len(each.runs) + len(each.data) for each in chosen)
    size = human_bytes(sum(each.bytes for each in chosen))
    if not count:
        say("nothing to delete: kept runs need all data that is there")
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
