"""Proposes what a sampler of Optuna draws, which is told of the trials by their numbers.

Some trials train at once. Before trial n is drawn, the sampler is told of exactly those trials that
come `at_once` or more before it, whoever has ended meanwhile; of the others it knows that they
train. So what is drawn depends on what was measured, and not on who came first.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isnan, nan
from typing import Any

import optuna
from optuna.trial import TrialState

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.foreign_text import named_error_text
from cerebro_hydra.tune.searchers.optuna_space import OptunaSpace
from cerebro_hydra.tune.searchers.searcher import SearchDecision, SearchedRun
from cerebro_hydra.tune.searchers.studies import StudyOfRun


def draw(study: StudyOfRun, space: OptunaSpace) -> tuple[optuna.Trial, dict[str, Any]]:
    """Return what the sampler of a study draws next, as its trial and as parameters.

    Raises:
        ConfigurationError: the sampler draws what the space does not have, or fails.
    """
    try:
        trial = study.ask()
        return trial, space.suggested(trial)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the sampler {type(study.sampler).__name__} draws no candidate of search_space: "
            f"{named_error_text(error).rstrip('.')}; give a sampler of these "
            "parameters, bounds and scales"
        ) from error


class SampledCandidates:
    """Is the searcher of `OptunaSearch` and `TPESearch`; every trial trains all epochs.

    A trial that is over before its last epoch counts by what it has measured until then, and as
    failed if that is nothing.

    Args:
        space: what may be drawn.
        study: of this run alone; its sampler draws.
        count: the most candidates; fewer if the sampler says that nothing is left.
        epochs: how many each of them trains.
        at_once: how many may train at the same time.
        run: says which metric is told.
        keeps_best: whether a trial's best epoch is told, or its last one.
    """

    def __init__(
        self,
        space: OptunaSpace,
        study: StudyOfRun,
        count: int,
        epochs: int,
        at_once: int,
        run: SearchedRun,
        keeps_best: bool,
    ) -> None:
        self.epochs = epochs
        self._space, self._study, self._run = space, study, run
        self._count, self._at_once, self._keeps_best = count, at_once, keeps_best
        self._drawn: list[optuna.Trial] = []  # by number
        self._values: list[float] = []  # by number, of those that have not ended too
        self._ended: set[int] = set()
        self._told = 0  # of how many trials the sampler knows the end

    @property
    def closed(self) -> bool:
        """Whether nothing more is drawn."""
        return len(self._drawn) == self._count or self._study.exhausted

    def ask(self) -> Mapping[str, Any] | None:
        """Return the next draw, if all have ended that must be told before.

        Raises:
            ConfigurationError: the sampler draws what the space does not have, or fails.
        """
        while self._told <= len(self._drawn) - self._at_once:
            if self._told not in self._ended:
                return None
            self._tell_sampler(self._told)
            self._told += 1
        if self.closed:
            return None
        trial, params = draw(self._study, self._space)
        self._drawn.append(trial)
        self._values.append(nan)
        return params

    def tell(
        self, trial: int, epochs: int, metrics: Mapping[str, float] | None
    ) -> list[SearchDecision]:
        """Note what a trial has measured; nothing is decided."""
        if metrics is not None and trial not in self._ended:
            self._measured(trial, metrics.get(self._run.metric, nan))
        if metrics is None or epochs == self.epochs:
            self._ended.add(trial)
        return []

    def _measured(self, trial: int, value: float) -> None:
        signed = value if self._run.direction() == "min" else -value
        signed = nan if signed == -inf else signed  # it has overflowed, which is no success
        before = self._values[trial]
        if not self._keeps_best or isnan(before) or signed < before:
            self._values[trial] = signed

    def _tell_sampler(self, trial: int) -> None:
        value = self._values[trial]
        if isnan(value):
            self._study.tell(self._drawn[trial], state=TrialState.FAIL)
        else:
            self._study.tell(self._drawn[trial], value)
