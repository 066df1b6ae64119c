"""Renders `report.html`, one page that needs only a browser, from the run's folder alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, Template

from cerebro_hydra import __version__
from cerebro_hydra.data.claim import is_claimed
from cerebro_hydra.documents import consistent
from cerebro_hydra.errors import JournalError
from cerebro_hydra.foreign_text import visible
from cerebro_hydra.observe.importance import Importance, importance_of
from cerebro_hydra.observe.planned import PlannedRun, compared
from cerebro_hydra.observe.records import Record, RunEnded
from cerebro_hydra.observe.text import (
    counted,
    differing,
    duration,
    metric_title,
    not_saved,
    number,
    saved_work,
    utf8,
    without_addresses,
)
from cerebro_hydra.observe.timeline import DeviceLane, HopBar, TaskBar, Timeline, fold, read_run
from cerebro_hydra.observe.view import RunView, TrialView, human_bytes
from cerebro_hydra.plan.messages.device_work import Span
from cerebro_hydra.storage.run_folder import RunFolder

REPORT_FILE = "report.html"

COLOURS = 8
"""Trials that get a colour of their own, best first; the others are grey until pointed at."""

_SHORT_RUN = 60.0  # seconds, to which telling what matters would add several

_MOST_MODELS = 4
"""Sizes of models that are told each; of more only the smallest and the largest."""


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


def is_running(folder: RunFolder) -> bool:
    """Return whether a program works on a run now."""
    return is_claimed(folder.store, folder.path)


def render(folder: RunFolder, running: bool = False, importance: bool = False) -> str:
    """Return the page of a run, with "?" for what UTF-8 can't hold.

    The page of a run that goes on (`running`) asks the server for a newer one, if it came from one.
    How much each parameter matters, which takes seconds, is told of a run that is over and took a
    minute, and of every one with `importance`.

    Raises:
        StoreError: there is no run document.
        JournalError: the journal is damaged.
    """
    with consistent(f"the journal of run {folder.path!r}", JournalError):
        view, timeline = read_run(folder, running)
        content = _content(view, timeline, running)
        content["importance"] = _importance(view, running, importance)
        if (plan := PlannedRun.read(folder)) is not None:
            content["plan"] = plan
            content["plan_rows"] = compared(plan, timeline, _colours(view))
    return utf8(page().render(**content, version=__version__))


def render_records(records: Iterable[Record], planned: str) -> str:
    """Return the page of a run that was only simulated, with its plan as text."""
    view, timeline = fold(records)
    content = _content(view, timeline, running=False)
    content["importance"] = Importance("Nothing was trained.")
    return utf8(page().render(**content, planned=planned, version=__version__))


def page() -> Template:
    """Return the template of the page; the package may lie in a zip, as Spark ships it."""
    environment = Environment(
        loader=PackageLoader("cerebro_hydra.observe", "page"),
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": human_bytes, "duration": duration, "number": number}
    return environment.get_template("page.html.j2")


def _content(view: RunView, timeline: Timeline, running: bool) -> dict[str, Any]:
    ranked, colours = view.best_first(), _colours(view)
    rows = [_row(trial, colours.get(trial.trial, -1)) for trial in ranked]
    winner, leader = view.winner, view.leader
    begun = None
    if timeline.begin is not None:
        begun = f"{datetime.fromtimestamp(timeline.begin, UTC):%Y-%m-%d %H:%M} UTC"
    return {
        "view": view,
        "document": view.document,
        "timeline": timeline,
        "running": running,
        "counted": counted(view),
        "saved": saved_work(view),
        "rows": rows,
        "reasons": _reasons(rows),
        "num_rows": _num_rows(view),
        "models": _models(view),
        "names": list(dict.fromkeys(name for row in rows for name in row["params"])),
        "measured": list(view.measured()),
        "metric_title": metric_title(view),
        "winner": winner,
        "troubles": [*not_saved(view), *map(differing, view.differences)],
        "leader": leader,
        "leader_params": _cells(leader.params) if leader else {},
        "begun": begun,
        "devices": sorted(
            (lane.totals for lane in timeline.lanes.values()), key=lambda each: each.worker
        ),
        "hops": [
            {"trial": view.trials[bar.task.trial].trial_id, "to": bar.task.worker, "bar": bar.hop}
            for bar in timeline.tasks
            if bar.hop is not None and bar.hop.source is not None
        ],
        "parallel": len(ranked) > COLOURS,
        "data": _data(view, timeline, colours, running),
    }


def _colours(view: RunView) -> dict[int, int]:
    """Return the colours of the trials that have one of their own, by number."""
    return {trial.trial: place for place, trial in enumerate(view.best_first()[:COLOURS])}


def _left_at(trial: TrialView, rung: int) -> str | None:
    """Say what became of a trial that did not go on from a rung; None if it did."""
    if rung != trial.rung or len(trial.epochs) > rung:
        return None
    reason = trial.reason.strip().partition("\n")[0]
    return f"{trial.status}: {reason}" if reason else trial.status


def _importance(view: RunView, running: bool, asked: bool) -> Importance:
    if running:
        return Importance("How much each parameter matters is told when the run is over.")
    return importance_of(view, asked or (view.seconds or 0.0) >= _SHORT_RUN)


def _row(trial: TrialView, colour: int) -> dict[str, Any]:
    return {
        "id": trial.trial_id,
        "params": _cells(trial.params),
        "status": trial.stage,
        "error": trial.reason.strip() or trial.extension_error.strip(),
        "uncut_because": trial.uncut_because,
        "recut": f"{trial.shards} shards instead of {trial.shards_before}"
        if trial.shards_before
        else "",
        "epochs": len(trial.epochs),
        "rung": trial.rung,
        "result_epoch": None if trial.result_epoch is None else trial.result_epoch + 1,
        "seconds": trial.seconds,
        "metrics": trial.result_metrics,
        "colour": colour,
    }


def _reasons(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return why trials ended as they did, once where it is the same; rows are given its number."""
    reasons = dict[tuple[str, ...], dict[str, Any]]()
    for row in rows:
        key = (
            row["status"], without_addresses(row["error"]), row["uncut_because"], row["recut"],
        )  # fmt: skip
        if any(key[1:]):
            reason = reasons.setdefault(key, {**row, "number": len(reasons), "ids": []})
            reason["ids"].append(row["id"])
            row["reason"] = reason["number"]
    return list(reasons.values())


