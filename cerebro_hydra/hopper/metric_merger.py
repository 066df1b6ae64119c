"""Lets the user's code merge custom metrics, and turns what it gives or raises into events."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.events import MetricsMerged, MetricsMergeFailed
from cerebro_hydra.plan.hop_config import TrialConfig
from cerebro_hydra.plan.instructions import MergeMetrics

MergeStates = Callable[[int, list[dict[str, Any]]], dict[str, float]]
"""Merges what a trial's custom metrics made of each validation partition, in partition order."""


class MetricMerger:
    """Carries out `MergeMetrics`.

    Args:
        merge: the user's code; None if no trial has custom metrics.
        trials: the trials of the run.

    Raises:
        ConfigurationError: a trial has custom metrics and there is no `merge`.
    """

    def __init__(self, merge: MergeStates | None, trials: Iterable[TrialConfig]) -> None:
        self._merge = merge
        for trial in trials:
            if merge is None and trial.custom_metrics:
                raise ConfigurationError(
                    f"trial {trial.trial} has the custom metrics {list(trial.custom_metrics)}, and "
                    "nothing merges them; pass merge_metrics= to the Coordinator"
                )

    def merged(
        self, task: MergeMetrics, names: Iterable[str]
    ) -> MetricsMerged | MetricsMergeFailed:
        """Return the answer to a task, whose trial has custom metrics of these names."""
        named = (task.attempt, task.trial, task.epoch)
        assert self._merge is not None
        try:
            values = self._merge(task.trial, list(task.states))
            if values.keys() != set(names):
                raise ConfigurationError(
                    f"the custom metrics are {list(names)}, but {sorted(values)} were measured; "
                    "return one value for each"
                )
            return MetricsMerged(*named, {name: float(values[name]) for name in names})
        except Exception:
            return MetricsMergeFailed(*named, traceback.format_exc())
