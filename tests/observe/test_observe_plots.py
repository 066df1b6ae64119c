from __future__ import annotations

from typing import Any

import pytest

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.observe import RunView
from tests.observe.conftest import begin, fold
from tests.observe.test_observe_devices import folded

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
from cerebro_hydra.observe.plots import plot, plot_devices


@pytest.fixture
def view(simulate: Any) -> RunView:
    return fold(simulate(3, loss=lambda trial, epoch: 1.0 / (1 + trial + epoch))[1])


def test_a_panel_per_metric_with_a_line_per_trial_and_one_per_parameter(view: RunView) -> None:
    figure = plot(view, ["lr"])
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:2] == ["train_loss", "val_loss (lower is better)"]
    assert titles[-1] == "val_loss by lr"
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[1].lines}
    assert lines == {trial.trial_id: trial.history["val_loss"] for trial in view.trials.values()}
    assert len(figure.axes[-1].collections[0].get_offsets()) == 3
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_names_and_values_are_no_formulas() -> None:
    name = "$\\bad{$"
    metrics = {"loss": "min", name: "max"}
    view = fold(begin(1, metrics=metrics, evaluation_metric=name, params={name: name}))
    view.trials[0].status = "finished"
    view.trials[0].epochs[0] = {"train_loss": 1.0, "val_loss": 1.0, f"val_{name}": 1.0}
    assert plot(view, [name])._repr_png_().startswith(b"\x89PNG")


def test_an_unknown_parameter_is_named(view: RunView) -> None:
    with pytest.raises(ConfigurationError, match=r"no parameter 'depth'; there are \['lr'\]"):
        plot(view, ["depth"])


def test_a_falling_metric_over_decades_has_a_log_axis(simulate: Any) -> None:
    for steepness, scale in ((10.0, "log"), (1.1, "linear")):
        _, records = simulate(3, loss=lambda trial, epoch, s=steepness: s**-epoch)
        assert plot(fold(records)).axes[1].get_yscale() == scale


def test_a_lane_per_device_is_as_high_as_the_device_was_busy() -> None:
    figure = plot_devices(*folded())
    lanes = [axes.get_ylabel().strip() for axes in figure.axes]
    assert lanes == ["worker 0, device 0", "worker 0, device 1"]
    (first, *_), (second, *_) = figure.axes[0].containers  # a bar per span, for each trial
    assert (first.get_x(), first.get_width(), first.get_height()) == (6.5, 1.0, 1.0)
    assert second.get_height() == 0.0
    shared = [bars[1] for bars in figure.axes[0].containers]
    assert [(bar.get_y(), bar.get_height()) for bar in shared] == [(0.0, 0.25), (0.25, 0.5)]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_run_without_queues_has_no_devices_to_plot() -> None:
    with pytest.raises(ConfigurationError, match="give the backend device_memory="):
        plot_devices(*folded(0))