def _num_rows(view: RunView) -> dict[str, int]:
    """Return the rows for training and for validation, once every partition was gone through."""
    splits = {"training": "train", "validation": "val"}
    partitions = range(view.document.num_partitions)
    return {
        words: sum(view.rows[split, partition] for partition in partitions)
        for words, split in splits.items()
        if all((split, partition) in view.rows for partition in partitions)
    }


def _models(view: RunView) -> list[str]:
    """Return how large the models are, and into how many shards they are cut; many in one line."""
    sizes = Counter((t.parameters, t.shards) for t in view.trials.values() if t.shards)
    if len(sizes) > _MOST_MODELS:
        parameters, shards = zip(*sizes, strict=True)
        return [
            f"{len(sizes)} sizes, from {min(parameters):,} to {max(parameters):,} parameters, in "
            f"{_shards(min(shards), max(shards))}"
        ]
    return [
        f"{size:,} parameters in {_shards(cut, cut)}"
        + ("" if len(sizes) == 1 else f" ({count} trial{'s' if count > 1 else ''})")
        for (size, cut), count in sorted(sizes.items())
    ]


def _shards(fewest: int, most: int) -> str:
    count = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return f"{count} shard{'s' if most > 1 else ''}"


def _data(view: RunView, timeline: Timeline, colours: Mapping[int, int], running: bool) -> str:
    """Return what the page's script draws, as JSON that can stand in a `script` element."""
    places = {number: place for place, number in enumerate(view.trials)}
    content = {
        "metric": view.metric,
        "direction": view.direction,
        "falling": [name for name in view.measured() if view.falls(name)],
        "measured": list(view.measured()),
        "seconds": timeline.end,
        "first_task": timeline.first_task,
        "running": running,
        "trials": [
            {
                "id": trial.trial_id,
                "params": {
                    name: value if _is_number(value) else cell["text"]
                    for (name, value), cell in zip(
                        trial.params.items(), _cells(trial.params).values(), strict=True
                    )
                },
                "score": None if score is None else _finite(score),
                "colour": colours.get(trial.trial, -1),
                "history": {
                    name: [_finite(value) for value in values]
                    for name, values in trial.history.items()
                },
                "result": trial.result_epoch,
                "rungs": [[rung, _left_at(trial, rung)] for rung in trial.rungs],
            }
            for trial in view.trials.values()
            for score in [view.score(trial)]
        ],
        "workers": [
            {"worker": worker, "partitions": partitions, "residents": timeline.residents[worker]}
            for worker, partitions in sorted(timeline.workers.items())
        ],
        "tasks": [_task(bar, places[bar.task.trial]) for bar in timeline.tasks],
        "devices": [_lane(lane, places) for lane in timeline.lanes.values()],
        "absences": [
            asdict(absence) | {"end": timeline.end if absence.end is None else absence.end}
            for absence in timeline.absences
        ],
    }
    text = json.dumps(_visible(content), allow_nan=False, separators=(",", ":"))
    # The only characters with which text could leave a script element, or begin a comment in it.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _visible(content: Any) -> Any:
    """Return JSON whose texts and names have no control characters."""
    match content:
        case str():
            return visible(content)
        case dict():
            return {visible(name): _visible(value) for name, value in content.items()}
        case list() | tuple():
            return [_visible(value) for value in content]
        case _:
            return content


def _lane(lane: DeviceLane, places: Mapping[int, int]) -> dict[str, Any]:
    """Return the spans of a device; `places` are those of trials in their list."""

    def drawn(spans: Sequence[Span]) -> list[Any]:
        return [(b, e, [(places[t], seconds) for t, seconds in work]) for b, e, work in spans]

    return {
        "worker": lane.totals.worker,
        "name": lane.totals.name,
        "computes": not lane.totals.is_dram,
        "tasks": drawn(lane.tasks),
        "moves": drawn(lane.moves),
    }


def _task(bar: TaskBar, place: int) -> dict[str, Any]:
    """Return one bar; `place` is that of its trial in the list of trials."""
    return {
        "kind": bar.kind,
        "worker": bar.task.worker,
        "trial": place,
        "epoch": bar.task.epoch,
        "partition": bar.task.partition,
        "lane": bar.lane,
        "assigned": bar.assigned,
        "wait": bar.wait,
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def _cells(params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each value as it is shown, and in full."""
    cells = {}
    for name, value in params.items():
        full = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text = number(value) if isinstance(value, float) else full
        cells[name] = {"text": text, "full": full}
    return cells
