"""Lets the user's code merge custom metrics, and turns what it gives or raises into events."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.trial_source import MergeStates
from cerebro_hydra.plan.events import MetricsMerged, MetricsMergeFailed
from cerebro_hydra.plan.instructions import MergeMetrics


class MetricMerger:
    """Carries out `MergeMetrics` with what `merge` gives."""

    def __init__(self, merge: MergeStates) -> None:
        self._merge = merge

    def merged(
        self, task: MergeMetrics, names: Iterable[str]
    ) -> MetricsMerged | MetricsMergeFailed:
        """Return the answer to a task, whose trial has custom metrics of these names."""
        named = (task.attempt, task.trial, task.epoch)
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
