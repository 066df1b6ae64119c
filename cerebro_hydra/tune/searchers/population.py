"""Trains a population, whose worst give way to forks of the best with parameters that changed.

All members rest after so many epochs. Then each of the worst is stopped, and one of the best goes
on in its place as a fork: from the parent's state, with parameters that were drawn anew or moved.
So what is decided depends on what was measured, and not on who came first.

The algorithm is Jaderberg et al.'s, "Population Based Training of Neural Networks" (2017), with the
quantiles and factors that Ray Tune has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import ceil
from random import Random
from typing import Any

from cerebro_hydra.plan.hop.ranking import Measured, ranked
from cerebro_hydra.tune.searchers.searcher import (
    Fork,
    Pause,
    SearchDecision,
    SearchedRun,
    Stop,
    TrainTo,
)
from cerebro_hydra.tune.searchers.space import (
    Choice,
    Dimension,
    Integer,
    LogUniform,
    Uniform,
    is_nested,
)

FACTORS = (1.2, 0.8)
"""By one of them a number is multiplied that is not drawn anew."""


class Population:
    """Is the searcher of `PBTSearch`.

    Args:
        candidates: the members that begin.
        rungs: the epochs after which members are compared, ascending; the last one is their end.
        quantile: the share of the members that give way, and that are forked, rounded up.
        mutation: changes the parameters of a fork.
        random: chooses who is forked.
        run: says which metric is compared.
    """

    def __init__(
        self,
        candidates: Sequence[Mapping[str, Any]],
        rungs: Sequence[int],
        quantile: float,
        mutation: Mutation,
        random: Random,
        run: SearchedRun,
    ) -> None:
        self._candidates, self._rungs, self._quantile = candidates, rungs, quantile
        self._mutation, self._random, self._run = mutation, random, run
        self._params: list[Mapping[str, Any]] = []  # of every trial, by number
        self._level = 0
        self._training: set[int] = set()
        self._resting: dict[int, Measured | None] = {}  # None where the metric was no number
        self.epochs = rungs[0]

    @property
    def closed(self) -> bool:
        """Whether the last members train to their end, or none is left."""
        return self._begun and (self._at_last_rung or not self._training)

    @property
    def _begun(self) -> bool:
        return len(self._params) >= len(self._candidates)

    @property
    def _at_last_rung(self) -> bool:
        return self._level == len(self._rungs) - 1

    def ask(self) -> Mapping[str, Any] | None:
        """Return the next member that begins."""
        if self._begun:
            return None
        self._training.add(len(self._params))
        self._params.append(self._candidates[len(self._params)])
        return self._params[-1]

    def tell(
        self, trial: int, epochs: int, metrics: Mapping[str, float] | None
    ) -> list[SearchDecision]:
        """Let a member rest at its rung; go on once all are there."""
        rung, decided = self._rungs[self._level], list[SearchDecision]()
        if metrics is None:
            self._training.discard(trial)
            self._resting.pop(trial, None)
        elif trial in self._training and epochs == rung and not self._at_last_rung:
            self._training.remove(trial)
            self._resting[trial] = Measured.of(metrics, self._run.metric, epochs, trial)
            decided.append(Pause(trial, rung))
        if self._begun and self._resting and not self._training and not self._at_last_rung:
            decided += self._compared(rung)
        return decided

    def _compared(self, rung: int) -> list[SearchDecision]:
        """Let members go on to the next rung, some of them as forks of others."""
        numbers = [each for _, each in sorted(self._resting.items()) if each is not None]
        order = [each.trial for each in ranked(numbers, self._run.direction())] if numbers else []
        order += sorted(self._resting.keys() - set(order))
        count = min(ceil(len(order) * self._quantile), len(numbers), len(order) // 2)
        best, worst = order[:count], sorted(order[len(order) - count :])
        self._level += 1
        next_rung = self._rungs[self._level]
        self._training, self._resting = set(order[: len(order) - count]), {}
        decided = list[SearchDecision]()
        for trial in worst:
            parent = self._random.choice(best)
            params = self._mutation.of(self._params[parent], self._random)
            fork = len(self._params)
            why = f"among the worst {count} of {len(order)} trials after epoch {rung}, so that"
            decided += [
                Stop(trial, f"{why} trial {fork}, a fork of trial {parent}, takes its place"),
                Fork(parent, params, next_rung),
            ]
            self._params.append(params)
            self._training.add(fork)
        kept = order[: len(order) - count]
        return [*decided, *(TrainTo(trial, next_rung) for trial in sorted(kept))]


class Mutation:
    """Changes parameters of a trial: each is drawn anew, or moves a little within its space.

    Args:
        space: of the parameters that change; the others stay as they are.
        resample: how likely one is drawn anew.
    """

    def __init__(self, space: Mapping[str, Dimension], resample: float) -> None:
        self._space, self._resample = dict(space), resample

    def of(self, params: Mapping[str, Any], random: Random) -> dict[str, Any]:
        """Return changed parameters."""
        changed = dict(params)
        for name, dimension in self._space.items():
            anew = random.random() < self._resample
            value = params[name]
            changed[name] = dimension.sample(random) if anew else _moved(dimension, value, random)
        return changed


def _moved(dimension: Any, value: Any, random: Random) -> Any:
    """Return a number times a factor, or an option beside another one, as the space has them."""
    match dimension:
        case Choice(options):
            number = next(n for n, option in enumerate(options) if _is_of(option, value))
            if is_nested(options[number]):
                return _moved(options[number], value, random)
            number = min(max(number + random.choice((-1, 1)), 0), len(options) - 1)
            option = options[number]
            return _sampled(option, random)
        case Integer(low, high, step):
            factor = random.choice(FACTORS)
            least = 1 if factor > 1 else -1
            steps = (value - low) // step
            moved = round((value * factor - low) / step)
            moved = moved if moved != steps else steps + least
            return low + min(max(moved, 0), (high - low) // step) * step
        case LogUniform(low, high):
            return min(max(value * random.choice(FACTORS), low), high)
        case Uniform(low, high, quantum, log):
            ends = (10.0**low, 10.0**high) if log else (low, high)
            moved = min(max(value * random.choice(FACTORS), ends[0]), ends[1])
            if quantum is None:
                return moved
            return round(moved / quantum) * (int(quantum) if quantum.is_integer() else quantum)
        case dict():
            return {name: _moved(each, value[name], random) for name, each in dimension.items()}
    return value


def _sampled(option: Any, random: Random) -> Any:
    return Choice((option,)).sample(random)


def _is_of(option: Any, value: Any) -> bool:
    """Return whether a value is of an option of a choice."""
    if isinstance(option, Choice):
        return any(_is_of(each, value) for each in option.options)
    if isinstance(option, Dimension):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(option, dict) and is_nested(option):
        alike = isinstance(value, dict) and value.keys() == option.keys()
        return alike and all(_is_of(each, value[name]) for name, each in option.items())
    return json.dumps(option) == json.dumps(value)
