"""Trains brackets of successive halving whose candidates a sampler draws by what rungs measured.

This is BOHB. The brackets begin one after the other. What the sampler knows when it draws a
candidate follows from the candidate's number, and not from who came first:

- of the bracket that is drawn, and all before it, the first rung of every candidate that comes
  `at_once` or more before;
- rung k of each bracket, counted from 0, for the bracket that begins k + 1 later, and those after.

So while a bracket begins, the trials that are left of those before it train on, and nobody waits
for the last one of a bracket.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, nan
from random import Random
from typing import Any

import optuna
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, create_trial

from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.tune.searchers.optuna_space import OptunaSpace
from cerebro_hydra.tune.searchers.rungs import Bracket
from cerebro_hydra.tune.searchers.sampled import draw
from cerebro_hydra.tune.searchers.searcher import SearchDecision, SearchedRun, TrainTo
from cerebro_hydra.tune.searchers.studies import study_of_run
from cerebro_hydra.tune.searchers.successive_halving import SuccessiveHalving

RANDOM_FRACTION = 1 / 3
"""The share of candidates that are drawn at random, so that no model can mislead for good."""

_GOOD, _TRIED = 0.15, 64  # the share of good trials; draws of their density, of which one is taken


class ModelledBrackets:
    """Is the searcher of `BOHBSearch`.

    A trial that is over before its rung counts there by what it has measured last, and as the worst
    of all if that is nothing.

    Args:
        space: what may be drawn.
        brackets: how many trials begin together, and after which epochs they are compared.
        eta: one of so many goes on from a rung.
        at_once: how many trials of the first rungs may train at the same time.
        seed: of the draws.
        run: says which metric is compared, and told.
    """

    def __init__(
        self,
        space: OptunaSpace,
        brackets: Sequence[Bracket],
        eta: int,
        at_once: int,
        seed: int,
        run: SearchedRun,
    ) -> None:
        self._space, self._at_once, self._seed, self._run = space, at_once, seed, run
        self._bracket_of = [at for at, each in enumerate(brackets) for _ in range(each.trials)]
        self._rungs = [bracket.rungs for bracket in brackets]
        self._candidates: list[Mapping[str, Any]] = []  # grows; the decider proposes what is there
        self._halving = SuccessiveHalving(self._candidates, brackets, self._bracket_of, eta, run)
        self.epochs = self._halving.epochs
        self._drawn: list[_Drawn] = []  # by number
        # A density of so many dimensions needs one more point than they are, and two bad ones.
        self._enough = len(space.distributions) + 3

    @property
    def closed(self) -> bool:
        """Whether every bracket has sent its last trials to their last epoch."""
        return self._halving.closed

    def ask(self) -> Mapping[str, Any] | None:
        """Return the next draw, if all was measured that the sampler must know.

        Raises:
            ConfigurationError: the sampler fails.
        """
        number = len(self._drawn)
        if number < len(self._bracket_of) and self._may_draw(number):
            trial, params = self._draw(number)
            rung = self._rungs[self._bracket_of[number]][0]
            self._drawn.append(_Drawn(dict(trial.params), dict(trial.distributions), rung))
            self._candidates.append(params)
        proposed, self.epochs = self._halving.ask(), self._halving.epochs
        return proposed

    def tell(
        self, trial: int, epochs: int, metrics: Mapping[str, float] | None
    ) -> list[SearchDecision]:
        """Note what a trial has measured at its rung, and decide as successive halving does."""
        drawn = self._drawn[trial]
        if metrics is None:
            drawn.end()
        else:
            value = metrics.get(self._run.metric, nan)
            drawn.measure(epochs, value if self._run.direction() == "min" else -value)
        decided = self._halving.tell(trial, epochs, metrics)
        for each in decided:
            if isinstance(each, TrainTo):
                self._drawn[each.trial].next_rung = each.epochs
        return decided

    # ------------------------------------------------------------------ what is known, and when

    def _may_draw(self, number: int) -> bool:
        begun = number - self._at_once + 1
        rungs_decided = all(
            self._halving.decided(bracket, level)
            for bracket in range(self._bracket_of[number])
            for level in self._known_levels(bracket, number)
        )
        return rungs_decided and all(
            self._rungs[self._bracket_of[trial]][0] in self._drawn[trial].values
            for trial in range(begun)
        )

    def _known_levels(self, bracket: int, number: int) -> range:
        """Return the rungs of a bracket behind its first that candidate `number` is drawn by."""
        last = len(self._rungs[bracket]) - 1  # where nothing is decided
        return range(1, min(self._bracket_of[number] - bracket, last))

    def _known(self, number: int) -> dict[int, dict[int, float]]:
        """Return what candidate `number` is drawn by: of each rung, the trials' values."""
        known: dict[int, dict[int, float]] = {}
        for trial, drawn in enumerate(self._drawn):
            bracket = self._bracket_of[trial]
            levels = [0] if trial <= number - self._at_once else []
            for level in (*levels, *self._known_levels(bracket, number)):
                rung = self._rungs[bracket][level]
                if rung in drawn.values:
                    known.setdefault(rung, {})[trial] = drawn.values[rung]
        return known

    # ------------------------------------------------------------------ the model

    def _draw(self, number: int) -> tuple[optuna.Trial, dict[str, Any]]:
        seed = seed_of(self._seed, "BOHB", number)
        known = self._known(number)
        rungs = [rung for rung, values in known.items() if len(values) >= self._enough]
        if not rungs or Random(seed).random() < RANDOM_FRACTION:
            return draw(study_of_run(RandomSampler(), seed, ()), self._space)
        study = study_of_run(self._model(), seed, ())
        values = known[max(rungs)]
        study.add_trials(self._drawn[trial].frozen(values[trial]) for trial in sorted(values))
        return draw(study, self._space)

    def _model(self) -> TPESampler:
        """Return one density of all parameters together, with the paper's numbers."""
        least = self._enough - 2
        with warnings.catch_warnings():
            # Optuna's own share, 0.25 of the square root, learns far less from so few trials.
            warnings.filterwarnings("ignore", "`gamma` has been deprecated", FutureWarning)
            return TPESampler(
                n_startup_trials=0,
                n_ei_candidates=_TRIED,
                gamma=lambda count: max(least, ceil(_GOOD * count)),
                multivariate=True,
                constant_liar=False,
            )


@dataclass
class _Drawn:
    """Holds of a trial what Optuna calls its parameters, and what it has measured at rungs."""

    labels: dict[str, Any]
    distributions: dict[str, optuna.distributions.BaseDistribution]
    next_rung: int | None  # None while it rests, or is over
    values: dict[int, float] = field(default_factory=dict)  # by rung; the smaller is the better
    last: float = nan

    def measure(self, epochs: int, value: float) -> None:
        self.last = value
        if epochs == self.next_rung:
            self.end()

    def end(self) -> None:
        if self.next_rung is not None:
            self.values[self.next_rung] = self.last if self.last > -inf else inf
            self.next_rung = None

    def frozen(self, value: float) -> FrozenTrial:
        """Return it as a trial of Optuna that has ended with a value."""
        return create_trial(value=value, params=self.labels, distributions=self.distributions)
