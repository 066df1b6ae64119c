"""Says how much each parameter of a run matters, by Optuna's functional ANOVA.

The algorithm is Hutter, Hoos and Leyton-Brown's, "An Efficient Approach for Assessing
Hyperparameter Importance" (ICML 2014).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import isfinite
from statistics import fmean
from typing import Any

from cerebro_hydra.observe.view import RunView, TrialView

FEWEST_TRIALS = 10

_MOST_OPTIONS = 8  # Optuna's work doubles with each further one: with 30 it would never end

_DECADES = 20  # a parameter whose values span more than this factor is taken as a logarithm


@dataclass(frozen=True)
class Importance:
    """Holds the share of each parameter, the largest first, or why there is none.

    Attributes:
        shares: from 0 to 1, which add up to 1.
        note: a sentence on what was compared, or on what is missing.
    """

    note: str
    shares: Mapping[str, float] = field(default_factory=dict)


def importance_of(view: RunView, now: bool) -> Importance:
    """Return how much of what trials have measured each parameter explains.

    Trials are compared by the best that they have measured within as many epochs as all of them
    have ended, whoever has trained on. That takes seconds, and is done if asked for `now`.
    """
    trials = [trial for trial in view.trials.values() if _ended(trial)]
    epochs = min((len(trial.epochs) for trial in trials), default=0)
    measured = [(trial, _best(view, trial, epochs)) for trial in trials]
    known = [(dict(_parts(trial.params)), value) for trial, value in measured if isfinite(value)]
    if len(known) < FEWEST_TRIALS:
        return Importance(
            f"How much each parameter matters is told from {FEWEST_TRIALS} trials on that have "
            f"measured {view.metric}; here {len(known)} have."
        )
    if not now:
        return Importance("How much each parameter matters: cerebro-hydra report tells it.")
    if find_spec("optuna") is None or find_spec("sklearn") is None:
        return Importance(
            "How much each parameter matters is told where Optuna is installed: "
            "pip install 'cerebro-hydra[optuna]', then cerebro-hydra report."
        )
    shares = _shares(known)
    if not shares:
        return Importance("No parameter that all trials have takes several values.")
    return Importance(
        f"The share of each parameter, alone and with others, in what makes {view.metric} differ "
        f"within {_epochs(epochs)}, which {len(known)} trials have ended: Optuna's functional "
        "ANOVA.",
        shares,
    )


def _ended(trial: TrialView) -> bool:
    return bool(trial.epochs) and trial.status in ("finished", "stopped", "paused")


def _epochs(count: int) -> str:
    return "the first epoch" if count == 1 else f"the first {count} epochs"


def _best(view: RunView, trial: TrialView, epochs: int) -> float:
    values = [value for value in trial.history.get(view.metric, ())[:epochs] if isfinite(value)]
    best = min if view.direction == "min" else max
    return best(values, default=float("nan"))


def _parts(params: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested parameters, by its path."""
    for name, value in params.items():
        if isinstance(value, dict):
            yield from _parts(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _shares(known: list[tuple[dict[str, Any], float]]) -> dict[str, float]:
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study()
        common = [name for name in known[0][0] if all(name in params for params, _ in known)]
        measured = [value for _, value in known]
        columns = {name: [params[name] for params, _ in known] for name in common}
        columns = {name: _few_or_ranked(values, measured) for name, values in columns.items()}
        found = {name: _distribution(values) for name, values in columns.items()}
        kinds = {name: kind for name, kind in found.items() if kind is not None}
        for number, value in enumerate(measured):
            params = {name: _value(columns[name][number], kinds[name]) for name in kinds}
            study.add_trial(optuna.create_trial(params=params, distributions=kinds, value=value))
        if not kinds or len(set(measured)) == 1:
            return {}
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        shares: dict[str, float] = optuna.importance.get_param_importances(
            study, evaluator=evaluator
        )
        return shares
    finally:
        optuna.logging.set_verbosity(before)


def _few_or_ranked(values: list[Any], measured: list[float]) -> list[Any]:
    """Return values, or in place of many options the rank of each by the mean measured with it.

    The best split of a regression tree parts options in that order.
    """
    if _are_numbers(values):
        return values
    found: dict[str, list[float]] = defaultdict(list)
    for value, each in zip(values, measured, strict=True):
        found[_text(value)].append(each)
    if len(found) <= _MOST_OPTIONS:
        return values
    ranked = sorted(found, key=lambda option: (fmean(found[option]), option))
    ranks = {option: rank for rank, option in enumerate(ranked)}
    return [ranks[_text(value)] for value in values]


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)


def _distribution(values: list[Any]) -> Any:
    """Return what Optuna calls these values; None if they are all the same."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if _are_numbers(values):
        low, high = float(min(values)), float(max(values))
        log = low > 0 and high >= _DECADES * low
        return FloatDistribution(low, high, log=log) if low < high else None
    options = sorted({_text(each) for each in values})
    return CategoricalDistribution(options) if len(options) > 1 else None


def _value(value: Any, kind: Any) -> Any:
    return float(value) if not hasattr(kind, "choices") else _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
