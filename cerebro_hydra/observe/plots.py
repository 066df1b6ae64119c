"""Plots a run with matplotlib: learning curves, parameters against the metric, devices' lanes."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.observe.text import metric_title, parameter_names
from cerebro_hydra.observe.timeline import Timeline
from cerebro_hydra.observe.view import RunView, TrialView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, as in the report; colour-blind people tell the colours apart.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#a3960c", "#3c3f46")
_GREY = (0.39, 0.42, 0.45)

_COLUMNS = 3


def plot(view: RunView, parameters: Sequence[str] = ()) -> Figure:
    """Plot each measured name by epoch, then each parameter against the evaluation metric.

    The best eight trials have a colour each; the others are grey.

    Raises:
        SetupError: matplotlib is not installed.
        ConfigurationError: no trial has a parameter of that name.
    """
    known = parameter_names(view)
    for name in parameters:
        if name not in known:
            raise ConfigurationError(f"there is no parameter {name!r}; there are {known}")
    measured = list(view.measured())
    count = len(measured) + len(parameters)
    columns, rows = min(count, _COLUMNS), math.ceil(count / _COLUMNS)
    figure = _figure(4.2 * columns, 3.2 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[count:]:
        axes.remove()
    panels = grid[:count]
    ranked = view.best_first()
    for axes, name in zip(panels, measured, strict=False):
        for place, trial in reversed(list(enumerate(ranked))):
            values = trial.history.get(name, [])
            epochs = range(1, len(values) + 1)
            axes.plot(epochs, values, marker=".", color=_colour(place), label=trial.trial_id)
        axes.set(title=_text(metric_title(view) if name == view.metric else name), xlabel="epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        shown = [value for trial in ranked for value in trial.history.get(name, [])]
        if view.falls(name) and _span_decades([value for value in shown if math.isfinite(value)]):
            axes.set_yscale("log")
    for axes, name in zip(panels[len(measured) :], parameters, strict=True):
        _against(axes, name, ranked, view)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[measured.index(view.metric)].get_legend_handles_labels()
    most = slice(None, -len(_COLOURS) - 1, -1)
    figure.legend(handles[most], labels[most], loc="outside right upper", frameon=False)
    return figure


def plot_devices(view: RunView, timeline: Timeline) -> Figure:
    """Plot what each device of the workers' shard queues did when.

    A lane is as high as the device was busy, in the colours of its trials; the line below it is as
    dark as it copied shards.

    Raises:
        SetupError: matplotlib is not installed.
        ConfigurationError: no worker had shard queues.
    """
    lanes = [each for each in timeline.lanes.values() if not each.totals.is_dram]
    if not lanes:
        raise ConfigurationError(
            "no worker of this run had shard queues; give the backend device_memory= or "
            "devices_per_worker="
        )
    figure = _figure(10, 0.9 + 0.8 * len(lanes))
    rows = figure.subplots(len(lanes), 1, sharex=True, squeeze=False).ravel()
    ranked = view.best_first()
    for axes, lane in zip(rows, lanes, strict=True):
        bottoms = [0.0] * len(lane.tasks)
        begins, widths = [b for b, _, _ in lane.tasks], [e - b for b, e, _ in lane.tasks]
        for place, trial in enumerate(ranked):
            work = [dict(each).get(trial.trial, 0.0) for _, _, each in lane.tasks]
            shares = [each / max(width, 1e-9) for each, width in zip(work, widths, strict=True)]
            style: dict[str, Any] = {"color": _colour(place), "label": trial.trial_id}
            axes.bar(begins, shares, widths, bottoms, align="edge", **style)
            bottoms = [sum(pair) for pair in zip(bottoms, shares, strict=True)]
        copied = [(begin, end - begin, sum(s for _, s in work)) for begin, end, work in lane.moves]
        shades = [(*_GREY, min(1.0, max(0.25, busy / max(w, 1e-9)))) for _, w, busy in copied]
        axes.broken_barh([each[:2] for each in copied], (-0.22, 0.14), color=shades)
        axes.set(ylim=(-0.25, 1), yticks=[], facecolor="#f1f2f4")
        name = f"worker {lane.totals.worker}, {lane.totals.name}  "
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
        axes.spines[:].set_visible(False)
    rows[-1].set_xlabel("seconds since the run began")
    handles, labels = (each[: len(_COLOURS)] for each in rows[0].get_legend_handles_labels())
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    return figure


def _figure(width: float, height: float) -> Figure:
    """Return an empty figure that a notebook shows without a backend of its own."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetupError(
            "plots need matplotlib; install it with pip install 'cerebro-hydra[notebook]'"
        ) from error

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    # Not through pyplot, which keeps every figure and picks a backend.
    return Shown(figsize=(width, height), layout="constrained")


def _against(axes: Any, name: str, ranked: Sequence[TrialView], view: RunView) -> None:
    values, scores, colours = list[Any](), list[float](), list[str]()
    for place, trial in enumerate(ranked):
        score = view.score(trial)
        if score is not None and math.isfinite(score) and name in trial.params:
            values.append(trial.params[name])
            scores.append(score)
            colours.append(_colour(place))
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    axes.scatter(values if numeric else [_text(str(v)) for v in values], scores, c=colours)
    if numeric and _span_decades(values):
        axes.set_xscale("log")
    axes.set(title=_text(f"{view.metric} by {name}"), xlabel=_text(name))


def _span_decades(values: Sequence[float]) -> bool:
    """Return whether a logarithmic axis suits the values better."""
    return bool(values) and min(values) > 0 and max(values) >= 20 * min(values)


def _text(text: str) -> str:
    """Escape dollars, because matplotlib reads formulas between them."""
    return text.replace("$", r"\$")


def _colour(place: int) -> str:
    return _COLOURS[place] if place < len(_COLOURS) else "#b4b8c0"
