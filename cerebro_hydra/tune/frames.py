"""Returns the trials of a search as pandas DataFrames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from cerebro_hydra.tune.trial import Trial


def by_trial(trials: Iterable[Trial]) -> pd.DataFrame:
    """Return one row per trial, with the metrics of its result; absent values are missing."""
    return pd.DataFrame(
        {
            "trial_id": trial.trial_id,
            "status": trial.status,
            **_params(trial),
            **trial.result_metrics,
            "epochs": len(next(iter(trial.history.values()), ())),
            "result_epoch": trial.result_epoch,
            "seconds": trial.seconds,
            "error": trial.error,
        }
        for trial in trials
    ).astype({"result_epoch": "Int64"})


def by_epoch(trials: Iterable[Trial]) -> pd.DataFrame:
    """Return one row per trial and ended epoch, for plots and group-by."""
    return pd.DataFrame(
        {"trial_id": trial.trial_id, "epoch": epoch, **_params(trial), **trial.metrics_of(epoch)}
        for trial in trials
        for epoch in range(1, 1 + len(next(iter(trial.history.values()), ())))
    )


def _params(trial: Trial) -> dict[str, Any]:
    return {f"param_{name}": value for name, value in trial.params.items()}
