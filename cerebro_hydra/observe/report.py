"""Renders `report.html`, one page that needs only a browser, from the run's folder alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, Template

from cerebro_hydra import __version__
from cerebro_hydra.documents import consistent
from cerebro_hydra.errors import JournalError
from cerebro_hydra.observe.records import Record, RunEnded
from cerebro_hydra.observe.text import differing, duration, metric_title, not_saved, number, utf8
from cerebro_hydra.observe.timeline import HopBar, TaskBar, Timeline, read_run
from cerebro_hydra.observe.totals import human_bytes
from cerebro_hydra.observe.view import RunView, TrialView
from cerebro_hydra.storage.run_folder import RunFolder

REPORT_FILE = "report.html"

COLOURS = 8
"""Trials that get a colour of their own, best first; the others are grey until pointed at."""


class ReportWriter:
    """Writes the report when a run is over, however it ended; an observer.

    `path` is where the report lies, once it is written.
    """

    def __init__(self, folder: RunFolder) -> None:
        """Write nothing yet; the report will lie in this folder."""
        self._folder = folder
        self.path: str | None = None

    def on_record(self, record: Record) -> None:
        """Write the report when the run has ended; all it shows is read from the folder."""
        if isinstance(record, RunEnded):
            self.path = self._folder.write_file(REPORT_FILE, render(self._folder).encode())


def render(folder: RunFolder) -> str:
    """Return the page of a run, with "?" for what UTF-8 can't hold.

    Raises:
        StoreError: there is no run document.
        JournalError: the journal is damaged.
    """
    with consistent(f"the journal of run {folder.path!r}", JournalError):
        content = _content(*read_run(folder))
    return utf8(page().render(**content, version=__version__))


def page() -> Template:
    """Return the template of the page; the package may lie in a zip, as Spark ships it."""
    environment = Environment(
        loader=PackageLoader("cerebro_hydra.observe", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": human_bytes, "duration": duration, "number": number}
    return environment.get_template("page.html.j2")


def _content(view: RunView, timeline: Timeline) -> dict[str, Any]:
    ranked = view.best_first()
    colours = {trial.trial: place for place, trial in enumerate(ranked[:COLOURS])}
    rows = [_row(trial, colours.get(trial.trial, -1)) for trial in ranked]
    winner = view.winner
    begun = None
    if timeline.begin is not None:
        begun = f"{datetime.fromtimestamp(timeline.begin, UTC):%Y-%m-%d %H:%M} UTC"
    span = max(timeline.end, 1e-9) * max(len(timeline.workers), 1)
    return {
        "view": view,
        "document": view.document,
        "timeline": timeline,
        "rows": rows,
        "names": list(dict.fromkeys(name for row in rows for name in row["params"])),
        "measured": list(view.measured()),
        "metric_title": metric_title(view),
        "winner": winner,
        "troubles": [*not_saved(view), *map(differing, view.differences)],
        "winner_params": _texts(winner.params) if winner else {},
        "begun": begun,
        "busy": sum(bar.seconds for bar in timeline.tasks) / span,
        "hops": [
            {"trial": view.trials[bar.task.trial].trial_id, "to": bar.task.worker, "bar": bar.hop}
            for bar in timeline.tasks
            if bar.hop is not None and bar.hop.source is not None
        ],
        "data": _data(view, timeline, colours),
    }


def _row(trial: TrialView, colour: int) -> dict[str, Any]:
    return {
        "id": trial.trial_id,
        "params": _texts(trial.params),
        "status": "stopped early" if trial.stopped_early else trial.status,
        "error": trial.reason,
        "uncut_because": trial.uncut_because,
        "epochs": len(trial.epochs),
        "result_epoch": None if trial.result_epoch is None else trial.result_epoch + 1,
        "seconds": trial.seconds,
        "metrics": trial.result_metrics,
        "colour": colour,
    }


def _data(view: RunView, timeline: Timeline, colours: Mapping[int, int]) -> str:
    """Return what the page's script draws, as JSON that can stand in a `script` element."""
    places = {number: place for place, number in enumerate(view.trials)}
    content = {
        "metric": view.metric,
        "direction": view.direction,
        "measured": list(view.measured()),
        "seconds": timeline.end,
        "trials": [
            {
                "id": trial.trial_id,
                "colour": colours.get(trial.trial, -1),
                "history": {
                    name: [_finite(value) for value in values]
                    for name, values in trial.history.items()
                },
                "result": trial.result_epoch,
            }
            for trial in view.trials.values()
        ],
        "workers": [
            {"worker": worker, "partitions": partitions}
            for worker, partitions in sorted(timeline.workers.items())
        ],
        "tasks": [_task(bar, places[bar.task.trial]) for bar in timeline.tasks],
        "absences": [
            asdict(absence) | {"end": timeline.end if absence.end is None else absence.end}
            for absence in timeline.absences
        ],
    }
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    # The only characters with which text could leave a script element, or begin a comment in it.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _task(bar: TaskBar, place: int) -> dict[str, Any]:
    """Return one bar; `place` is that of its trial in the list of trials."""
    return {
        "kind": bar.kind,
        "worker": bar.task.worker,
        "trial": place,
        "epoch": bar.task.epoch,
        "partition": bar.task.partition,
        "assigned": bar.assigned,
        "start": bar.start,
        "end": bar.end,
        "outcome": bar.outcome,
        "loss": None if bar.loss is None else _finite(bar.loss),
        "hop": None if bar.hop is None else _hop(bar.hop),
    }


def _hop(hop: HopBar) -> dict[str, Any]:
    return {
        "source": hop.source,
        "start": hop.start,
        "end": hop.end,
        "moved": human_bytes(hop.bytes_moved),
        "saved": human_bytes(hop.bytes_saved),
        "lane": hop.lane,
    }


def _finite(value: float) -> float | str:
    """Return a number, or its name where JSON has no number for it (NaN, infinities)."""
    return value if math.isfinite(value) else str(value)


def _texts(params: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in params.items()
    }
