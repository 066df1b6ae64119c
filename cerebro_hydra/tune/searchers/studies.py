"""Copies a study of Optuna for a run, which neither changes it nor sees what others do to it.

The copy minimises, so that its sampler is told of a metric in either direction. What is kept of a
study in the run's folder is JSON; the marks that samplers leave in it, some of which are pickles,
are not taken.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    check_distribution_compatibility,
    distribution_to_json,
    json_to_distribution,
)
from optuna.pruners import NopPruner
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.tune.searchers.optuna_space import OptunaSpace

_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


class StudyOfRun(optuna.Study):
    """Is a study in memory; a sampler that has nothing left to draw says so by `stop`."""

    exhausted = False

    def stop(self) -> None:
        """Note that the sampler has drawn all that it can."""
        self.exhausted = True


def study_of_run(sampler: BaseSampler, seed: int, known: Sequence[Mapping[str, Any]]) -> StudyOfRun:
    """Return a study whose sampler, a copy, draws by this seed and knows these trials.

    Those that wait in a given study are the first to be drawn.
    """
    storage = InMemoryStorage()
    with _quiet():
        storage.create_new_study([StudyDirection.MINIMIZE], "run")
        study = StudyOfRun("run", storage, _seeded(copy.deepcopy(sampler), seed), NopPruner())
        for each in known:
            if each["state"] == TrialState.WAITING.name:
                study.enqueue_trial(each["params"])
            else:
                study.add_trial(_trial(each))
    return study


@contextmanager
def _quiet() -> Iterator[None]:
    """Tell nobody of a study that no user made."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _seeded(sampler: BaseSampler, seed: int) -> BaseSampler:
    """Let all random numbers of a sampler, and of those that it asks, begin at a seed."""
    number, seen, left = seed % 2**32, set[int](), list[Any]([sampler])
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        match each:
            case np.random.RandomState() | Random():
                each.seed(number)
            case np.random.Generator():
                each.bit_generator.state = type(each.bit_generator)(number).state
            case _ if isinstance(each, BaseSampler) or _is_of_optuna(each):
                if hasattr(each, "rng"):  # made when it is used first
                    left.append(each.rng)
                left += vars(each).values()
    return sampler


def _is_of_optuna(value: Any) -> bool:
    return type(value).__module__.startswith("optuna.") and hasattr(value, "__dict__")


# ---------------------------------------------------------------------- a study as JSON


def study_to_json(study: optuna.Study) -> dict[str, Any]:
    """Return what a run knows of a study: its trials that have ended, and those that wait."""
    sign = -1 if study.direction is StudyDirection.MAXIMIZE else 1
    return {
        "name": study.study_name,
        "trials": [
            _trial_to_json(trial, sign)
            for trial in study.get_trials(deepcopy=False)
            if trial.state in (*_FINISHED, TrialState.WAITING)
        ],
    }


def _trial_to_json(trial: FrozenTrial, sign: int) -> dict[str, Any]:
    known: dict[str, Any] = {"number": trial.number, "state": trial.state.name}
    if trial.state is TrialState.WAITING:
        return {**known, "params": trial.system_attrs.get("fixed_params", {})}
    # JSON has no infinity, so numbers are text.
    measured = trial.intermediate_values.items()
    return {
        **known,
        "params": trial.params,
        "distributions": {
            name: distribution_to_json(each) for name, each in trial.distributions.items()
        },
        "value": None if trial.values is None else repr(sign * trial.values[0]),
        "measured": {str(step): repr(sign * value) for step, value in measured},
    }


def _trial(known: Mapping[str, Any]) -> FrozenTrial:
    distributions = {name: json_to_distribution(t) for name, t in known["distributions"].items()}
    return create_trial(
        state=TrialState[known["state"]],
        value=None if known["value"] is None else float(known["value"]),
        params=dict(known["params"]),
        distributions=distributions,
        intermediate_values={int(step): float(v) for step, v in known["measured"].items()},
    )


def check_known(study: Mapping[str, Any], space: OptunaSpace) -> None:
    """Refuse a study of which a trial is of another space.

    Raises:
        ConfigurationError: a trial has another parameter, another kind of it, or lacks one; or one
            that waits has a value that the space has not.
    """
    for trial in study["trials"]:
        try:
            if trial["state"] == TrialState.WAITING.name:
                for path, value in trial["params"].items():
                    space.check(path, value)
            else:
                _check_finished(trial, space)
        except ValueError as error:
            raise ConfigurationError(
                f"the study {study['name']!r} is of another space than search_space: its trial "
                f"{trial['number']} does not fit, because {error}\ngive a study of this space, or "
                "none"
            ) from error


def _check_finished(trial: Mapping[str, Any], space: OptunaSpace) -> None:
    for name, text in trial["distributions"].items():
        if name not in space.distributions:
            raise ValueError(f"it has the parameter {name!r}, which search_space has not")
        try:
            check_distribution_compatibility(json_to_distribution(text), space.distributions[name])
        except ValueError as error:
            raise ValueError(f"{name!r} is {json_to_distribution(text)} there: {error}") from error
    lacking = [name for name in space.names if name not in trial["params"]]
    if lacking and trial["state"] == TrialState.COMPLETE.name:
        raise ValueError(f"it lacks the parameters {lacking}")
