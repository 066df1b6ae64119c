"""A device takes any run at random, to compare SHARP with."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from cerebro_hydra.plan.schedules.candidate import Candidate, Rule


def at_random(seed: int) -> Rule:
    """Return a rule that picks by chance; a seed gives one order of choices."""
    chance = Random(seed)

    def pick(candidates: Sequence[Candidate]) -> Candidate:
        return chance.choice(candidates)

    return pick
